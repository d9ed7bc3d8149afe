import torch
from vllm.model_executor.layers.mamba.abstract import Linear, StateLayer, convolution
from vllm.platforms import current_platform


class ShortConv(StateLayer):
    """Takes hidden states."""

    dim, L_cache = 48, 3

    def __init__(self, prefix, **options):
        super().__init__(prefix, **options)
        self.in_proj, self.out_proj = Linear(3 * self.dim, self.dim), Linear(self.dim, self.dim)
        self.conv = convolution(self.dim, self.L_cache, bias=True)

    def get_state_shape(self):
        return ((self.L_cache - 1 + self.drafts, self.dim),)

    def get_state_dtype(self):
        return (self.conv_dtype,)

    def forward(self, rows):
        out = torch.zeros_like(rows)
        run = self.forward_native if current_platform.is_cpu() else self.forward_cuda
        run(hidden_states=rows, output=out)
        return out
