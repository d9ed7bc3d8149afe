from math import prod

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import MambaSpec


class MambaBase(AttentionLayerBase):
    def bind_kv_cache(self, pages):
        """pages [blocks, bytes]: a block has the layer's states after one another."""
        states, offset = [], 0
        for shape, dtype in zip(self.get_state_shape(), self.get_state_dtype()):
            size = prod(shape) * dtype.itemsize
            states.append(pages[:, offset : offset + size].view(dtype).view(-1, *shape))
            offset += size
        self.kv_cache = tuple(states)

    def get_attn_backend(self):
        raise AssertionError("the backend of vLLM's own layers")

    def get_kv_cache_spec(self, vllm_config):
        cache = vllm_config.cache_config
        shapes, drafts = tuple(self.get_state_shape()), vllm_config.num_speculative_tokens
        return MambaSpec(cache.mamba_block_size, shapes, self.get_state_dtype(), cache.mamba_cache_mode, num_speculative_blocks=drafts)


class Linear(nn.Module):
    """A projection, whose bias is left to the caller where it says so."""

    def __init__(self, rows, columns, bias=False, skip_bias_add=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * columns**-0.5, requires_grad=False)
        self.bias = nn.Parameter(torch.randn(rows) * 0.5, requires_grad=False) if bias else None
        self.skip_bias_add = skip_bias_add

    def forward(self, x):
        y = nn.functional.linear(x, self.weight, None if self.skip_bias_add else self.bias)
        return y, self.bias if self.skip_bias_add else None


def convolution(dim, width, bias=False):
    """Its parameters, in the form of a projection."""
    made = Linear(dim, width, bias)
    made.weight.data = torch.randn(dim, width).to(made.weight.dtype).unsqueeze(1)
    return made


class StateLayer(PluggableLayer, MambaBase):
    """What the stand-ins of layers share: they are known by their prefix, and compute nothing themselves."""

    def __init__(self, prefix, state_dtype=torch.float32, conv_dtype=None):
        super().__init__()
        config = get_current_vllm_config()
        self.model_config, self.cache_config, self.prefix = config.model_config, config.cache_config, prefix
        self.state_dtype, self.conv_dtype = state_dtype, conv_dtype or config.model_config.dtype
        self.tp_size, self.activation, self.drafts = 1, "silu", config.num_speculative_tokens
        config.compilation_config.static_forward_context[prefix] = self

    def get_state_dtype(self):
        return (self.conv_dtype, self.state_dtype)
