"""FlashMLA's functions on imbrex: its names, parameters and order, for dense attention over latents of MLA on every device and type that imbrex has.

    from imbrex import flash_mla  # instead of: import flash_mla
    metadata, num_splits = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, metadata, num_splits, causal=True)

Queries are absorbed ones: of the latent and, behind it, of the part with a position. What is refused says so by name; docs/mla.md has the list.
"""
from typing import Any, Dict, Hashable, NamedTuple, Optional, Tuple

import torch

from . import _core, _torch_attention
from ._frameworks import device_name, dtype_name, no_gradient, stream_address
from ._plan_cache import Kept, Limits, PlanCache
from .plan import KvLayer, Plan

__all__ = [
    "FlashMLASchedMeta",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

__version__ = "1.0.0"

Tensor = torch.Tensor

_RECORD_BYTES = 656  # of a token: 512 fp8_e4m3, 4 float32 scales, 64 bfloat16
_SPARSE = "sparse attention is not there; a dense call is exact while a query sees no more keys than the indexer picks"

_plans = PlanCache()


def _wrong(name: str, expected: Any, got: Any) -> ValueError:
    return ValueError(f"imbrex.flash_mla: {name}: expected {expected}, got {got}")


def _refuse_given(instead: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"imbrex.flash_mla: {name}= is not there: {instead}")


class _Shapes(NamedTuple):
    """What the calls of one FlashMLASchedMeta have in common."""

    batch: int
    seq_len_q: int
    num_heads_q: int
    page_block_size: int
    num_heads_k: int
    causal: bool
    is_fp8_kvcache: bool


class FlashMLASchedMeta:
    """A step: what its layers share. The first call plans it, and the others, of the same shapes and lengths, run that plan.

    Lengths on the host are compared, and planned again where they differ; those on a GPU are taken to be the same, as FlashMLA takes them.
    """

    def __init__(self) -> None:
        self.have_initialized = False
        self.config: Optional[_Shapes] = None
        self._step = object()
        self._lens: Optional[Tensor] = None  # a copy of lengths on the host

    def _check(self, shapes: _Shapes) -> None:
        if not self.have_initialized:
            self.have_initialized, self.config = True, shapes
        assert self.config is not None
        for name, planned, given in zip(shapes._fields, self.config, shapes):
            if planned != given:
                raise _wrong("tile_scheduler_metadata", f"{name} {planned}, that of its first call", f"{given}; get_mla_metadata() makes a new one")

    def _name_of(self, lens: Tensor, table: Tensor) -> Hashable:
        """A name for the step with this table, under which a plan is found that needs no update."""
        if not lens.is_cuda and (self._lens is None or not torch.equal(self._lens, lens)):
            self._step, self._lens = object(), lens.clone()
        return self._step, table.data_ptr(), table.shape, table.stride(), lens.data_ptr() if lens.is_cuda else 0


def get_mla_metadata(*args: Any, **kwargs: Any) -> Tuple[FlashMLASchedMeta, None]:
    """Returns (an empty FlashMLASchedMeta, None). Arguments of older versions of FlashMLA are taken and change nothing."""
    return FlashMLASchedMeta(), None


def _keys_of(q: Tensor, k_cache: Tensor, is_fp8_kvcache: bool, head_dim_v: int) -> Tuple[Tensor, Dict[str, Any]]:
    """The cache as imbrex takes it, and the fields of its spec."""
    if q.dim() != 4 or k_cache.dim() != 4:
        raise _wrong(
            "q and k_cache",
            "[batch, seq_len_q, num_heads_q, head_dim] and [num_blocks, page_block_size, num_heads_k, head_dim]",
            f"{list(q.shape)} and {list(k_cache.shape)}",
        )
    if not is_fp8_kvcache:
        if k_cache.dtype != q.dtype or k_cache.shape[3] != q.shape[3]:
            raise _wrong("k_cache", f"{q.dtype} [.., {q.shape[3]}], as q has", f"{k_cache.dtype} {list(k_cache.shape)}")
        if not 0 < head_dim_v <= q.shape[3]:
            raise _wrong("head_dim_v", f"1 to {q.shape[3]}", head_dim_v)
        return k_cache, dict(kv_format="latent", kv_dtype=dtype_name(k_cache))
    if k_cache.element_size() != 1 or k_cache.shape[2:] != (1, _RECORD_BYTES):
        raise _wrong("k_cache", f"elements of a byte [.., 1, {_RECORD_BYTES}] with is_fp8_kvcache", f"{k_cache.dtype} {list(k_cache.shape)}")
    if (q.shape[3], head_dim_v) != (576, 512):
        raise _wrong("q and head_dim_v", "a head_dim of 576 and 512 with is_fp8_kvcache", f"{q.shape[3]} and {head_dim_v}")
    return k_cache.view(torch.uint8)[:, :, 0], dict(kv_format="fp8_ds_mla", kv_dtype="fp8_e4m3")


def _check_arrays(q: Tensor, k_cache: Tensor, block_table: Optional[Tensor], cache_seqlens: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    batch = q.shape[0]
    if block_table is None or block_table.dim() != 2 or block_table.dtype != torch.int32 or block_table.shape[0] != batch:
        got = None if block_table is None else f"{block_table.dtype} {list(block_table.shape)}"
        raise _wrong("block_table", f"torch.int32 [{batch}, max_num_blocks_per_seq]", got)
    if cache_seqlens is None or list(cache_seqlens.shape) != [batch] or cache_seqlens.dtype != torch.int32:
        got = None if cache_seqlens is None else f"{cache_seqlens.dtype} {list(cache_seqlens.shape)}"
        raise _wrong("cache_seqlens", f"torch.int32 [{batch}]", got)
    for name, x in (("k_cache", k_cache), ("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if x.device != q.device:
            raise _wrong(name, f"a tensor on {q.device}", f"one on {x.device}")
    if not block_table.is_cuda:
        room = block_table.shape[1] * k_cache.shape[1]
        if batch and not 0 <= int(cache_seqlens.min()) <= int(cache_seqlens.max()) <= room:
            raise _wrong("cache_seqlens", f"0 to {room}, for which block_table has blocks", cache_seqlens.tolist())
    return block_table, cache_seqlens


def _plan_of(fields: Dict[str, Any], q: Tensor, needed: Limits, stream: int) -> Kept:
    device = device_name(q)

    def make(limits: Limits) -> Plan:
        spec = _core.AttentionSpec(**fields)
        return Plan(spec, device, on_device=device != "cpu", ordered=True, **limits.arguments())

    return _plans.find((device, needed.query_len, tuple(fields.values())), needed, make, stream)


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Optional[Tensor],
    cache_seqlens: Optional[Tensor],
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Optional[Tensor] = None,
    attn_sink: Optional[Tensor] = None,
    extra_k_cache: Optional[Tensor] = None,
    extra_indices_in_kvcache: Optional[Tensor] = None,
    topk_length: Optional[Tensor] = None,
    extra_topk_length: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Dense attention of q [batch, seq_len_q, num_heads_q, head_dim] over pages [num_blocks, page_block_size, num_heads_k, head_dim] of any size.

    A key's first head_dim_v elements are its value. block_table int32 [batch, max_num_blocks_per_seq], cache_seqlens int32 [batch]; entries behind the
    blocks of a request's keys may hold anything. With is_fp8_kvcache k_cache has records of 656 bytes, [.., 1, 656] of any type of one byte: 512
    float8_e4m3fn, 4 float32 scales of 128 each, 64 bfloat16. Returns (out [batch, seq_len_q, num_heads_q, head_dim_v] of q's type, softmax_lse float32
    [batch, num_heads_q, seq_len_q], natural; +inf where a query sees no key, whose output is 0).
    """
    _refuse_given(_SPARSE, indices=indices, extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache)
    _refuse_given(_SPARSE, topk_length=topk_length, extra_topk_length=extra_topk_length)
    _refuse_given("imbrex.Plan has sinks: AttentionSpec(sinks=True)", attn_sink=attn_sink)
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta) or num_splits is not None:
        raise _wrong(
            "tile_scheduler_metadata and num_splits", "what get_mla_metadata() returned", f"{type(tile_scheduler_metadata)} and {num_splits}"
        )
    no_gradient(q, k_cache)
    keys, fields = _keys_of(q, k_cache, is_fp8_kvcache, head_dim_v)
    table, lens = _check_arrays(q, k_cache, block_table, cache_seqlens)
    batch, query_len, heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    tile_scheduler_metadata._check(_Shapes(batch, query_len, heads, page, kv_heads, bool(causal), bool(is_fp8_kvcache)))
    out = q.new_empty((batch * query_len, heads, head_dim_v))
    lse = q.new_empty((batch * query_len, heads), dtype=torch.float32)
    if not out.numel() or not keys.shape[0] or not table.shape[1]:
        out.zero_(), lse.fill_(float("inf"))
    else:
        fields.update(
            kind="encoder_decoder",  # there may be fewer keys than queries
            num_q_heads=heads,
            num_kv_heads=kv_heads,
            head_dim_qk=head_dim,
            head_dim_v=head_dim_v,
            q_dtype=dtype_name(q),
            block_size=page,
            causal=bool(causal),
            scale=head_dim**-0.5 if softmax_scale is None else float(softmax_scale),
        )
        stream = stream_address(None, q)
        kept = _plan_of(fields, q, Limits(batch, batch * query_len, table.shape[1] * page, 1 if query_len == 1 else 0), stream)
        name = tile_scheduler_metadata._name_of(lens, table)
        if kept.batch != name:
            kept.batch = None
            starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * query_len
            if q.is_cuda:
                kept.plan.update_on_device(starts, lens, max_num_tokens=batch * query_len, block_table=table, stream=stream)
            else:
                kept.plan.update(starts, lens, block_table=table, stream=stream)
            kept.batch = name
        kept.plan.run(_rows(q), KvLayer(keys), out, lse=lse, stream=stream)
        lse.masked_fill_(lse == float("-inf"), float("inf"))
    return out.view(batch, query_len, heads, head_dim_v), lse.view(batch, query_len, heads).transpose(1, 2)


def _rows(q: Tensor) -> Tensor:
    """[batch, n, heads, d] as [batch * n, heads, d], copied where no view shows it or the innermost stride is not 1."""
    rows = q.reshape(-1, *q.shape[2:])
    return rows if rows.stride(-1) == 1 and 0 not in rows.stride() else rows.contiguous()


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> Tuple[Tensor, Tensor]:
    """Attention with expanded keys: q [total_q, heads, d], k [total_k, heads_k, d] and v [total_k, heads_k, d_v] of requests one after the other.

    cu_seqlens int32 [batch + 1]. Returns (out, lse float32 [total_q, heads], natural). Results are always deterministic.
    """
    if dropout_p != 0.0:
        raise NotImplementedError(f"imbrex.flash_mla: dropout_p is not there: expected 0.0, got {dropout_p}")
    no_gradient(q, k, v)
    lens = cu_seqlens_kv[1:] - cu_seqlens_kv[:-1]
    lengths = _torch_attention.Lengths(cu_seqlens_qo, lens, int(max_seqlen_qo), int(max_seqlen_kv))
    score = _torch_attention.Score(bool(causal), scale=None if softmax_scale is None else float(softmax_scale))
    out, lse = _torch_attention.attend(_columns(q), (_columns(k), _columns(v)), lengths, score, kv_start_loc=cu_seqlens_kv, lse=True)
    assert lse is not None
    return out, lse


def _columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 and 0 not in x.stride() else x.contiguous()


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> Tuple[Tensor, Tensor]:
    """flash_attn_varlen_func of qkv [total, heads, 2 * head_dim_qk + head_dim_v]."""
    q, k, v = qkv.split((head_dim_qk, head_dim_qk, qkv.shape[2] - 2 * head_dim_qk), 2)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, deterministic, is_varlen)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> Tuple[Tensor, Tensor]:
    """flash_attn_varlen_func of kv [total_k, heads_k, head_dim_qk + head_dim_v]."""
    k, v = kv[:, :, :head_dim_qk], kv[:, :, head_dim_qk:]
    options = dropout_p, softmax_scale, causal, deterministic, is_varlen
    return flash_attn_varlen_func(q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, *options)


def flash_mla_sparse_fwd(*args: Any, **kwargs: Any) -> Any:
    """Refused: there is no sparse attention."""
    raise NotImplementedError(f"imbrex.flash_mla: flash_mla_sparse_fwd is not there: {_SPARSE}")
