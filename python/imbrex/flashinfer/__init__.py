"""FlashInfer's attention on imbrex: its names, signatures and meanings (0.6.18) for torch tensors, on NVIDIA GPUs and on CPUs.

    import imbrex.flashinfer as flashinfer   # instead of: import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(torch.empty(0, device="cuda"))
    wrapper.plan(qo_indptr, kv_indptr, kv_indices, last_page_len, 32, 8, 128, 16, causal=True, q_data_type=torch.bfloat16)   # once a step
    out = wrapper.run(q, kv_cache)                                                                                           # once a layer

What imbrex has not raises NotImplementedError with what to use instead; docs/flashinfer.md lists it, and what differs. Whatever of
FlashInfer is no attention (norms, RoPE, sampling, GEMM, MoE) is not in here. Forward only: there is no backward pass.
"""
from typing import Any, List

from . import mla
from ._batch_attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from ._cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)
from ._decode import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from ._masks import packbits, segment_packbits
from ._merge import merge_state, merge_state_in_place, merge_states
from ._mla import BatchMLAPagedAttentionWrapper
from ._page import append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens
from ._prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from ._refused import REFUSED as _REFUSED
from ._single import single_decode_with_kv_cache, single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from ._sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        return _REFUSED[name]
    raise AttributeError(f"imbrex.flashinfer has no {name!r}: it holds FlashInfer's attention, and nothing of its other parts")


def __dir__() -> List[str]:
    return sorted({*globals(), *_REFUSED})
