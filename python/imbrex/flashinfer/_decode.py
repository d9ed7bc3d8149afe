"""Batch decode over pages."""
import functools
import warnings
from typing import Any, Optional

import torch

from ._options import DTypeLike, refuse_given, refuse_nvfp4, refuse_vendor_arguments, score_fields, torch_dtype, window
from ._plans import Step
from ._run import Cache, Result, Scale, Types, scales_of, unpack_cache
from ._wrapper import Buffers, Wrapper, check_lens, cut_starts, lens_of_pages, on_host


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """One query token a request (q_len_per_req of them for verify steps) over a paged cache.

    With use_cuda_graph the batch size is that of the buffers, and a captured run() computes the step of the last plan(). use_tensor_cores
    changes nothing.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Optional[torch.Tensor] = None,
        paged_kv_indices_buffer: Optional[torch.Tensor] = None,
        paged_kv_last_page_len_buffer: Optional[torch.Tensor] = None,
        backend: str = "auto",
        jit_args: Optional[Any] = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._use_tensor_cores = use_tensor_cores
        self._q_len_per_req: Optional[int] = None
        self._buffers: Optional[Buffers] = None
        if use_cuda_graph:
            self._buffers = Buffers(kv_indptr=paged_kv_indptr_buffer, kv_indices=paged_kv_indices_buffer, last_page_len=paged_kv_last_page_len_buffer)
            self._buffers.check_sizes("last_page_len", kv_indptr=1)

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: Optional[float] = None,
        q_data_type: Optional[DTypeLike] = "float16",
        kv_data_type: Optional[DTypeLike] = None,
        o_data_type: Optional[DTypeLike] = None,
        data_type: Optional[DTypeLike] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
        block_tables: Optional[torch.Tensor] = None,
        seq_lens: Optional[torch.Tensor] = None,
        fixed_split_size: Optional[int] = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
    ) -> None:
        """One step. indptr int32 [num_reqs + 1] (or longer), indices [indptr[-1]] and last_page_len [num_reqs]; a request without pages has no keys.

        Lengths are needed on the host: arrays of a GPU are copied back. The tokens of a request with q_len_per_req see each other causally,
        and window_right keys beyond (-1: all). fixed_split_size and disable_split_kv change nothing: results depend on the request alone.
        """
        refuse_given("indptr and indices say where pages are", block_tables=block_tables)
        q_type = torch_dtype(q_data_type or data_type or "float16")
        kv_type = torch_dtype(kv_data_type or data_type or q_type)
        types = Types(q_type, kv_type, torch_dtype(o_data_type or q_type))
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req: expected 1 or more, got {q_len_per_req}")
        last_host = on_host(last_page_len, "last_page_len")
        indptr, indptr_host = cut_starts(indptr, on_host(indptr, "indptr"), "indptr", len(last_host), "last_page_len")
        lens = lens_of_pages(indptr_host, last_host, page_size)
        check_lens(seq_lens, lens, "seq_lens")
        if self._buffers is not None:
            if self._q_len_per_req not in (None, q_len_per_req):
                raise ValueError(f"q_len_per_req: expected {self._q_len_per_req}, that of the first plan(), got {q_len_per_req}")
            self._buffers.fill("last_page_len", last_page_len, non_blocking)
        fields = dict(
            kind="encoder_decoder",  # there may be fewer keys than query tokens
            num_q_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            block_size=page_size,
            window_right=-1 if window_right == 0 else window(window_right),
            causal=window_right == 0,
            **score_fields(pos_encoding_mode, window_left, logits_soft_cap, sm_scale),
        )
        starts = torch.arange(len(lens) + 1, dtype=torch.int32, device="cpu") * q_len_per_req
        arrays = self._paged_arrays(self._buffers, indptr if self._buffers else indptr_host, indices, None, non_blocking)
        most_keys = len(arrays["kv_indices"]) * page_size
        self._begin(fields, types, Step(starts, lens, arrays, q_len_per_req), most_keys)
        self._q_len_per_req = q_len_per_req

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
        q_len_per_req: Optional[int] = None,
        skip_softmax_threshold_scale_factor: Optional[float] = None,
        kv_cache_sf: Optional[Cache] = None,
    ) -> Result:
        """q [num_reqs * q_len_per_req, num_qo_heads, head_dim] over a layer's cache; returns out of q's shape, with return_lse (out, lse).

        Scales are numbers or tensors, of one number or one a head. sinks [num_qo_heads] join the denominator. out and lse, if given, are
        written in place; lse float32 [tokens, num_qo_heads] is in base 2, sinks included.
        """
        if q_len_per_req is not None:
            warnings.warn("q_len_per_req of run() is deprecated: give it to plan()", DeprecationWarning, stacklevel=2)
            if q_len_per_req != self._q_len_per_req:
                raise ValueError(f"q_len_per_req: expected {self._q_len_per_req}, which plan() was told, got {q_len_per_req}")
        refuse_vendor_arguments(skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        refuse_nvfp4(kv_cache_sf)
        return self._attend(
            q,
            *unpack_cache(paged_kv_cache, self._kv_layout),
            {} if window_left is None else dict(window_left=window(window_left)),
            **scales_of(args, q, q_scale, k_scale, v_scale),
            out=out,
            lse=lse,
            return_lse=return_lse,
            sinks=sinks,
        )

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Cache,
        pos_encoding_mode: str = "NONE",
        q_scale: Scale = None,
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
        changes = score_fields(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        cache = unpack_cache(paged_kv_cache, self._kv_layout)
        return self._attend(q, *cache, changes, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=_return_lse)

    forward_return_lse = functools.partialmethod(forward, _return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """BatchDecodeWithPagedKVCacheWrapper with use_cuda_graph."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: Optional[float] = None,
    q_data_type: Optional[DTypeLike] = None,
    kv_data_type: Optional[DTypeLike] = None,
    data_type: Optional[DTypeLike] = None,
    sm_scale: Optional[float] = None,
    rope_scale: Optional[float] = None,
    rope_theta: Optional[float] = None,
    non_blocking: bool = True,
    fixed_split_size: Optional[int] = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Optional[torch.Tensor] = None,
) -> None:
    """plan() of a wrapper that waits less: indptr is read on the host where global_override_indptr_cpu is, and pages of 1 are full."""
    if page_size == 1:
        last_page_len = torch.ones(len(last_page_len), dtype=torch.int32, device="cpu")
    type(self).plan(  # the wrapper's own plan may be this function
        self,
        indptr if global_override_indptr_cpu is None else global_override_indptr_cpu,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        None,
        data_type,
        sm_scale,
        rope_scale,
        rope_theta,
        non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )
