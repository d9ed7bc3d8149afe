import torch
from torch import nn
from vllm.model_executor.layers.mamba.abstract import StateLayer, convolution


class MambaMixer2(StateLayer):
    """Takes the gate, the channels of x, B and C, and the step of each token."""

    n_groups, num_heads, ssm_state_size, head_dim, conv_kernel_size, use_replayssm = 2, 4, 16, 32, 4, False

    def __init__(self, prefix, **options):
        super().__init__(prefix, **options)
        self.tped_intermediate_size, self.tped_dt_size = self.num_heads * self.head_dim, self.num_heads
        self.tped_conv_size = self.tped_intermediate_size + 2 * self.n_groups * self.ssm_state_size
        self.conv1d = convolution(self.tped_conv_size, self.conv_kernel_size, bias=True)
        self.A = nn.Parameter(-0.1 - torch.rand(self.num_heads, dtype=torch.float32), requires_grad=False)
        self.D, self.dt_bias = (nn.Parameter(torch.randn(self.num_heads), requires_grad=False) for _ in range(2))

    def get_state_shape(self):
        return (self.conv_kernel_size - 1 + self.drafts, self.tped_conv_size), (self.num_heads, self.head_dim, self.ssm_state_size)

    def forward(self, rows):
        out = rows.new_zeros(len(rows), self.num_heads * self.head_dim)
        self.conv_ssm_forward(projected_states=rows, output=out)
        return out
