"""BatchAttention, and the wrapper for attention sinks."""
import functools
from typing import Any, Optional, Tuple, Union

import torch

from ._options import DTypeLike, has_alibi, refuse_given, refuse_nvfp4, scale, score_fields, soft_cap, torch_dtype
from ._plans import Plans, Step
from ._prefill import BatchPrefillWithPagedKVCacheWrapper
from ._run import Cache, Result, Scale, Types, unpack_cache
from ._wrapper import Wrapper, check_room, check_starts, cut_starts, on_host


class BatchAttention(Wrapper):
    """Prefill and decode in one batch over a paged cache, with lengths in kv_len_arr. Owns what it needs; the device is named.

    A CUDA graph may hold run(), and replays later steps within the limits of those before the capture: powers of two of their requests,
    tokens and longest request. kv_indices have to be on the GPU then, and stay at their place.
    """

    def __init__(self, kv_layout: str = "NHD", device: Union[str, torch.device] = "cuda") -> None:
        super().__init__(torch.empty(0, device=device), kv_layout)
        self._plans = Plans(self.device, on_demand=False)
        self._soft_cap = 0.0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: Optional[float] = None,
        logits_soft_cap: Optional[float] = None,
        q_data_type: DTypeLike = torch.bfloat16,
        kv_data_type: DTypeLike = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """One step. qo_indptr and kv_indptr int32 [num_reqs + 1] or longer, kv_indices [kv_indptr[-1]], kv_len_arr [num_reqs] in tokens."""
        refuse_given("measure with the profiler of the GPU", use_profiler=use_profiler)
        types = Types(torch_dtype(q_data_type), torch_dtype(kv_data_type), torch_dtype(q_data_type))
        lens = on_host(kv_len_arr, "kv_len_arr")
        _, starts = cut_starts(qo_indptr, on_host(qo_indptr, "qo_indptr"), "qo_indptr", len(lens), "kv_len_arr")
        _, indptr = cut_starts(kv_indptr, on_host(kv_indptr, "kv_indptr"), "kv_indptr", len(lens), "kv_len_arr")
        check_starts(starts, "qo_indptr")
        check_room(indptr, lens, page_size)
        self._soft_cap = soft_cap(logits_soft_cap)
        fields = dict(
            kind="encoder_decoder",  # there may be fewer keys than queries
            num_q_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim_qk,
            head_dim_v=head_dim_vo,
            block_size=page_size,
            causal=bool(causal),
            **score_fields("NONE", -1, logits_soft_cap, sm_scale),
        )
        self._begin(fields, types, Step(starts, lens, self._paged_arrays(None, indptr, kv_indices, None, True)))

    def run(
        self,
        q: torch.Tensor,
        kv_cache: Cache,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: Optional[torch.Tensor] = None,
        kv_cache_sf: Optional[Cache] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """q [num_tokens, num_qo_heads, head_dim_qk]; returns (out, lse). The soft cap is plan()'s; one given here has to be the same."""
        refuse_given("measure with the profiler of the GPU", profiler_buffer=profiler_buffer)
        refuse_nvfp4(kv_cache_sf)
        if soft_cap(logits_soft_cap) not in (0.0, self._soft_cap):
            raise ValueError(f"logits_soft_cap: expected {self._soft_cap}, which plan() was told, got {logits_soft_cap}")
        cache = unpack_cache(kv_cache, self._kv_layout)
        out, lse = self._attend(q, *cache, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse, return_lse=True)
        return out, lse


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """BatchPrefillWithPagedKVCacheWrapper whose run() takes sinks and a scale: run(q, cache, sink, sm_scale).

    Types, dimensions and window of the constructor have to be plan()'s.
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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )
        self._made_for = dict(
            q_dtype=q_data_type,
            kv_dtype=kv_data_type,
            head_dim_qk=head_dim_qk,
            head_dim_v=head_dim_vo,
            has_window=window_left >= 0,
            alibi=has_alibi(pos_encoding_mode),
        )

    def _begin(self, fields: Any, types: Types, step: Step, most_keys: Optional[int] = None) -> None:
        planned = dict(
            q_dtype=types.q,
            kv_dtype=types.kv,
            head_dim_qk=fields["head_dim_qk"],
            head_dim_v=fields["head_dim_v"],
            has_window=fields["window_left"] >= 0,
            alibi=fields["alibi"],
        )
        if planned != self._made_for:
            raise ValueError(f"plan(): expected what the constructor was told, {self._made_for}, got {planned}")
        super()._begin(dict(fields, sinks=True), types, step, most_keys)

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
    ) -> Result:
        """args: sink [num_qo_heads], natural-log logits that join the denominator only; and sm_scale, where it is not plan()'s."""
        if not 1 <= len(args) <= 2:
            raise ValueError(f"run(): expected sink and, optional, sm_scale after the cache, got {len(args)} arguments")
        changes = {} if len(args) == 1 or args[1] is None else dict(scale=scale(args[1]))
        scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        return self._run(q, paged_kv_cache, window_left, changes, **scales, out=out, lse=lse, return_lse=return_lse, sinks=args[0])

    run_return_lse = functools.partialmethod(run, return_lse=True)
