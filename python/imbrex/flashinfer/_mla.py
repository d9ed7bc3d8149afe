"""MLA in its absorbed form: one kv head whose values are the first columns of its keys."""
import math
from typing import Any, Dict, Optional

import torch

from .._torch_attention import no_gradient
from ..plan import KvLayer
from ._mla_metadata import MLAPlanMetadata, csr_arrays, parts_of
from ._options import FP8, DTypeLike, refuse, refuse_given, refuse_nvfp4, score_fields, torch_dtype
from ._plans import Step, is_capturing
from ._run import Result, Types, as_bytes, fp8_scale
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
    """A copy of some pages as numbers. scale: one for all, or for each 128 columns of each token."""
    if cache.dtype in FP8:
        pages = cache.view(torch.uint8).index_select(0, ids).view(cache.dtype)
    else:
        pages = cache.index_select(0, ids)
    if torch.is_tensor(scale):
        scale = scale.index_select(0, ids).repeat_interleave(_SCALE_COLUMNS, -1)
    return (pages.to(torch.float32) * scale).to(dtype)


class BatchMLAPagedAttentionWrapper(Wrapper):
    """MLA over pages, which are read where they lie: two caches, or slices of one tensor [num_pages, page_size, head_dim_ckv + head_dim_kpe].

    Slices of one tensor with one scale are of the format "latent", which more kernels read; other caches of "latent_rope". Only fp8 caches with
    ckv_scale_arr are converted first: each run() copies the pages that the step's requests have, so that a decode step moves about three times the
    bytes, and needs memory for the copy. A CUDA graph cannot hold that. With use_cuda_graph qo_indptr, kv_indptr, kv_indices and kv_len_arr are
    buffers that plan() fills.
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
        self._converted = False  # whether the step is begun for a copy of its pages
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
        qo_indptr: Optional[torch.Tensor] = None,
        kv_indptr: Optional[torch.Tensor] = None,
        kv_indices: Optional[torch.Tensor] = None,
        kv_len_arr: Optional[torch.Tensor] = None,
        num_heads: Optional[int] = None,
        head_dim_ckv: Optional[int] = None,
        head_dim_kpe: Optional[int] = None,
        page_size: Optional[int] = None,
        causal: Optional[bool] = None,
        sm_scale: Optional[float] = None,
        q_data_type: Optional[DTypeLike] = None,
        kv_data_type: Optional[DTypeLike] = None,
        use_profiler: bool = False,
        *,
        metadata: Optional[MLAPlanMetadata] = None,
        cum_seq_lens_q: Optional[torch.Tensor] = None,
        block_tables: Optional[torch.Tensor] = None,
        seq_lens: Optional[torch.Tensor] = None,
        max_q_len: Optional[int] = None,
        query_layout: Optional[str] = None,
        kv_cache_layout: Optional[str] = None,
        lse_mode: str = "none",
        output_dtype: Optional[torch.dtype] = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: Optional[bool] = None,
        use_sinks: bool = False,
    ) -> None:
        """One step. Starts int32 [num_reqs + 1] or longer, and lengths [num_reqs]; those of a GPU are copied back.

        The arrays come by themselves or as `metadata`. run() takes queries and caches in one tensor or two, with and without lse, whatever is said
        of them here.
        """
        flat = MLAPlanMetadata(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)
        if metadata is not None and flat != MLAPlanMetadata():
            raise ValueError("metadata: expected no other arrays beside it")
        needed = dict(num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, page_size=page_size, causal=causal)
        needed.update(sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type)
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise TypeError(f"plan(): expected {', '.join(missing)}")
        refuse_given("measure with the profiler of the GPU", use_profiler=use_profiler)
        refuse_given("leave it out: all keys are attended to", skip_softmax=skip_softmax)
        refuse_given("a plan of imbrex.MlaSpec(sinks=True) has them", use_sinks=use_sinks)
        _check_choices(query_layout=query_layout, kv_cache_layout=kv_cache_layout, lse_mode=lse_mode)
        q_type = torch_dtype(q_data_type)
        if output_scale != "none" or torch_dtype(output_dtype or q_type) != q_type:
            refuse(f"output_dtype={output_dtype} with output_scale={output_scale}", "outputs have the queries' type")
        if scale_mode not in ("default", "kv-per-tensor"):
            refuse(f"scale_mode={scale_mode}", "multiply such scales into sm_scale, and give run() ckv_scale and kpe_scale")
        qo_indptr, kv_indptr, kv_indices, kv_len_arr = csr_arrays(metadata or flat, page_size)
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
            kv_format="latent",
            block_size=page_size,
            causal=bool(causal),
            **score_fields("NONE", -1, None, sm_scale),
        )
        self._step = Step(starts, lens, arrays)
        self._page_ids = arrays["kv_indices"][: int(indptr[-1])]
        self._start(self._converted)

    def _start(self, converted: bool) -> None:
        """Begins the step of the last plan(). Layers of a model are alike, so the next plan() begins in the same way."""
        step, types, ids = self._step, self._planned, self._page_ids
        if step is None or types is None or ids is None:
            raise RuntimeError("imbrex.flashinfer: run() before plan()")
        if converted:
            step = step._replace(arrays=dict(step.arrays, kv_indices=torch.arange(len(ids), dtype=torch.int32, device=ids.device)))
            types = types._replace(kv=types.q)
        self._converted = converted
        self._begin(self._fields, types, step, len(step.arrays["kv_indices"]) * self._fields["block_size"])

    def run(
        self,
        q_nope: Optional[torch.Tensor] = None,
        q_pe: Optional[torch.Tensor] = None,
        ckv_cache: Optional[torch.Tensor] = None,
        kpe_cache: Optional[torch.Tensor] = None,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        profiler_buffer: Optional[torch.Tensor] = None,
        kv_len: Optional[torch.Tensor] = None,
        page_table: Optional[torch.Tensor] = None,
        return_lse_base_on_e: bool = False,
        o_scale: Optional[float] = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: Optional[float] = None,
        ckv_scale_arr: Optional[torch.Tensor] = None,
        kpe_scale: Optional[float] = None,
        sinks: Optional[torch.Tensor] = None,
        skip_softmax_threshold_scale_factor: Optional[float] = None,
        bmm1_scale: Any = None,
        bmm2_scale: Any = None,
    ) -> Result:
        """q_nope [num_tokens, num_heads, ckv] and q_pe [.., kpe] over ckv_cache [num_pages, page_size, ckv] and kpe_cache [.., kpe].

        query and kv_cache are the same as one tensor with both parts, or as a pair.
        q_nope and q_pe are copied into one tensor unless they are slices of one. An fp8 element e of a cache stands for e * ckv_scale or
        e * kpe_scale; in the place of ckv_scale, ckv_scale_arr float32 [num_pages, page_size, ckv / 128] has one for 128 columns of a token.
        Returns out of q_nope's shape, with return_lse (out, lse in base 2, or natural with return_lse_base_on_e).
        """
        refuse_given("measure with the profiler of the GPU", profiler_buffer=profiler_buffer)
        refuse_given("plan() has kv_len_arr and kv_indices", kv_len=kv_len, page_table=page_table)
        refuse_given("outputs have the queries' type", o_scale=o_scale)
        refuse_given("a plan of imbrex.MlaSpec(sinks=True) has them", sinks=sinks)
        refuse_given("leave it out: all keys are attended to", skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor)
        refuse_given("multiply it into sm_scale, or give ckv_scale and kpe_scale", bmm1_scale=bmm1_scale, bmm2_scale=bmm2_scale)
        if query is not None or kv_cache is not None:
            if query is None or kv_cache is None or any(x is not None for x in (q_nope, q_pe, ckv_cache, kpe_cache)):
                raise TypeError("run(): expected query and kv_cache, or q_nope, q_pe, ckv_cache and kpe_cache")
            if self._planned is None:
                raise RuntimeError("imbrex.flashinfer: run() before plan()")
            q_nope, q_pe = parts_of(query, "query", self._fields["head_dim_v"])
            ckv_cache, kpe_cache = parts_of(kv_cache, "kv_cache", self._fields["head_dim_v"])
        if any(x is None for x in (q_nope, q_pe, ckv_cache, kpe_cache)):
            raise TypeError("run(): expected query and kv_cache, or q_nope, q_pe, ckv_cache and kpe_cache")
        refuse_nvfp4(None, ckv_cache, kpe_cache)
        no_gradient(q_nope, q_pe, ckv_cache, kpe_cache)
        if self._planned is None:
            raise RuntimeError("imbrex.flashinfer: run() before plan()")
        self._planned.check(q_nope, ckv_cache, kpe_cache)
        _check_scales(ckv_cache, kpe_cache, ckv_scale, ckv_scale_arr, kpe_scale)
        if ckv_cache.ndim != 3 or ckv_cache.shape[:-1] != kpe_cache.shape[:-1]:
            raise ValueError(f"kpe_cache: expected {list(ckv_cache.shape[:-1])} and columns, as ckv_cache has, got {list(kpe_cache.shape)}")
        converted = ckv_scale_arr is not None
        if converted and (self._use_cuda_graph or is_capturing(self.device)):
            refuse("MLA with ckv_scale_arr in a CUDA graph", "quantise ckv_cache with one scale, or kpe_cache with one of its own")
        if converted != self._converted:
            self._start(converted)
        if converted:
            ids = self._ids_of(ckv_cache)
            parts = zip((ckv_cache, kpe_cache), (ckv_scale_arr, 1.0 if kpe_scale is None else kpe_scale))
            ckv_cache, kpe_cache = torch.cat([_pages(x, ids, scale, self._planned.q) for x, scale in parts], -1).split(
                [ckv_cache.shape[-1], kpe_cache.shape[-1]], -1
            )
            ckv_scale = kpe_scale = None
        elif not ckv_cache.shape[0]:  # no pages at all: imbrex wants memory to point to
            ckv_cache, kpe_cache = (x.new_empty((1, *x.shape[1:])) for x in (ckv_cache, kpe_cache))
        q = _together(q_nope, q_pe)
        q = torch.cat([q_nope, q_pe], -1) if q is None else q
        pages = _together(ckv_cache, kpe_cache) if not kpe_cache.shape[-1] or ckv_scale == kpe_scale else None
        changes = {} if pages is not None else {"kv_format": "latent_rope"}
        if pages is not None:
            layer = KvLayer(as_bytes(pages[:, :, None]), k_scale=fp8_scale(ckv_scale, q.device))
        else:
            ckv, kpe = (as_bytes(x[:, :, None]) for x in (ckv_cache, kpe_cache))
            k_scale, rope_scale = (None if x is None else fp8_scale(x, q.device, True) for x in (ckv_scale, kpe_scale))
            layer = KvLayer(ckv, k_scale=k_scale, k_rope=kpe, k_rope_scale=rope_scale)
        result = self._attend(q, ckv_cache, ckv_cache, changes, layer=layer, out=out, lse=lse, return_lse=return_lse)
        if return_lse and return_lse_base_on_e:
            result[1].mul_(math.log(2))
        return result

    def _ids_of(self, ckv: torch.Tensor) -> torch.Tensor:
        """The step's pages, int64 where the cache is. What is no page of it is an error on the host, and page 0 or the last one on a GPU."""
        ids = self._page_ids
        assert ids is not None
        if not ids.is_cuda and len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < ckv.shape[0]:
            raise ValueError(f"kv_indices: expected 0 to {ckv.shape[0] - 1}, pages of ckv_cache, got {int(ids.min())} to {int(ids.max())}")
        return ids.to(ckv.device, torch.int64).clamp(0, max(ckv.shape[0] - 1, 0))


def _check_choices(**given: Optional[str]) -> None:
    known = {"lse_mode": ("none", "base2", "basee")}
    for name, value in given.items():
        if value is not None and value not in known.get(name, ("packed", "split")):
            raise ValueError(f"{name}: expected one of {', '.join(known.get(name, ('packed', 'split')))}, got {value!r}")


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
