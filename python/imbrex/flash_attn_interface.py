"""FlashAttention 3's module of functions on imbrex: its names, parameters and order, for every device and type that imbrex has.

    from imbrex import flash_attn_interface  # instead of: import flash_attn_interface
    out = flash_attn_interface.flash_attn_func(q, k, v, causal=True)

`num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata` and `deterministic` choose among kernels there and change nothing here. What is refused
says so by name; docs/flash_attn.md has the list. flash-attn 2's functions are imbrex.flash_attn.
"""
from typing import Any, Optional, Tuple, Union

import torch

from imbrex.flash_attn import flash_attn_interface as _two
from imbrex.flash_attn._cache import attend_over_cache
from imbrex.flash_attn._options import check_tensors, refuse_given, refused, wrong

Tensor = torch.Tensor

__version__ = "3.0.0"


def _refuse(qv: Any, q_descale: Any, k_descale: Any, v_descale: Any, attention_chunk: int) -> None:
    refuse_given("put its columns behind q's and those of v behind k's, with softmax_scale", qv=qv)
    refuse_given("imbrex.Plan and imbrex.torch have fp8 and its scales", q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse_given("imbrex.Plan has chunks of keys: AttentionSpec(chunk=..)", attention_chunk=attention_chunk)


def _result(found: Any, return_attn_probs: bool) -> Any:
    return found[:2] if return_attn_probs else found


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [batch, seqlen_q, heads, d] over k and v [batch, seqlen_k, heads_k, d].

    Returns out, with return_attn_probs (out, lse float32 [batch, heads, seqlen_q]).
    """
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    found = _two.flash_attn_func(q, k, v, 0.0, softmax_scale, causal, window_size, softcap, return_attn_probs=return_attn_probs)
    return _result(found, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: Optional[int] = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv [batch, seqlen, 3, heads, d], or with num_heads_q [batch, seqlen, num_heads_q + 2 * num_heads_k, d]."""
    if num_heads_q is None:
        check_tensors("batch seqlen 3 heads d", qkv=qkv)
        q, k, v = qkv.unbind(2)
    else:
        check_tensors("batch seqlen heads d", qkv=qkv)
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        if num_heads_q + 2 * num_heads_k != qkv.shape[2]:
            raise wrong("qkv", f"{num_heads_q} + 2 * num_heads_k heads", list(qkv.shape))
        q, k, v = qkv.split((num_heads_q, num_heads_k, num_heads_k), 2)
    descales = (q_descale, k_descale, v_descale)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, *descales, window_size, attention_chunk, softcap, return_attn_probs=return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of requests that lie one after the other: q [total_q, heads, d], k and v [total_k, heads_k, d], cu_seqlens int32 [batch + 1].

    Returns out, with return_attn_probs (out, lse float32 [heads, total_q]).
    """
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    refuse_given("leave out unused rows, so that cu_seqlens say what is used", seqused_q=seqused_q, seqused_k=seqused_k)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    found = _two.flash_attn_varlen_func(q, k, v, *lengths, 0.0, softmax_scale, causal, window_size, softcap, return_attn_probs=return_attn_probs)
    return _result(found, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn.flash_attn_with_kvcache() with page_table for block_table, of pages of any size.

    With cu_seqlens_q int32 [batch + 1] q is [total_q, heads, d], at most max_seqlen_q tokens a request, and k is None. Returns out, with
    return_softmax_lse (out, lse, None, None): there are no partial results to give.
    """
    _refuse(qv, q_descale, k_descale, v_descale, attention_chunk)
    refuse_given("rotary positions are those of cache_seqlens", rotary_seqlens=rotary_seqlens)
    if k is not None:
        refuse_given("append with k [batch, seqlen_new, heads_k, d] and q [batch, seqlen_q, heads, d]", cu_seqlens_k_new=cu_seqlens_k_new)
        refuse_given("append with q [batch, seqlen_q, heads, d]", cu_seqlens_q=cu_seqlens_q)
    found = attend_over_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        table=page_table,
        table_name="page_table",
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=None,
        return_softmax_lse=return_softmax_lse,
    )
    return (*found, None, None) if return_softmax_lse else found


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: Optional[int] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> None:
    """Returns None, which flash_attn_with_kvcache() accepts as scheduler_metadata: imbrex plans by itself."""


flash_attn_combine = refused("flash_attn_combine", "imbrex.merge_states joins partial results by their log-sum-exp")
