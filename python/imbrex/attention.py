"""Attention in one call, as the ecosystem's functions have it. For steps that share a plan among layers, use imbrex.Plan."""
from typing import Any, Optional, Sequence, Tuple, Union

from . import _core
from ._frameworks import device_name, dtype_name, empty, exported, no_gradient, stream_address
from ._plan_cache import Limits, PlanCache
from .plan import Array, KvLayer, Plan

_plans = PlanCache()


def _run(q, layer, v_head_dim, block_size, seq_lens, arrays, *, out, return_lse, window, causal, scale, soft_cap, sinks, alibi_slopes, stream):
    no_gradient(q, *layer, sinks, alibi_slopes, out)
    fields = dict(
        kind="decoder" if causal else "encoder_decoder",  # in which there may be fewer keys than queries
        num_q_heads=q.shape[1],
        num_kv_heads=layer.k.shape[-2],
        head_dim_qk=q.shape[2],
        head_dim_v=v_head_dim,
        q_dtype=dtype_name(q),
        kv_dtype=dtype_name(layer.k),
        block_size=block_size,
        causal=causal,
        window_left=window[0],
        window_right=window[1],
        scale=0.0 if scale is None else float(scale),
        soft_cap=float(soft_cap),
        sinks=sinks is not None,
        alibi=alibi_slopes is not None,
    )
    device, stream = device_name(q), stream_address(stream, q)
    if stream and _core.capture_of(stream):
        raise RuntimeError("imbrex: a CUDA graph cannot hold a call whose lengths are on the host: use imbrex.torch, or a Plan")
    needed = Limits(len(seq_lens), q.shape[0], int(max(seq_lens)) if len(seq_lens) else 1)

    def make(limits):
        return Plan(_core.AttentionSpec(**fields), device, load_on_demand=device != "cpu", ordered=True, **limits.arguments())

    plan = _plans.find((device, *fields.values()), needed, make, stream).plan
    plan.update(arrays.pop("query_start_loc"), seq_lens, stream=stream, **arrays)
    lse = empty(q, (q.shape[0], q.shape[1]), "f32") if return_lse else None
    out = plan.run(q, layer, out, lse=lse, sinks=sinks, alibi_slopes=alibi_slopes, stream=stream)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    query_start_loc: Array,
    kv_start_loc: Array,
    *,
    causal: bool = False,
    window: Tuple[int, int] = (-1, -1),
    scale: Optional[float] = None,
    soft_cap: float = 0.0,
    sinks: Optional[Array] = None,
    alibi_slopes: Optional[Array] = None,
    out: Optional[Array] = None,
    return_lse: bool = False,
    stream: Any = None,
) -> Union[Array, Tuple[Array, Array]]:
    """Attention of requests that lie one after the other: q [num_tokens, num_q_heads, d], k and v [num_keys, num_kv_heads, d].

    query_start_loc and kv_start_loc are int32 [num_reqs + 1] on the host (cu_seqlens). Causal is aligned at the bottom right. window is (left,
    right), -1 is no limit. scale None is 1 / sqrt(d). Returns out, or (out, lse) with the natural logarithm of the denominator.
    """
    seq_lens = kv_start_loc[1:] - kv_start_loc[:-1]
    arrays = dict(query_start_loc=query_start_loc, kv_start_loc=kv_start_loc)
    return _run(
        q,
        KvLayer(k, v),
        v.shape[-1],
        0,
        seq_lens,
        arrays,
        out=out,
        return_lse=return_lse,
        window=window,
        causal=causal,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        stream=stream,
    )


def attention_paged(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    query_start_loc: Array,
    seq_lens: Array,
    block_table: Optional[Array] = None,
    *,
    kv_indptr: Optional[Array] = None,
    kv_indices: Optional[Array] = None,
    kv_last_page_len: Optional[Array] = None,
    k_scale: Optional[Array] = None,
    v_scale: Optional[Array] = None,
    causal: bool = True,
    window: Tuple[int, int] = (-1, -1),
    scale: Optional[float] = None,
    soft_cap: float = 0.0,
    sinks: Optional[Array] = None,
    alibi_slopes: Optional[Array] = None,
    out: Optional[Array] = None,
    return_lse: bool = False,
    stream: Any = None,
) -> Union[Array, Tuple[Array, Array]]:
    """Attention of q [num_tokens, num_q_heads, d] over a paged cache: k_cache and v_cache [num_blocks, block_size, num_kv_heads, d], any strides.

    query_start_loc int32 [num_reqs + 1] and seq_lens int32 [num_reqs] are on the host; seq_lens counts the queries' own keys, which are in
    the cache already. Pages by block_table int32 [num_reqs, max_blocks], or by kv_indptr and kv_indices. The rest is as in attention_varlen.
    """
    arrays = dict(
        query_start_loc=query_start_loc,
        block_table=block_table,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=kv_last_page_len,
    )
    return _run(
        q,
        KvLayer(k_cache, v_cache, k_scale, v_scale),
        v_cache.shape[-1],
        k_cache.shape[1],
        seq_lens,
        arrays,
        out=out,
        return_lse=return_lse,
        window=window,
        causal=causal,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        stream=stream,
    )


def merge_states(
    outs: Sequence[Array],
    lses: Sequence[Array],
    *,
    out: Optional[Array] = None,
    lse: Optional[Array] = None,
    num_threads: int = 1,
    stream: Any = None,
) -> Tuple[Array, Array]:
    """Parts of an attention put together by their log-sum-exp, in the order given: on the host, or on the GPU where they are (at most 48).

    outs [num_tokens, num_heads, d] each, lses float32 [num_tokens, num_heads], natural logarithms, -inf for an empty part. Returns (out, lse).
    """
    outs, lses = list(outs), list(lses)
    no_gradient(*outs, *lses, out, lse)
    if not outs:
        raise ValueError("merge_states: expected one part or more, got none")
    out = empty(outs[0], tuple(outs[0].shape), dtype_name(outs[0])) if out is None else out
    lse = empty(lses[0], tuple(lses[0].shape), "f32") if lse is None else lse
    _core.merge_partial_results(
        [exported(x) for x in outs], [exported(x) for x in lses], exported(out), exported(lse), num_threads, stream_address(stream, outs[0])
    )
    return out, lse


def merge_state(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> Tuple[Array, Array]:
    """merge_states() of two parts."""
    return merge_states([out_a, out_b], [lse_a, lse_b])
