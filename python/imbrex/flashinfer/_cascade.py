"""Attention over keys in several levels, of which all but the last are shared by requests."""
from typing import Any, List, Optional

import torch

from ._decode import BatchDecodeWithPagedKVCacheWrapper
from ._merge import merge_state_in_place
from ._options import DTypeLike
from ._prefill import BatchPrefillWithPagedKVCacheWrapper
from ._run import Cache
from ._single import single_prefill_with_kv_cache


class MultiLevelCascadeAttentionWrapper:
    """A wrapper for each level, from the keys that most requests share to the requests' own; their outputs are merged by their LSE."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Optional[List[torch.Tensor]] = None,
        paged_kv_indptr_buf_arr: Optional[List[torch.Tensor]] = None,
        paged_kv_indices_buf_arr: Optional[List[torch.Tensor]] = None,
        paged_kv_last_page_len_buf_arr: Optional[List[torch.Tensor]] = None,
    ) -> None:
        self._use_cuda_graph = use_cuda_graph
        arrays: Any = (
            qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        )
        if not use_cuda_graph:
            arrays = ([None] * num_levels,) * 4
        if any(a is None or len(a) != num_levels for a in arrays):
            raise ValueError(f"buffers: expected {num_levels} of each kind with use_cuda_graph=True, got {[a and len(a) for a in arrays]}")
        self._levels = [BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers) for buffers in zip(*arrays)]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: List[Any]) -> None:
        """Does nothing: there is no workspace."""
        for level in self._levels:
            level.reset_workspace_buffer(float_workspace_buffer, None)

    def plan(
        self,
        qo_indptr_arr: List[torch.Tensor],
        paged_kv_indptr_arr: List[torch.Tensor],
        paged_kv_indices_arr: List[torch.Tensor],
        paged_kv_last_page_len: List[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: DTypeLike = "float16",
        kv_data_type: Optional[DTypeLike] = None,
    ) -> None:
        """One step: a list with an array for each level. Every level has all query tokens; `causal` is for the last level alone."""
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        if any(len(a) != len(self._levels) for a in arrays):
            raise ValueError(f"plan(): expected {len(self._levels)} arrays of each kind, got {[len(a) for a in arrays]}")
        for level, *parts in zip(self._levels, *arrays):
            level.plan(
                *parts,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level is self._levels[-1],
                pos_encoding_mode=pos_encoding_mode,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: Cache) -> torch.Tensor:
        """q [num_tokens, num_qo_heads, head_dim] over the keys of all levels, which are in one cache. Returns out."""
        out, lse = self._levels[-1].run(q, paged_kv_cache, return_lse=True)
        for level in self._levels[:-1]:
            merge_state_in_place(out, lse, *level.run(q, paged_kv_cache, return_lse=True))
        return out

    forward = run


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Deprecated: two levels, of which the first is one ragged prefix. MultiLevelCascadeAttentionWrapper has its pages in the cache."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any) -> None:
        """Does nothing: there is no workspace."""
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: DTypeLike = "float16",
    ) -> None:
        """One step of the requests' own keys; data_type is that of queries and cache."""
        arrays = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        self._wrapper.plan(*arrays, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type=data_type)

    def forward(self, q: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor, unique_kv_cache: Cache) -> torch.Tensor:
        """q [num_reqs, num_qo_heads, head_dim] over a prefix, [prefix_len, num_kv_heads, head_dim] for NHD, and each request's pages."""
        out, lse = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._kv_layout, return_lse=True)
        merge_state_in_place(out, lse, *self._wrapper.run(q, unique_kv_cache, return_lse=True))
        return out

    def end_forward(self) -> None:
        """Does nothing."""


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Deprecated: as BatchDecodeWithSharedPrefixPagedKVCacheWrapper, for any number of query tokens a request."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._kv_layout = kv_layout
        self._planned: Any = None
        self._types: Any = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any) -> None:
        """Does nothing: there is no workspace."""
        self._wrapper.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """One step of the requests' own keys, in float16; for other types forward() plans anew."""
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._planned = (*arrays, num_qo_heads, num_kv_heads, head_dim, page_size)
        self._types = (torch.float16, torch.float16)
        self._wrapper.plan(*self._planned)

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: Cache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> torch.Tensor:
        """q [num_tokens, num_qo_heads, head_dim]; `causal` is for the requests' own keys alone."""
        types = (q.dtype, unique_kv_cache[0].dtype)
        if self._planned is None:
            raise RuntimeError("imbrex.flashinfer: forward() before begin_forward()")
        if types != self._types:
            self._wrapper.plan(*self._planned, q_data_type=types[0], kv_data_type=types[1])
            self._types = types
        out, lse = single_prefill_with_kv_cache(q, k_shared, v_shared, kv_layout=self._kv_layout, sm_scale=sm_scale, return_lse=True)
        own = self._wrapper.forward_return_lse(q, unique_kv_cache, causal=causal, sm_scale=sm_scale)
        merge_state_in_place(out, lse, *own)
        return out

    def end_forward(self) -> None:
        """Does nothing."""
