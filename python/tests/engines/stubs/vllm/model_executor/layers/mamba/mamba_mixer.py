import torch
from torch import nn
from vllm.model_executor.layers.mamba.abstract import Linear, StateLayer, convolution


class MambaMixer(StateLayer):
    """Takes hidden states."""

    hidden, channels, ssm_state_size, rank, conv_kernel_size = 24, 48, 16, 8, 4

    def __init__(self, prefix, **options):
        super().__init__(prefix, **options)
        self.in_proj, self.out_proj = Linear(2 * self.channels, self.hidden), Linear(self.hidden, self.channels)
        self.conv1d = convolution(self.channels, self.conv_kernel_size, bias=True)
        self.x_proj = Linear(self.rank + 2 * self.ssm_state_size, self.channels)
        self.dt_proj = Linear(self.channels, self.rank, bias=True, skip_bias_add=True)
        self.A = nn.Parameter(-0.1 - torch.rand(self.channels, self.ssm_state_size, dtype=torch.float32), requires_grad=False)
        self.D = nn.Parameter(torch.randn(self.channels), requires_grad=False)

    def get_state_shape(self):
        return (self.conv_kernel_size - 1, self.channels), (self.channels, self.ssm_state_size)

    def _ssm_transform(self, x):
        dt, B, C = self.x_proj(x)[0].split([self.rank, self.ssm_state_size, self.ssm_state_size], -1)
        return self.dt_proj(dt)[0].transpose(-2, -1), B, C

    def forward(self, rows):
        out = torch.zeros_like(rows)
        self.forward_impl(hidden_states=rows, output=out)
        return out
