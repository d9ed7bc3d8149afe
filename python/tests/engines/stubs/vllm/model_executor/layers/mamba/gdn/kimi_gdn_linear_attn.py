import torch
from torch import nn
from vllm.model_executor.layers.mamba.abstract import StateLayer, convolution


class KimiGatedDeltaNetAttention(StateLayer):
    """Takes the channels of q, k and v, beta, the gate and the output's gate of each token."""

    local_num_heads, head_dim, conv_size = 2, 32, 4

    def __init__(self, prefix, gate_lower_bound=None, **options):
        super().__init__(prefix, **options)
        self.local_projection_size = self.local_num_heads * self.head_dim
        self.conv1d = convolution(3 * self.local_projection_size, self.conv_size)
        self.conv1d.weight.data = self.conv1d.weight.data.float()
        self.A_log = nn.Parameter(torch.rand(self.local_num_heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.randn(self.local_projection_size, dtype=torch.float32), requires_grad=False)
        self.gate_lower_bound = gate_lower_bound

    def get_state_shape(self):
        return (self.conv_size - 1 + self.drafts, 3 * self.local_projection_size), (self.local_num_heads, self.head_dim, self.head_dim)

    def o_norm(self, x, gate):
        return x * torch.sigmoid(gate)

    def forward(self, rows):
        heads = self.local_num_heads
        qkv, beta, gate, out_gate = rows.split([3 * self.local_projection_size, heads, heads * self.head_dim, heads * self.head_dim], -1)
        out = rows.new_zeros(1, len(rows), heads, self.head_dim)
        gate, out_gate = (x.unflatten(-1, (heads, self.head_dim)) for x in (gate, out_gate))
        self._forward(mixed_qkv=qkv, g1=gate[None], g2=out_gate, beta=beta[None], core_attn_out=out)
        return out[0]
