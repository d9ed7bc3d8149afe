"""MLA in its absorbed form: one kv head whose values are the first columns of its keys."""
import math
from typing import Optional

import torch

from ._options import FP8, DTypeLike, refuse, refuse_given, refuse_nvfp4, score_fields, torch_dtype
from ._plans import Step
from ._run import Result, Types
from ._wrapper import Buffers, Wrapper, check_room, check_starts, on_host


def _together(a: torch.Tensor, b: torch.Tensor) -> Optional[torch.Tensor]:
    """[.., da + db] without a copy, where b's columns follow a's in memory; else None."""
    if not b.shape[-1]:
        return a
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    apart = b.storage_offset() - a.storage_offset()
    if not same or a.shape[:-1] != b.shape[:-1] or a.stride() != b.stride() or a.stride(-1) != 1 or apart != a.shape[-1]:
        return None
    return a.as_strided((*a.shape[:-1], a.shape[-1] + b.shape[-1]), a.stride(), a.storage_offset())


class BatchMLAPagedAttentionWrapper(Wrapper):
    """MLA over pages in which ckv and kpe lie side by side: slices of one tensor [num_pages, page_size, head_dim_ckv + head_dim_kpe].

    With use_cuda_graph qo_indptr, kv_indptr, kv_indices and kv_len_arr are buffers that plan() fills.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Optional[torch.Tensor] = None,
        kv_indptr: Optional[torch.Tensor] = None,
        kv_indices: Optional[torch.Tensor] = None,
        kv_len_arr: Optional[torch.Tensor] = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, "NHD", use_cuda_graph, backend)
        self._buffers: Optional[Buffers] = None
        if use_cuda_graph:
            self._buffers = Buffers(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
            self._buffers.check_sizes("qo_indptr", kv_indptr=0, kv_len_arr=-1)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: DTypeLike,
        kv_data_type: DTypeLike,
        use_profiler: bool = False,
    ) -> None:
        """One step. Starts and lengths int32 [num_reqs + 1] and [num_reqs]; those of a GPU are copied back."""
        refuse_given("measure with the profiler of the GPU", use_profiler=use_profiler)
        q_type = torch_dtype(q_data_type)
        types = Types(q_type, torch_dtype(kv_data_type), q_type)
        starts, indptr, lens = on_host(qo_indptr, "qo_indptr"), on_host(kv_indptr, "kv_indptr"), on_host(kv_len_arr, "kv_len_arr")
        check_starts(starts, "qo_indptr")
        check_room(indptr, lens, page_size)
        if self._buffers is not None:
            self._buffers.fill("qo_indptr", qo_indptr, True)
            self._buffers.fill("kv_len_arr", kv_len_arr, True)
        arrays = self._paged_arrays(self._buffers, kv_indptr if self._buffers else indptr, kv_indices, None, True)
        fields = dict(
            kind="encoder_decoder",  # there may be fewer keys than queries
            num_q_heads=num_heads,
            num_kv_heads=1,
            head_dim_qk=head_dim_ckv + head_dim_kpe,
            head_dim_v=head_dim_ckv,
            block_size=page_size,
            causal=bool(causal),
            **score_fields("NONE", -1, None, sm_scale),
        )
        self._begin(fields, types, Step(starts, lens, arrays), len(arrays["kv_indices"]) * page_size)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        profiler_buffer: Optional[torch.Tensor] = None,
        kv_len: Optional[torch.Tensor] = None,
        page_table: Optional[torch.Tensor] = None,
        return_lse_base_on_e: bool = False,
        o_scale: Optional[float] = None,
        *,
        ckv_scale: Optional[float] = None,
        ckv_scale_arr: Optional[torch.Tensor] = None,
        kpe_scale: Optional[float] = None,
    ) -> Result:
        """q_nope [num_tokens, num_heads, ckv] and q_pe [.., kpe] over ckv_cache [num_pages, page_size, ckv] and kpe_cache [.., kpe].

        q_nope and q_pe are copied into one tensor unless they are slices of one. An fp8 cache has ckv_scale and kpe_scale, which have to be
        equal. Returns out of q_nope's shape, with return_lse (out, lse in base 2, or natural with return_lse_base_on_e).
        """
        refuse_given("measure with the profiler of the GPU", profiler_buffer=profiler_buffer)
        refuse_given("plan() has kv_len_arr and kv_indices", kv_len=kv_len, page_table=page_table)
        refuse_given("outputs have the queries' type", o_scale=o_scale)
        refuse_given("an fp8 cache has one scale for all tokens", ckv_scale_arr=ckv_scale_arr)
        refuse_nvfp4(None, ckv_cache, kpe_cache)
        if ckv_cache.dtype in FP8 and (ckv_scale is None or (kpe_cache.shape[-1] and kpe_scale is None)):
            raise ValueError("ckv_scale and kpe_scale: expected numbers for an fp8 cache, got None")
        if ckv_cache.dtype not in FP8 and (ckv_scale is not None or kpe_scale is not None):
            raise ValueError(f"ckv_scale and kpe_scale: expected None for a cache of {ckv_cache.dtype}")
        if kpe_cache.shape[-1] and ckv_scale != kpe_scale:
            refuse("a cache with different ckv_scale and kpe_scale", "quantise both with one scale")
        pages = _together(ckv_cache, kpe_cache)
        if pages is None:
            refuse("MLA over two separate caches", "make ckv_cache and kpe_cache slices of one tensor [num_pages, page_size, ckv + kpe]")
        q = _together(q_nope, q_pe)
        q = torch.cat([q_nope, q_pe], -1) if q is None else q
        scales = dict(k_scale=ckv_scale, v_scale=ckv_scale)
        result = self._attend(q, pages[:, :, None], ckv_cache[:, :, None], **scales, out=out, lse=lse, return_lse=return_lse)
        if return_lse and return_lse_base_on_e:
            result[1].mul_(math.log(2))
        return result
