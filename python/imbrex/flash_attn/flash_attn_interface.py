"""flash_attn.flash_attn_interface: the functions of flash-attn 2.8."""
from typing import Any, Optional, Tuple, Union

import torch

from imbrex import _torch_attention
from imbrex.flash_attn._cache import attend_over_cache
from imbrex.flash_attn._options import attend, check_call, check_ints, check_tensors, padded, refused, rows, score_of, slopes_of, wrong

Tensor = torch.Tensor
_KERNELS = "call the functions of flash_attn: imbrex selects its kernels itself"


def _result(out: Tensor, lse: Optional[Tensor], return_attn_probs: bool) -> Any:
    return (out, lse, None) if return_attn_probs else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [batch, seqlen_q, heads, d] over k and v [batch, seqlen_k, heads_k, d].

    Returns out [batch, seqlen_q, heads, d]; with return_attn_probs (out, lse float32 [batch, heads, seqlen_q], None).
    """
    check_call(dropout_p, q, k, v, alibi_slopes)
    check_tensors("batch seqlen_q heads d, batch seqlen_k heads_k d", q=q, k=k, v=v)
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != q.shape[0]:
            raise wrong(name, f"a batch of {q.shape[0]}, as q has", list(x.shape))
    slopes = slopes_of(alibi_slopes, q.shape[0], q.shape[2])
    longest = max(q.shape[1], k.shape[1])
    head_dim, v_dim = q.shape[-1], v.shape[-1]
    q, k, v = (x.transpose(1, 2) for x in padded(q, k, v))

    def part(batch: slice, own: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor]]:
        score = score_of(head_dim, softmax_scale, causal, window_size, softcap, own, longest)
        return _torch_attention.dense(q[batch], k[batch], v[batch], score, lse=True if return_attn_probs else None)

    if slopes is None or slopes.dim() == 1 or not len(slopes):
        out, lse = part(slice(None), slopes if slopes is None or slopes.dim() == 1 else None)
    else:  # a score is that of all requests of a call
        outs, lses = zip(*(part(slice(r, r + 1), own) for r, own in enumerate(slopes)))
        out, lse = torch.cat(outs), torch.cat(lses) if return_attn_probs else None
    return _result(out.transpose(1, 2)[..., :v_dim], lse, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv [batch, seqlen, 3, heads, d]."""
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of q and kv [batch, seqlen_k, 2, heads_k, d]."""
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
) -> Any:
    """Attention of requests that lie one after the other: q [total_q, heads, d], k and v [total_k, heads_k, d].

    cu_seqlens_q and cu_seqlens_k are int32 [batch + 1]; on a GPU they stay there. With block_table int32 [batch, max_blocks], k and v are pages
    [num_blocks, page_size, heads_k, d]. Returns out [total_q, heads, d]; with return_attn_probs (out, lse float32 [heads, total_q], None).
    """
    check_call(dropout_p, q, k, v, alibi_slopes)
    keys = "total_k heads_k d" if block_table is None else "num_blocks page_size heads_k d"
    check_tensors(f"total_q heads d, {keys}", q=q, k=k, v=v)
    check_ints("cu_seqlens_q", cu_seqlens_q, "batch + 1")
    check_ints("cu_seqlens_k", cu_seqlens_k, len(cu_seqlens_q))
    slopes = slopes_of(alibi_slopes, len(cu_seqlens_q) - 1, q.shape[1])
    longest = max(int(max_seqlen_q), int(max_seqlen_k))
    head_dim, v_dim = q.shape[-1], v.shape[-1]
    q, k, v = (rows(x) for x in padded(q, k, v))
    out, lse = attend(
        q,
        (k, v),
        _torch_attention.Lengths(cu_seqlens_q, cu_seqlens_k[1:] - cu_seqlens_k[:-1], int(max_seqlen_q), int(max_seqlen_k)),
        slopes,
        lambda own: score_of(head_dim, softmax_scale, causal, window_size, softcap, own, longest),
        **(dict(kv_start_loc=cu_seqlens_k) if block_table is None else dict(block_size=k.shape[1], block_table=block_table)),
        lse=True if return_attn_probs else None,
    )
    return _result(out[..., :v_dim], None if lse is None else lse.t(), return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of qkv [total, 3, heads, d]."""
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(
        *qkv.unbind(1), *lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of q and kv [total_k, 2, heads_k, d]."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(
        q, *kv.unbind(1), *lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q [batch, seqlen_q, heads, d] over a cache; k and v [batch, seqlen_new, heads_k, d], if given, are written behind it first.

    k_cache and v_cache are [batch_cache, seqlen_cache, heads_k, d] of any strides, or pages [num_blocks, page_size, heads_k, d] with block_table
    int32 [batch, max_blocks]. cache_seqlens int or int32 [batch] counts what is cached before k, cache_leftpad int32 [batch] of it what is not
    seen, at its beginning. rotary_cos and rotary_sin [positions, rotary_dim / 2] turn k, and q: each query at its own position with causal or a
    window, all at the first one's otherwise. Returns out [batch, seqlen_q, heads, d], and with return_softmax_lse lse float32 [batch, heads,
    seqlen_q]. Caches keep their head_dim, which has to be a multiple of 8.

    A request that needs more keys than its rows or pages hold is a ValueError where cache_seqlens is on the host. On a GPU nobody waits for it:
    keys beyond are not written, and the output of the request is 0 with lse -inf.
    """
    return attend_over_cache(
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
        table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_softmax_lse=return_softmax_lse,
    )


class _Extension:
    """Stands for the module of flash-attn's kernels: every function of it refuses to be called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return refused(f"{self.__name__}.{name}", _KERNELS)


flash_attn_gpu = flash_attn_2_cuda = _Extension("flash_attn_2_cuda")
_flash_attn_forward = refused("_flash_attn_forward", _KERNELS + "; flash_attn_func has return_attn_probs for the log-sum-exp")
_flash_attn_varlen_forward = refused("_flash_attn_varlen_forward", _KERNELS + "; flash_attn_varlen_func has return_attn_probs for the log-sum-exp")
_flash_attn_backward = refused("_flash_attn_backward", "there is no backward pass")
_flash_attn_varlen_backward = refused("_flash_attn_varlen_backward", "there is no backward pass")
