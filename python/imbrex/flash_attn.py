"""flash_attn's functions on imbrex: the signatures of flash-attn 2.8 for torch tensors, on the CPU and NVIDIA GPUs, in the forward direction.

    from imbrex import flash_attn            # instead of: import flash_attn
    out = flash_attn.flash_attn_func(q, k, v, causal=True)

Beside what flash-attn takes: float32, any head_dim (padded to a multiple of 8), CPU tensors. window_size is (left, right), inclusive; causal is
aligned at the bottom right; the log-sum-exp is the natural one. Differences: a row that sees no key has lse -inf (flash-attn 2: +inf); `deterministic` and
`num_splits` change nothing, since results do not depend on the split; there is no backward pass and no dropout. docs/flash_attn.md has the table.
"""
from typing import Any, Optional, Tuple, Union

import torch

from . import _torch

Tensor = torch.Tensor
_PAGE = 256  # the most tokens that a page has when a cache without pages is read as one with


def _score(
    q: Tensor, softmax_scale: Optional[float], causal: bool, window_size: Tuple[int, int], softcap: float, alibi_slopes: Optional[Tensor]
) -> _torch.Score:
    left, right = window_size
    if alibi_slopes is not None:
        if alibi_slopes.dim() == 2 and alibi_slopes.shape[0] == 1:
            alibi_slopes = alibi_slopes[0]
        if alibi_slopes.dim() != 1:
            raise NotImplementedError(f"imbrex.flash_attn: alibi_slopes of each request: expected [{q.shape[-2]}], got {list(alibi_slopes.shape)}")
        if not causal and right != 0:
            raise NotImplementedError("imbrex.flash_attn: alibi_slopes with keys after the query: expected causal=True or a window (.., 0)")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _torch.Score(bool(causal), (int(left), int(right)), scale, float(softcap), None, _torch.f32(alibi_slopes))


def _check(dropout_p: float, *tensors: Optional[Tensor]) -> None:
    if dropout_p != 0.0:
        raise NotImplementedError(f"imbrex.flash_attn: dropout: expected dropout_p 0.0, got {dropout_p}")
    _torch.no_gradient(*tensors)


def _padded(*tensors: Tensor) -> Tuple[Tensor, ...]:
    """Head dimensions are multiples of 8; zeros change neither logits nor the values in front of them."""
    return tuple(torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in tensors)


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
    _check(dropout_p, q, k, v)
    score = _score(q, softmax_scale, causal, window_size, softcap, alibi_slopes)
    v_dim = v.shape[-1]
    q, k, v = (x.transpose(1, 2) for x in _padded(q, k, v))
    out, lse = _torch.dense(q, k, v, score, lse=True if return_attn_probs else None)
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
    _check(dropout_p, q, k, v)
    score = _score(q, softmax_scale, causal, window_size, softcap, alibi_slopes)
    v_dim = v.shape[-1]
    q, k, v = _padded(q, k, v)
    q = q if q.stride(-1) == 1 else q.contiguous()
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    lengths = _torch.Lengths(cu_seqlens_q, cu_seqlens_k[1:] - cu_seqlens_k[:-1], int(max_seqlen_q), int(max_seqlen_k))
    lse = True if return_attn_probs else None
    if block_table is None:
        out, lse = _torch.attend(q, (k, v), lengths, score, kv_start_loc=cu_seqlens_k, lse=lse)
    else:
        out, lse = _torch.attend(q, (k, v), lengths, score, block_size=k.shape[1], block_table=block_table, lse=lse)
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


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [batch, s, heads, d] with its first 2 * cos.shape[1] dims rotated by the angles at positions [batch, s]."""
    half = cos.shape[1]
    c, s = (a[positions.long()][:, :, None, :].float() for a in (cos, sin))
    part = x[..., : 2 * half].float()
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    turned = (a * c - b * s, a * s + b * c)
    turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


def _pages_of(cache: Tensor, rows: Optional[Tensor], batch: int) -> Tuple[Tensor, int, Tensor]:
    """A cache [rows, seqlen, heads, d] as pages: the view, tokens in a page, and the table of the requests' pages."""
    size = cache.shape[1] & -cache.shape[1]  # the power of two in it
    size = min(size, _PAGE)
    if cache.stride(0) != cache.shape[1] * cache.stride(1):
        raise NotImplementedError("imbrex.flash_attn: a cache whose rows do not lie one after the other: give block_table")
    pages = cache.shape[1] // size
    view = cache.view(-1, size, *cache.shape[2:])
    rows = torch.arange(batch, dtype=torch.int32, device=cache.device) if rows is None else rows.to(torch.int32)
    return view, size, rows[:, None] * pages + torch.arange(pages, dtype=torch.int32, device=cache.device)


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

    k_cache and v_cache are [batch_cache, seqlen_cache, heads_k, d], or pages [num_blocks, page_size, heads_k, d] with block_table int32 [batch,
    max_blocks]. cache_seqlens int or int32 [batch] counts what is cached before k. rotary_cos and rotary_sin [positions, rotary_dim / 2] turn
    k, and q: each query at its own position with causal or a window, all at the first one's otherwise. Returns out [batch, seqlen_q, heads, d], and
    with return_softmax_lse lse float32 [batch, heads, seqlen_q]. Caches keep their head_dim, which has to be a multiple of 8.
    """
    _check(0.0, q, k, v)
    if cache_leftpad is not None:
        raise NotImplementedError("imbrex.flash_attn: cache_leftpad: expected None; start requests at the first token of their pages")
    if (k is None) != (v is None) or (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("imbrex.flash_attn: expected k with v and rotary_cos with rotary_sin, got one of two")
    if rotary_cos is not None and k is None:
        raise ValueError("imbrex.flash_attn: expected k and v with rotary_cos, got none")
    batch, seqlen_q, heads, _ = q.shape
    seqlen_new = 0 if k is None else k.shape[1]
    if block_table is None:
        if (k_cache.shape[1], k_cache.stride(0) // max(1, k_cache.stride(1))) != (
            v_cache.shape[1],
            v_cache.stride(0) // max(1, v_cache.stride(1)),
        ):
            raise ValueError(f"imbrex.flash_attn: expected caches of one shape, got {list(k_cache.shape)} and {list(v_cache.shape)}")
        k_pages, page_size, block_table = _pages_of(k_cache, cache_batch_idx, batch)
        v_pages = v_cache.view(-1, page_size, *v_cache.shape[2:])
    else:
        if cache_batch_idx is not None:
            raise ValueError("imbrex.flash_attn: expected block_table or cache_batch_idx, got both")
        k_pages, v_pages, page_size = k_cache, v_cache, k_cache.shape[1]
    room = block_table.shape[1] * page_size

    if cache_seqlens is None:
        cache_seqlens = room - seqlen_new if k is None else 0
    capturing = _torch.is_capturing(q)
    if isinstance(cache_seqlens, int):
        if cache_seqlens + seqlen_new > room:
            raise ValueError(f"imbrex.flash_attn: the cache has room for {room} tokens, got {cache_seqlens + seqlen_new}")
        lengths = _torch.equal_lengths(batch, seqlen_q, cache_seqlens + seqlen_new, q.device if capturing else None)
        cached = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    else:
        starts = torch.arange(batch + 1, dtype=torch.int32, device=cache_seqlens.device) * seqlen_q
        lengths = _torch.Lengths(starts, cache_seqlens.to(torch.int32) + seqlen_new, seqlen_q, room)
        cached = cache_seqlens.to(q.device)

    new_kv = slots = None
    if k is not None and v is not None:
        positions = cached[:, None] + torch.arange(seqlen_new, dtype=torch.int32, device=q.device)
        if rotary_cos is not None:
            local = causal or tuple(window_size) != (-1, -1)
            turns = torch.arange(seqlen_q, dtype=torch.int32, device=q.device) * int(local)
            q = _rotated(q, rotary_cos, rotary_sin, cached[:, None] + turns, rotary_interleaved)
            k = _rotated(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
        pages = block_table.to(q.device).gather(1, (positions // page_size).long())
        slots = (pages.long() * page_size + positions % page_size).reshape(-1)
        rows = batch * seqlen_new, k.shape[2]
        new_kv = (k.reshape(*rows, -1).to(q.dtype), v.reshape(*rows, -1).to(q.dtype))
        if seqlen_new != seqlen_q:  # a step of its own: slots are those of the step's tokens
            _torch.write_kv((k_pages, v_pages), *new_kv, slots, page_size)
            new_kv = slots = None
    score = _score(q, softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = _torch.attend(
        q.reshape(batch * seqlen_q, heads, -1),
        (k_pages, v_pages),
        lengths,
        score,
        block_size=page_size,
        block_table=block_table,
        new_kv=new_kv,
        slot_mapping=slots,
        lse=True if return_softmax_lse else None,
    )
    out = out.view(batch, seqlen_q, heads, -1)
    return (out, lse.view(batch, seqlen_q, heads).transpose(1, 2)) if return_softmax_lse and lse is not None else out
