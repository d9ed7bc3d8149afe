"""Batch prefill, over pages and over ragged keys. Any mix of prefill, chunks and decode is one batch."""
import functools
from typing import Any, Dict, Optional

import torch

from ._options import (
    DTypeLike,
    FP8,
    refuse,
    refuse_given,
    refuse_multi_item,
    refuse_nvfp4,
    refuse_vendor_arguments,
    score_fields,
    torch_dtype,
    window,
)
from ._plans import Step
from ._run import Cache, Result, Scale, Types, ragged, scales_of, unpack_cache
from ._wrapper import Buffers, Wrapper, check_lens, check_starts, lens_of_pages, on_host


def _types(q_data_type: DTypeLike, kv_data_type: Optional[DTypeLike], o_data_type: Optional[DTypeLike]) -> Types:
    q_type = torch_dtype(q_data_type)
    return Types(q_type, torch_dtype(kv_data_type or q_type), torch_dtype(o_data_type or q_type))


class _Prefill(Wrapper):
    """What both wrappers share: masks, and the deprecated options of forward()."""

    _masked = False

    def _plan_batch(
        self,
        starts: torch.Tensor,
        lens: torch.Tensor,
        arrays: Any,
        mask: Optional[Dict[str, torch.Tensor]],
        types: Types,
        fields: Any,
        most_keys: Optional[int] = None,
    ) -> None:
        self._masked = mask is not None
        fields = dict(kind="encoder_decoder", custom_mask=self._masked, **fields)  # there may be fewer keys than queries
        fields["causal"] = fields["causal"] and not self._masked  # a custom mask stands for all but the window
        self._begin(fields, types, Step(starts, lens, arrays), most_keys)

    def _forward_changes(self, causal: bool, *score: Any) -> Any:
        return dict(causal=bool(causal) and not self._masked, **score_fields(*score))


class BatchPrefillWithPagedKVCacheWrapper(_Prefill):
    """Any number of query tokens a request over a paged cache.

    With use_cuda_graph the batch size is that of the buffers and the first plan() bounds the number of tokens; a captured run() computes
    the step of the last plan(). custom_mask_buf says how many bits masks may have.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indptr_buf: Optional[torch.Tensor] = None,
        paged_kv_indices_buf: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buf: Optional[torch.Tensor] = None,
        custom_mask_buf: Optional[torch.Tensor] = None,
        mask_indptr_buf: Optional[torch.Tensor] = None,
        backend: str = "auto",
        jit_args: Optional[Any] = None,
        jit_kwargs: Optional[Any] = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        self._mask_buffers = (custom_mask_buf, mask_indptr_buf)
        self._buffers: Optional[Buffers] = None
        if use_cuda_graph:
            self._buffers = Buffers(
                qo_indptr=qo_indptr_buf,
                kv_indptr=paged_kv_indptr_buf,
                kv_indices=paged_kv_indices_buf,
                last_page_len=paged_kv_last_page_len_buf,
            )
            self._buffers.check_sizes("qo_indptr", kv_indptr=0, last_page_len=-1)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Optional[torch.Tensor] = None,
        packed_custom_mask: Optional[torch.Tensor] = None,
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
        o_data_type: Optional[DTypeLike] = None,
        non_blocking: bool = True,
        prefix_len_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Optional[torch.Tensor] = None,
        seq_lens: Optional[torch.Tensor] = None,
        seq_lens_q: Optional[torch.Tensor] = None,
        block_tables: Optional[torch.Tensor] = None,
        max_token_per_sequence: Optional[int] = None,
        max_sequence_kv: Optional[int] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
    ) -> None:
        """One step. Starts and lengths are int32 [num_reqs + 1] and [num_reqs]; those of a GPU are copied back.

        custom_mask bool [sum of q_len * kv_len], or packed_custom_mask uint8 with each request's bits from a byte of its own, little-endian
        (segment_packbits), takes the place of `causal`; the window still holds. use_fp16_qk_reduction, fixed_split_size and
        disable_split_kv change nothing: sums are float32, and results depend on the request alone.
        """
        refuse_multi_item(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        refuse_given("paged_kv_indptr and paged_kv_indices say where pages are", block_tables=block_tables)
        types = _types(q_data_type, kv_data_type, o_data_type)
        starts, indptr = on_host(qo_indptr, "qo_indptr"), on_host(paged_kv_indptr, "paged_kv_indptr")
        check_starts(starts, "qo_indptr")
        lens = lens_of_pages(indptr, on_host(paged_kv_last_page_len, "paged_kv_last_page_len"), page_size)
        check_lens(seq_lens, lens, "seq_lens")
        check_lens(seq_lens_q, starts[1:] - starts[:-1], "seq_lens_q")
        mask = self._mask(custom_mask, packed_custom_mask, starts, lens, *self._mask_buffers)
        if self._buffers is not None:
            self._buffers.fill("qo_indptr", qo_indptr, non_blocking)
            self._buffers.fill("last_page_len", paged_kv_last_page_len, non_blocking)
        arrays = self._paged_arrays(self._buffers, paged_kv_indptr if self._buffers else indptr, paged_kv_indices, mask, non_blocking)
        fields = dict(
            num_q_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_v=head_dim_qk if head_dim_vo is None else head_dim_vo,
            block_size=page_size,
            causal=bool(causal),
            **score_fields(pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
        )
        self._plan_batch(starts, lens, arrays, mask, types, fields, len(arrays["kv_indices"]) * page_size)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
        window_left: Optional[int] = None,
        sinks: Optional[torch.Tensor] = None,
        kv_cache_sf: Optional[Cache] = None,
        skip_softmax_threshold_scale_factor: Optional[float] = None,
        use_fp16_softmax: Optional[bool] = None,
        uses_spcompress: Optional[bool] = None,
    ) -> Result:
        """q [qo_indptr[-1], num_qo_heads, head_dim_qk] over a layer's cache; returns out [.., head_dim_vo], with return_lse (out, lse).

        Scales are numbers or tensors, of one number or one a head. sinks [num_qo_heads] join the denominator. out and lse, if given, are
        written in place; lse float32 [tokens, num_qo_heads] is in base 2, sinks included.
        """
        refuse_vendor_arguments(
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )
        refuse_nvfp4(kv_cache_sf)
        scales = scales_of(args, q, q_scale, k_scale, v_scale)
        return self._run(q, paged_kv_cache, window_left, {}, **scales, out=out, lse=lse, return_lse=return_lse, sinks=sinks)

    def _run(self, q: torch.Tensor, cache: Cache, window_left: Optional[int], changes: Dict[str, Any], **options: Any) -> Result:
        if window_left is not None:
            changes = dict(changes, window_left=window(window_left))
        return self._attend(q, *unpack_cache(cache, self._kv_layout), changes, **options)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Scale = None,
        v_scale: Scale = None,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        _return_lse: bool = False,
    ) -> Result:
        """Deprecated: run() with options of its own in the place of plan()'s."""
        changes = self._forward_changes(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        cache = unpack_cache(paged_kv_cache, self._kv_layout)
        return self._attend(q, *cache, changes, k_scale=k_scale, v_scale=v_scale, return_lse=_return_lse)

    forward_return_lse = functools.partialmethod(forward, _return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(_Prefill):
    """Any number of query tokens a request over keys that lie one request after the other.

    The layout is that of k and v: [num_keys, num_kv_heads, head_dim] for NHD, [num_kv_heads, num_keys, head_dim] for HND. Graphs and masks
    are as in BatchPrefillWithPagedKVCacheWrapper.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Optional[torch.Tensor] = None,
        kv_indptr_buf: Optional[torch.Tensor] = None,
        custom_mask_buf: Optional[torch.Tensor] = None,
        mask_indptr_buf: Optional[torch.Tensor] = None,
        backend: str = "auto",
        jit_args: Optional[Any] = None,
        jit_kwargs: Optional[Any] = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args, jit_kwargs)
        self._mask_buffers = (custom_mask_buf, mask_indptr_buf)
        self._buffers: Optional[Buffers] = None
        if use_cuda_graph:
            self._buffers = Buffers(qo_indptr=qo_indptr_buf, kv_indptr=kv_indptr_buf)
            self._buffers.check_sizes("qo_indptr", kv_indptr=0)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: Optional[int] = None,
        custom_mask: Optional[torch.Tensor] = None,
        packed_custom_mask: Optional[torch.Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: DTypeLike = "float16",
        kv_data_type: Optional[DTypeLike] = None,
        o_data_type: Optional[DTypeLike] = None,
        non_blocking: bool = True,
        prefix_len_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_ptr: Optional[torch.Tensor] = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Optional[torch.Tensor] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        seq_lens: Optional[torch.Tensor] = None,
        seq_lens_q: Optional[torch.Tensor] = None,
        max_token_per_sequence: Optional[int] = None,
        max_sequence_kv: Optional[int] = None,
        v_indptr: Optional[torch.Tensor] = None,
        o_indptr: Optional[torch.Tensor] = None,
    ) -> None:
        """One step. qo_indptr and kv_indptr are int32 [num_reqs + 1]; those of a GPU are copied back. Else as the paged wrapper's plan().

        fp8 queries have bf16 outputs unless o_data_type says otherwise.
        """
        refuse_multi_item(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        refuse_given("values and outputs have the starts of keys and queries", v_indptr=v_indptr, o_indptr=o_indptr)
        types = _types(q_data_type, kv_data_type, o_data_type)
        if o_data_type is None and types.q in FP8:
            types = types._replace(out=torch.bfloat16)
        starts, kv_starts = on_host(qo_indptr, "qo_indptr"), on_host(kv_indptr, "kv_indptr")
        check_starts(starts, "qo_indptr")
        if len(kv_starts) != len(starts):
            raise ValueError(f"kv_indptr: expected {len(starts)} entries, as many as qo_indptr has, got {len(kv_starts)}")
        lens = kv_starts[1:] - kv_starts[:-1]
        check_lens(seq_lens, lens, "seq_lens")
        check_lens(seq_lens_q, starts[1:] - starts[:-1], "seq_lens_q")
        mask = self._mask(custom_mask, packed_custom_mask, starts, lens, *self._mask_buffers)
        arrays = dict(kv_start_loc=kv_starts if mask is None else kv_starts.to(self.device))
        if self._buffers is not None:
            self._buffers.fill("qo_indptr", qo_indptr, non_blocking)
            arrays = dict(kv_start_loc=self._buffers.fill("kv_indptr", kv_indptr, non_blocking))
        arrays.update(mask or {})
        fields = dict(
            num_q_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_v=head_dim_qk if head_dim_vo is None else head_dim_vo,
            block_size=0,
            causal=bool(causal),
            **score_fields(pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
        )
        self._plan_batch(starts, lens, arrays, mask, types, fields)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        o_scale: Optional[float] = None,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
        kv_cache_sf: Optional[Cache] = None,
    ) -> Result:
        """q [qo_indptr[-1], num_qo_heads, head_dim_qk] over k and v; returns out [.., head_dim_vo], with return_lse (out, lse in base 2).

        Scales count for every element type.
        """
        refuse_nvfp4(kv_cache_sf)
        if o_scale is not None and o_scale != 1.0:
            refuse("o_scale=", "multiply the output, or v_scale")
        return self._attend(
            q,
            ragged(k, self._kv_layout),
            ragged(v, self._kv_layout),
            **scales_of(args, q, q_scale, k_scale, v_scale),
            out=out,
            lse=lse,
            return_lse=return_lse,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        _return_lse: bool = False,
    ) -> Result:
        """Deprecated: run() with options of its own in the place of plan()'s."""
        changes = self._forward_changes(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self._attend(q, ragged(k, self._kv_layout), ragged(v, self._kv_layout), changes, return_lse=_return_lse)

    forward_return_lse = functools.partialmethod(forward, _return_lse=True)
