"""MLA in its absorbed form: one kv head whose values are the first columns of its keys."""
import math
from typing import Any, Dict, NamedTuple, Optional

import torch

from .._torch_attention import no_gradient
from ._options import FP8, DTypeLike, refuse, refuse_given, refuse_nvfp4, score_fields, torch_dtype
from ._plans import Step, is_capturing
from ._run import Result, Types
from ._wrapper import Buffers, Wrapper, check_room, check_starts, cut_starts, on_host

_SCALE_COLUMNS = 128  # of ckv_cache, for each number of ckv_scale_arr


def _together(a: torch.Tensor, b: torch.Tensor) -> Optional[torch.Tensor]:
    """[.., da + db] without a copy, where b's columns follow a's in memory; else None."""
    if not b.shape[-1]:
        return a
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    apart = b.storage_offset() - a.storage_offset()
    if not same or a.shape[:-1] != b.shape[:-1] or a.stride() != b.stride() or a.stride(-1) != 1 or apart != a.shape[-1]:
        return None
    return a.as_strided((*a.shape[:-1], a.shape[-1] + b.shape[-1]), a.stride(), a.storage_offset())


def _pages(cache: torch.Tensor, ids: torch.Tensor, scale: Any, dtype: torch.dtype) -> torch.Tensor:
    """A copy of some pages. scale: a number, or for each 128 columns of each token; None leaves the elements as they are."""
    if cache.dtype in FP8:
        pages = cache.view(torch.uint8).index_select(0, ids).view(cache.dtype)
    else:
        pages = cache.index_select(0, ids)
    if scale is None:
        return pages
    if torch.is_tensor(scale):
        scale = scale.index_select(0, ids).repeat_interleave(_SCALE_COLUMNS, -1)
    return (pages.to(torch.float32) * scale).to(dtype)


class _Keys(NamedTuple):
    """How a run() reads its keys: in place, or from a copy of the step's pages, which may have the queries' type."""

    copied: bool = False
    scaled: bool = False


class BatchMLAPagedAttentionWrapper(Wrapper):
    """MLA over pages. Where ckv and kpe are slices of one tensor [num_pages, page_size, head_dim_ckv + head_dim_kpe] they are read in place.

    Two separate caches, and fp8 caches of two scales or of ckv_scale_arr, are put side by side first: each run() copies the pages that the
    step's requests have, so that a decode step moves about three times the bytes, and needs memory for the copy. A CUDA graph cannot hold that.
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
        self._keys = _Keys()
        self._planned: Optional[Types] = None
        self._fields: Dict[str, Any] = {}
        self._step: Optional[Step] = None
        self._page_ids: Optional[torch.Tensor] = None  # int32, of the step's requests, where kv_indices are
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
        """One step. Starts int32 [num_reqs + 1] or longer, and lengths [num_reqs]; those of a GPU are copied back."""
        refuse_given("measure with the profiler of the GPU", use_profiler=use_profiler)
        q_type = torch_dtype(q_data_type)
        lens = on_host(kv_len_arr, "kv_len_arr")
        qo_indptr, starts = cut_starts(qo_indptr, on_host(qo_indptr, "qo_indptr"), "qo_indptr", len(lens), "kv_len_arr")
        kv_indptr, indptr = cut_starts(kv_indptr, on_host(kv_indptr, "kv_indptr"), "kv_indptr", len(lens), "kv_len_arr")
        check_starts(starts, "qo_indptr")
        check_room(indptr, lens, page_size)
        if self._buffers is not None:
            self._buffers.fill("qo_indptr", qo_indptr, True)
            self._buffers.fill("kv_len_arr", kv_len_arr, True)
        arrays = self._paged_arrays(self._buffers, kv_indptr if self._buffers else indptr, kv_indices, None, True)
        self._planned = Types(q_type, torch_dtype(kv_data_type), q_type)
        self._fields = dict(
            kind="encoder_decoder",  # there may be fewer keys than queries
            num_q_heads=num_heads,
            num_kv_heads=1,
            head_dim_qk=head_dim_ckv + head_dim_kpe,
            head_dim_v=head_dim_ckv,
            block_size=page_size,
            causal=bool(causal),
            **score_fields("NONE", -1, None, sm_scale),
        )
        self._step = Step(starts, lens, arrays)
        self._page_ids = arrays["kv_indices"][: int(indptr[-1])]
        self._start(self._keys)

    def _start(self, keys: _Keys) -> None:
        """Plans the step of the last plan() for keys that are read in this way. Layers of a model are alike, so the next plan() prepares the same way."""
        step, types, ids = self._step, self._planned, self._page_ids
        if step is None or types is None or ids is None:
            raise RuntimeError("imbrex.flashinfer: run() before plan()")
        if keys.copied:
            step = step._replace(arrays=dict(step.arrays, kv_indices=torch.arange(len(ids), dtype=torch.int32, device=ids.device)))
        self._keys = keys
        types = types._replace(kv=types.q) if keys.scaled else types
        self._begin(self._fields, types, step, len(step.arrays["kv_indices"]) * self._fields["block_size"])

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

        q_nope and q_pe are copied into one tensor unless they are slices of one. An fp8 element e of a cache stands for e * ckv_scale or
        e * kpe_scale; in the place of ckv_scale, ckv_scale_arr float32 [num_pages, page_size, ckv / 128] has one for 128 columns of a token.
        Returns out of q_nope's shape, with return_lse (out, lse in base 2, or natural with return_lse_base_on_e).
        """
        refuse_given("measure with the profiler of the GPU", profiler_buffer=profiler_buffer)
        refuse_given("plan() has kv_len_arr and kv_indices", kv_len=kv_len, page_table=page_table)
        refuse_given("outputs have the queries' type", o_scale=o_scale)
        refuse_nvfp4(None, ckv_cache, kpe_cache)
        no_gradient(q_nope, q_pe, ckv_cache, kpe_cache)
        if self._planned is None:
            raise RuntimeError("imbrex.flashinfer: run() before plan()")
        self._planned.check(q_nope, ckv_cache, kpe_cache)
        _check_scales(ckv_cache, kpe_cache, ckv_scale, ckv_scale_arr, kpe_scale)
        pages = _together(ckv_cache, kpe_cache)
        scaled = ckv_scale_arr is not None or (bool(kpe_cache.shape[-1]) and ckv_scale != kpe_scale)
        keys = _Keys(scaled or pages is None, scaled)
        if keys.copied:
            self._check_copied(ckv_cache, kpe_cache)
        if keys != self._keys:
            self._start(keys)
        if keys.copied:
            ids = self._ids_of(ckv_cache)
            scales = (ckv_scale if ckv_scale_arr is None else ckv_scale_arr, kpe_scale) if scaled else (None, None)
            pages = torch.cat([_pages(x, ids, scale, self._planned.q) for x, scale in zip((ckv_cache, kpe_cache), scales)], -1)
        assert pages is not None
        q = _together(q_nope, q_pe)
        q = torch.cat([q_nope, q_pe], -1) if q is None else q
        scale = None if scaled else ckv_scale
        values = pages[..., : ckv_cache.shape[-1]]
        result = self._attend(q, pages[:, :, None], values[:, :, None], k_scale=scale, v_scale=scale, out=out, lse=lse, return_lse=return_lse)
        if return_lse and return_lse_base_on_e:
            result[1].mul_(math.log(2))
        return result

    def _check_copied(self, ckv: torch.Tensor, kpe: torch.Tensor) -> None:
        if self._use_cuda_graph or is_capturing(self.device):
            refuse(
                "MLA over two separate caches, or of two scales, in a CUDA graph",
                "make ckv_cache and kpe_cache slices of one tensor [num_pages, page_size, ckv + kpe], quantised with one scale",
            )
        if ckv.shape[:-1] != kpe.shape[:-1]:
            raise ValueError(f"kpe_cache: expected {list(ckv.shape[:-1])} and columns, as ckv_cache has, got {list(kpe.shape)}")

    def _ids_of(self, ckv: torch.Tensor) -> torch.Tensor:
        """The step's pages, int64 where the cache is. What is no page of it is an error on the host, and page 0 or the last one on a GPU."""
        ids = self._page_ids
        assert ids is not None
        if not ids.is_cuda and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < ckv.shape[0]:
            raise ValueError(f"kv_indices: expected 0 to {ckv.shape[0] - 1}, pages of ckv_cache, got {int(ids.min())} to {int(ids.max())}")
        return ids.to(ckv.device, torch.int64).clamp(0, max(ckv.shape[0] - 1, 0))


def _check_scales(ckv: torch.Tensor, kpe: torch.Tensor, ckv_scale: Any, ckv_scale_arr: Optional[torch.Tensor], kpe_scale: Any) -> None:
    if ckv.dtype not in FP8:
        if ckv_scale is not None or kpe_scale is not None or ckv_scale_arr is not None:
            raise ValueError(f"ckv_scale, ckv_scale_arr and kpe_scale: expected None for a cache of {ckv.dtype}")
        return
    if (ckv_scale is None) == (ckv_scale_arr is None) or (kpe.shape[-1] and kpe_scale is None):
        raise ValueError("ckv_scale (or ckv_scale_arr) and kpe_scale: expected numbers for an fp8 cache, one for each cache")
    for name, scale in (("ckv_scale", ckv_scale), ("kpe_scale", kpe_scale)):
        if scale is not None and not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"{name}: expected a finite number above 0, got {scale}")
    if ckv_scale_arr is not None:
        expected = [*ckv.shape[:-1], ckv.shape[-1] // _SCALE_COLUMNS]
        if list(ckv_scale_arr.shape) != expected or ckv_scale_arr.dtype != torch.float32 or ckv.shape[-1] % _SCALE_COLUMNS:
            raise ValueError(
                f"ckv_scale_arr: expected torch.float32 {expected}, a number for {_SCALE_COLUMNS} columns of ckv_cache, got "
                f"{ckv_scale_arr.dtype} {list(ckv_scale_arr.shape)}"
            )
