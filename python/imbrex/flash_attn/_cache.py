"""Attention over a cache that new keys are written to first: flash-attn's flash_attn_with_kvcache, and FlashAttention 3's."""
import math
from typing import Any, NamedTuple, Optional, Tuple, Union

import torch

from imbrex import _torch_attention
from imbrex.flash_attn._options import attend, check_call, check_ints, check_tensors, refuse, rows, score_of, slopes_of, wrong
from imbrex.flash_attn._rotary import check_angles, rotate

Tensor = torch.Tensor
_LARGEST_PAGE = 256  # tokens of a page when rows without pages are read as pages
_SMALLEST_PAGE = 16  # smaller ones are slow: a row is one page then
_LARGEST_ROW = 65536  # tokens that a page may have at all


class _Pages(NamedTuple):
    """k and v as pages [num_pages, size, heads_k, d], and those of each request, int32 [batch, columns]."""

    k: Tensor
    v: Tensor
    table: Tensor

    @property
    def size(self) -> int:
        return self.k.shape[1]

    @property
    def room(self) -> int:
        return self.table.shape[1] * self.size


def _apart(cache: Tensor) -> int:
    """The distance of rows in tokens; 0 where that is no whole number."""
    if cache.shape[0] == 1:
        return cache.shape[1]
    return cache.stride(0) // cache.stride(1) if cache.stride(1) and cache.stride(0) % cache.stride(1) == 0 else 0


def _split(pages: _Pages, size: int) -> _Pages:
    """Views the pages as smaller ones of `size` tokens, which divides the length of rows and their distance in k and v."""
    rows, tokens = pages.k.shape[:2]
    apart = _apart(pages.k)
    count = ((rows - 1) * apart + tokens) // size
    if count >= 1 << 31:
        raise wrong("k_cache", f"fewer than 2^31 pages of {size} tokens, which int32 tables can name", count)
    k, v = (x.as_strided((count, size, *x.shape[2:]), (size * x.stride(1), *x.stride()[1:])) for x in (pages.k, pages.v))
    within = torch.arange(tokens // size, dtype=torch.int32, device=pages.table.device)
    return _Pages(k, v, (pages.table[:, :, None] * (apart // size) + within).flatten(1))


def _pages_of(
    k_cache: Tensor, v_cache: Tensor, table: Optional[Tensor], batch_idx: Optional[Tensor], batch: int, leftpad: Optional[Tensor]
) -> _Pages:
    """Views of the caches, whatever their strides. With leftpad pages are single tokens, and a request's first is the first that it sees."""
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise wrong("v_cache", f"{list(k_cache.shape[:3])} and a head_dim, as k_cache has", list(v_cache.shape))
    device, tokens = k_cache.device, k_cache.shape[1]
    apart = _apart(k_cache) if _apart(k_cache) == _apart(v_cache) else 0
    size = 0
    if table is None:
        table = torch.arange(batch, dtype=torch.int32, device=device) if batch_idx is None else batch_idx.to(device)
        table = table[:, None]
        part = math.gcd(apart, tokens)
        size = min(part & -part, _LARGEST_PAGE)
        if size < _SMALLEST_PAGE and tokens <= _LARGEST_ROW:
            size = tokens
    pages = _Pages(k_cache, v_cache, table)
    if leftpad is None:
        return _split(pages, size) if apart and 0 < size < tokens else pages
    if not apart:
        refuse("cache_leftpad over k_cache and v_cache of different strides", "make both contiguous")
    pages = _split(pages, 1) if tokens > 1 else pages
    columns = leftpad.to(pages.table.device)[:, None] + torch.arange(pages.room, device=pages.table.device)
    return pages._replace(table=pages.table.gather(1, columns.clamp(0, pages.room - 1).long()))


def slots_of(pages: _Pages, positions: Tensor, num_columns: Any) -> Tensor:
    """int64, flat: where tokens at `positions` [batch, n] of their requests go; -1, which is not written, for those that have no place.

    num_columns: pages of a request that count, a number or int [batch, 1].
    """
    column = positions.div(pages.size, rounding_mode="floor")
    there = (column >= 0) & (column < num_columns)
    page = pages.table.to(positions.device).gather(1, torch.where(there, column, 0).long()).long()
    there = there & (page >= 0) & (page < pages.k.shape[0])
    return torch.where(there, page * pages.size + positions.long() % pages.size, -1).reshape(-1)


def _too_long(room: int, got: int, request: int, new: int) -> ValueError:
    return ValueError(f"imbrex.flash_attn: cache_seqlens: the cache has room for {room} tokens, got {got} for request {request}, {new} of them new")


def _check_lens(lens: Tensor, cached: Tensor, pads: Optional[Tensor], new: int, room: int) -> None:
    """The number of keys of each request, new ones included, and the number before the new ones; all on the host."""
    lowest = torch.zeros_like(cached) if pads is None else pads
    for r in ((lens > room) | (cached < lowest) | (lowest < 0)).nonzero().flatten().tolist()[:1]:
        if int(lens[r]) > room:
            raise _too_long(room, int(lens[r]), r, new)
        raise wrong("cache_seqlens", f"{max(int(lowest[r]), 0)} or more for request {r}", f"{int(cached[r])} with cache_leftpad {int(lowest[r])}")


def _check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor, paged: bool, ragged: bool) -> None:
    queries, caches = "total_q heads d" if ragged else "batch seqlen_q heads d", "batch_cache seqlen_cache heads_k d"
    check_tensors(f"{queries}, {'num_blocks page_size heads_k d' if paged else caches}", q=q, k_cache=k_cache, v_cache=v_cache)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.shape[-1] % 8:
            refuse(f"{name} with head_dim {cache.shape[-1]}", "make caches with a head_dim that is a multiple of 8, and pad q, k and v")
        if cache.stride(-1) != 1:
            raise wrong(name, "stride 1 in its last dimension", list(cache.stride()))
    if not k_cache.shape[1]:
        raise wrong("k_cache", "room for a token or more", list(k_cache.shape))


def _check_rows(
    batch: int, k_cache: Tensor, k: Optional[Tensor], v: Optional[Tensor], table: Optional[Tensor], table_name: str, batch_idx: Optional[Tensor]
) -> None:
    """New keys, and which rows or pages of the caches are those of the requests."""
    for name, x in (("k", k), ("v", v)):
        if x is not None and k is not None and x.shape[:2] != (batch, k.shape[1]):
            raise wrong(name, f"[{batch}, {k.shape[1]}, heads_k, d]", list(x.shape))
    if table is not None:
        if batch_idx is not None:
            raise ValueError(f"imbrex.flash_attn: expected {table_name} or cache_batch_idx, got both")
        if table.dim() != 2 or table.dtype != torch.int32 or table.shape[0] != batch:
            raise wrong(table_name, f"torch.int32 [{batch}, max_blocks]", f"{table.dtype} {list(table.shape)}")
    elif batch_idx is not None:
        check_ints("cache_batch_idx", batch_idx, batch)
        if not batch_idx.is_cuda and batch and not 0 <= int(batch_idx.min()) <= int(batch_idx.max()) < k_cache.shape[0]:
            raise wrong("cache_batch_idx", f"0 to {k_cache.shape[0] - 1}, rows of k_cache", batch_idx.tolist())
    elif batch > k_cache.shape[0]:
        raise wrong("k_cache", f"{batch} rows or more, as q has requests", list(k_cache.shape))


class _Counts(NamedTuple):
    """The lengths of a step, all on the host or all on the GPU, int32 [batch]."""

    cached: Tensor  # tokens in front of the new ones
    pads: Optional[Tensor]  # of them those that are not seen
    keys: Tensor  # that are seen, the new ones too; 0 for a request that has no room, which is an error on the host


def _counts(cache_seqlens: Union[int, Tensor], pads: Optional[Tensor], batch: int, new: int, room: int, device: torch.device) -> _Counts:
    """device: where a length that is a plain number is put."""
    if torch.is_tensor(cache_seqlens):
        check_ints("cache_seqlens", cache_seqlens, batch)
        cached = cache_seqlens
    else:
        if cache_seqlens + new > room:
            raise _too_long(room, cache_seqlens + new, 0, new)
        cached = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    pads = None if pads is None else pads.to(cached.device)
    ends = cached + new
    keys = ends if pads is None else ends - pads
    if cached.is_cuda:
        return _Counts(cached, pads, torch.where(ends <= room, keys.clamp(min=0), 0))
    _check_lens(ends, cached, pads, new, room)
    return _Counts(cached, pads, keys)


def attend_over_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor],
    v: Optional[Tensor],
    *,
    rotary_cos: Optional[Tensor],
    rotary_sin: Optional[Tensor],
    rotary_interleaved: bool,
    cache_seqlens: Optional[Union[int, Tensor]],
    cache_batch_idx: Optional[Tensor],
    cache_leftpad: Optional[Tensor],
    table: Optional[Tensor],
    softmax_scale: Optional[float],
    causal: bool,
    window_size: Tuple[int, int],
    softcap: float,
    alibi_slopes: Optional[Tensor],
    return_softmax_lse: bool,
    table_name: str = "block_table",
    cu_seqlens_q: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
) -> Any:
    """What flash_attn_with_kvcache() says; with cu_seqlens_q int32 [batch + 1] q is [total_q, heads, d], and out and lse are as varlen ones."""
    check_call(0.0, q, k, v, k_cache, v_cache, rotary_cos, rotary_sin, alibi_slopes)
    if (k is None) != (v is None) or (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("imbrex.flash_attn: expected k with v and rotary_cos with rotary_sin, got one of two")
    ragged = cu_seqlens_q is not None
    _check_caches(q, k_cache, v_cache, table is not None, ragged)
    check_tensors("batch seqlen_new heads_k d", k=k, v=v)
    if ragged:
        check_ints("cu_seqlens_q", cu_seqlens_q, "batch + 1")
    device, heads = q.device, q.shape[-2]
    batch = len(cu_seqlens_q) - 1 if ragged else q.shape[0]
    seqlen_q = int(q.shape[0] if max_seqlen_q is None else max_seqlen_q) if ragged else q.shape[1]
    new = 0 if k is None else k.shape[1]
    _check_rows(batch, k_cache, k, v, table, table_name, cache_batch_idx)
    if cache_leftpad is not None:
        check_ints("cache_leftpad", cache_leftpad, batch)

    pages = _pages_of(k_cache, v_cache, table, cache_batch_idx, batch, cache_leftpad)
    room = pages.room
    if cache_seqlens is None:
        cache_seqlens = room - new if k is None else 0
    same: Tuple[int, ...] = ()
    if not (torch.is_tensor(cache_seqlens) or ragged or cache_leftpad is not None):
        same = (batch, seqlen_q, cache_seqlens + new)
    on_device = _torch_attention.is_capturing(q) or any(x is not None and x.is_cuda for x in (cu_seqlens_q, cache_leftpad))
    cached, pads, keys = _counts(cache_seqlens, cache_leftpad, batch, new, room, device if on_device else torch.device("cpu"))
    starts = cu_seqlens_q if ragged else torch.arange(batch + 1, dtype=torch.int32, device=cached.device) * seqlen_q
    lengths = _torch_attention.Lengths(starts, keys.to(starts.device), seqlen_q, room, same)

    begin = cached.to(device)[:, None]  # of the new tokens
    if rotary_cos is not None:
        check_angles(rotary_cos, rotary_sin, q.shape[-1])
        if rotary_cos.shape[0] < room:
            raise wrong("rotary_cos", f"{room} positions or more, as the cache has", list(rotary_cos.shape))
        if ragged:
            refuse("rotary_cos with cu_seqlens_q", "turn q with flash_attn.layers.rotary.apply_rotary_emb")
        local = causal or tuple(window_size) != (-1, -1)
        turns = torch.arange(seqlen_q, dtype=torch.int32, device=device) * int(local)
        q = rotate(q, rotary_cos, rotary_sin, begin + turns, rotary_interleaved)
    new_kv = slots = None
    if k is not None:
        positions = begin + torch.arange(new, dtype=torch.int32, device=device)
        if rotary_cos is not None:
            k = rotate(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
        columns: Any = pages.table.shape[1]
        if pads is not None:
            positions, columns = positions - pads.to(device)[:, None], columns - pads.to(device)[:, None]
        slots = slots_of(pages, positions, columns)
        new_kv = tuple(x.reshape(batch * new, *x.shape[2:]).to(q.dtype) for x in (k, v))
        if ragged or new != seqlen_q or (alibi_slopes is not None and alibi_slopes.dim() == 2):  # a step of its own: it has other tokens
            _torch_attention.write_kv((pages.k, pages.v), *new_kv, slots, pages.size)
            new_kv = slots = None
    slopes = slopes_of(alibi_slopes, batch, heads)
    head_dim, longest = q.shape[-1], max(seqlen_q, room)
    out, lse = attend(
        rows(q if ragged else q.reshape(batch * seqlen_q, heads, head_dim)),
        (pages.k, pages.v),
        lengths,
        slopes,
        lambda own: score_of(head_dim, softmax_scale, causal, window_size, softcap, own, longest),
        block_size=pages.size,
        block_table=pages.table,
        new_kv=new_kv,
        slot_mapping=slots,
        lse=True if return_softmax_lse else None,
    )
    if ragged:
        return (out, lse.t()) if return_softmax_lse else out
    out = out.view(batch, seqlen_q, heads, out.shape[-1])
    return (out, lse.view(batch, seqlen_q, heads).transpose(1, 2)) if return_softmax_lse else out
