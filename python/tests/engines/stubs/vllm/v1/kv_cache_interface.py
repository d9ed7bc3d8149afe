from dataclasses import dataclass
from typing import Optional

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = ["KVCacheLayout"]


def cache_torch_dtype(kv_cache_dtype, model_dtype):
    if kv_cache_dtype.startswith("fp8"):
        return torch.uint8
    return model_dtype if kv_cache_dtype == "auto" else getattr(torch, kv_cache_dtype)


@dataclass(frozen=True)
class AttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: Optional[int] = None
    num_head_slots: Optional[int] = None
    state_content_bytes: Optional[int] = None
    tokens_per_state: int = 1

    def __post_init__(self):
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    sliding_window: Optional[int] = None
    attention_chunk_size: Optional[int] = None


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    head_size_v: int = 0


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = 0


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    attention_chunk_size: int = 0


@dataclass(frozen=True)
class RSWASpec(FullAttentionSpec):
    rswa_window: int = 0


@dataclass(frozen=True)
class CrossAttentionSpec(AttentionSpec):
    pass


@dataclass(frozen=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    pass


@dataclass(frozen=True)
class MambaSpec:
    block_size: int
    shapes: tuple
    dtypes: tuple
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0


def create_kv_cache_views(spec, num_blocks, num_layers, layout, device, poison, padding=0):
    """A logical [B, H, N, C] view for each layer of one allocation in `layout`'s order; `padding` elements lie between pages."""
    shape = (num_layers, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size + spec.head_size_v)
    strides, stride = [0] * 5, 1
    for physical, axis in reversed(list(enumerate(layout.value))):
        if padding and set(layout.value[: physical + 1]) == {0, 1}:
            stride += padding
        strides[axis] = stride
        stride *= shape[axis]
    memory = torch.full((stride,), poison, dtype=spec.dtype, device=device)
    view = torch.as_strided(memory, shape, strides)
    return [view[index] for index in range(num_layers)]
