import torch
from torch import nn
from vllm.model_executor.layers.mamba.abstract import StateLayer, convolution


class QwenGatedDeltaNetAttention(StateLayer):
    """Takes the channels of q, k and v, beta and the gate of each token, as its projections give them."""

    num_k_heads, num_v_heads, head_k_dim, head_v_dim, conv_kernel_size = 2, 4, 16, 32, 4

    def __init__(self, prefix, **options):
        super().__init__(prefix, **options)
        self.conv_dim = 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim
        self.conv1d = convolution(self.conv_dim, self.conv_kernel_size)
        self.A_log = nn.Parameter(torch.rand(self.num_v_heads, dtype=torch.float32), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.randn(self.num_v_heads), requires_grad=False)
        self.enable_fused_gdn_spec_decode = True
        self._forward_method = self.forward_cpu

    def get_state_shape(self):
        return (self.conv_kernel_size - 1 + self.drafts, self.conv_dim), (self.num_v_heads, self.head_v_dim, self.head_k_dim)

    def get_kv_cache_spec(self, vllm_config):
        raise AssertionError("states that are exported amid a prompt")

    def get_prefill_checkpoint_alignment(self):
        return 64

    def forward_cpu(self, rows):
        raise AssertionError("vLLM's own kernels")

    def forward_cuda(self, rows):
        assert not self.enable_fused_gdn_spec_decode
        qkv, b, a = rows.split([self.conv_dim, self.num_v_heads, self.num_v_heads], -1)
        out = rows.new_zeros(len(rows), self.num_v_heads, self.head_v_dim)
        self._forward_core(qkv, b.contiguous(), a.contiguous(), out)
        return out

    def forward(self, rows):
        return self._forward_method(rows)
