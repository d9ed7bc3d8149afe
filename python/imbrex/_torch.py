"""Attention of torch tensors in one call, for imbrex.torch, imbrex.flash_attn and imbrex.transformers.

Plans are found again by what they are for. Lengths on a GPU stay there: the plan of the step is then made by a kernel, and a CUDA graph may
hold the call.
"""
import threading
from collections import OrderedDict
from typing import NamedTuple, Optional, Tuple

import torch

from . import _core
from ._arrays import device_name, dtype_name
from .plan import KvLayer, Plan

_MOST_PLANS = 64
_MOST_HEADS = 4096  # of a spec; in a batch of equal lengths the heads of all requests may be those of one


class Score(NamedTuple):
    """What happens to a logit, and what a query sees: the fields of AttentionSpec that callers choose."""

    causal: bool = False
    window: Tuple[int, int] = (-1, -1)  # left, right; inclusive, -1 is no limit
    scale: Optional[float] = None
    soft_cap: float = 0.0
    sinks: Optional[torch.Tensor] = None  # float32 [num_q_heads]
    alibi_slopes: Optional[torch.Tensor] = None  # float32 [num_q_heads]
    relative_bias: Optional[torch.Tensor] = None  # float32 [buckets, num_q_heads], T5's
    relative_max_distance: int = 0
    relative_bidirectional: bool = False


class _Kept:
    """A plan, what it was updated with last where that may be asked again, and the stream of its last use."""

    def __init__(self, plan):
        self.plan, self.batch, self.stream, self.captured = plan, None, None, False


_plans = OrderedDict()
_lock = threading.Lock()


def _limit(n):
    """A power of two, so that few plans serve many batches."""
    return 1 << max(0, int(n) - 1).bit_length()


def _make(fields, device, limits):
    spec = _core.AttentionSpec(**dict(fields))
    max_num_reqs, max_num_tokens, max_seq_len, max_query_len = limits
    return Plan(
        spec,
        device,
        max_num_reqs=max_num_reqs,
        max_num_tokens=max_num_tokens,
        max_seq_len=max_seq_len,
        max_query_len=max_query_len,
        on_device=device != "cpu",
    )


def _plan_for(fields, anchor, num_reqs, num_tokens, max_query_len, max_seq_len):
    """The plan for a spec and the limits of a batch, ordered behind its last use when that was on another stream."""
    device = device_name(anchor)
    limits = (_limit(num_reqs), _limit(num_tokens), _limit(max_seq_len), 1 if max_query_len == 1 else 0)
    key = (fields, device, limits, threading.get_ident())
    capturing = anchor.is_cuda and torch.cuda.is_current_stream_capturing()
    with _lock:
        kept = _plans.get(key)
        if kept is not None:
            _plans.move_to_end(key)
    if kept is None:
        if capturing:
            raise RuntimeError("imbrex: call the function once with these shapes before a CUDA graph captures it: kernels are loaded then")
        kept = _Kept(_make(fields, device, limits))
        with _lock:
            _plans[key] = kept
            for old in [k for k, p in _plans.items() if not p.captured][: max(0, len(_plans) - _MOST_PLANS)]:
                del _plans[old]
    if anchor.is_cuda:
        stream = torch.cuda.current_stream(anchor.device)
        if kept.stream is not None and kept.stream != stream and not capturing:
            stream.wait_stream(kept.stream)
        kept.stream = stream
        if capturing:
            kept.captured = True  # a graph reads its memory
            kept.batch = None
    return kept, capturing


def _fields(q, k, head_dim_v, block_size, score, custom_mask):
    window = score.window
    return (
        ("kind", "encoder_decoder"),  # there may be fewer keys than queries
        ("num_q_heads", q.shape[-2]),
        ("num_kv_heads", k.shape[-2]),
        ("head_dim_qk", q.shape[-1]),
        ("head_dim_v", head_dim_v),
        ("q_dtype", dtype_name(q)),
        ("kv_dtype", dtype_name(k)),
        ("block_size", block_size),
        ("causal", bool(score.causal)),
        ("window_left", int(window[0])),
        ("window_right", int(window[1])),
        ("custom_mask", custom_mask is not None),
        ("scale", 0.0 if score.scale is None else float(score.scale)),
        ("soft_cap", float(score.soft_cap or 0.0)),
        ("sinks", score.sinks is not None),
        ("alibi", score.alibi_slopes is not None),
        ("relative_buckets", 0 if score.relative_bias is None else len(score.relative_bias)),
        ("relative_max_distance", score.relative_max_distance),
        ("relative_bidirectional", score.relative_bidirectional),
    )


class Lengths(NamedTuple):
    """Of a batch: both arrays on the host, or both where q is. `same` is a hashable name of host lengths, () when there is none."""

    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs]
    max_query_len: int
    max_seq_len: int
    same: tuple = ()


def equal_lengths(num_reqs, query_len, seq_len, device=None):
    """Lengths of a batch without padding; on a device inside a capture, else on the host."""
    on = torch.device("cpu") if device is None else device
    return Lengths(
        torch.arange(num_reqs + 1, dtype=torch.int32, device=on) * query_len,
        torch.full((num_reqs,), seq_len, dtype=torch.int32, device=on),
        query_len,
        seq_len,
        (num_reqs, query_len, seq_len),
    )


def starts_of(seq_lens):
    """int32 [num_reqs + 1]: where each request's keys begin when they lie one after the other."""
    return torch.nn.functional.pad(torch.cumsum(seq_lens, 0, dtype=torch.int32), (1, 0))


def is_capturing(x):
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def no_gradient(*tensors):
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise NotImplementedError("imbrex has no backward pass: call it under torch.no_grad() or torch.inference_mode()")


def f32(x):
    """Per-head numbers as kernels take them."""
    return None if x is None else x.detach().to(torch.float32).contiguous()


def attend(
    q,
    layer,
    lengths,
    score,
    *,
    block_size=0,
    block_table=None,
    kv_start_loc=None,
    custom_mask=None,
    new_kv=None,
    slot_mapping=None,
    out=None,
    lse=None,
):
    """Attention of q [num_tokens, num_q_heads, d] over ragged keys (block_size 0) or pages; first new_kv (k, v) go to their slots.

    lse: True makes one, a tensor is filled. Returns (out, lse or None).
    """
    layer = KvLayer(*layer)
    if not layer.k.shape[0]:  # no keys at all: imbrex wants memory to point to
        layer = layer._replace(k=layer.k.new_empty((1, *layer.k.shape[1:])), v=layer.v.new_empty((1, *layer.v.shape[1:])))
    v_dim = layer.v.shape[-1]
    fields = _fields(q, layer.k, v_dim, block_size, score, custom_mask)
    num_reqs, num_tokens = lengths.seq_lens.shape[0], q.shape[0]
    if out is None:
        out = q.new_empty((num_tokens, q.shape[1], v_dim))
    if lse is True:
        lse = q.new_empty((num_tokens, q.shape[1]), dtype=torch.float32)
    if num_tokens == 0 or num_reqs == 0:
        return out, lse
    kept, capturing = _plan_for(fields, q, num_reqs, num_tokens, lengths.max_query_len, lengths.max_seq_len)
    arrays = dict(block_table=block_table, kv_start_loc=kv_start_loc, slot_mapping=slot_mapping, custom_mask=custom_mask)
    if lengths.query_start_loc.is_cuda:
        kept.batch = None
        kept.plan.update_on_device(lengths.query_start_loc, lengths.seq_lens, max_num_tokens=num_tokens, **arrays)
    else:
        if capturing:
            raise RuntimeError("imbrex: inside a CUDA graph capture lengths must be on the GPU, got them on the host")
        # Tables are read where they lie; only lengths are copied, and equal ones need not be planned again.
        same = lengths.same if all(a is None or a is kv_start_loc for a in arrays.values()) else ()
        if not same or kept.batch != same:
            kept.plan.update(lengths.query_start_loc, lengths.seq_lens, **arrays)
            kept.batch = same
    if new_kv is not None:
        kept.plan.write_kv(layer, *new_kv)
    kept.plan.run(q, layer, out, lse=lse, sinks=score.sinks, alibi_slopes=score.alibi_slopes, relative_bias=score.relative_bias)
    return out, lse


def write_kv(layer, k, v, slot_mapping, block_size):
    """k and v [num_tokens, num_kv_heads, d] to their slots of pages [num_blocks, block_size, num_kv_heads, d], converted; -1 is not written."""
    layer = KvLayer(*layer)
    tokens, device = k.shape[0], k.device
    if tokens == 0:
        return
    fields = _fields(k, layer.k, layer.v.shape[-1], block_size, Score(), None)
    kept, capturing = _plan_for(fields, k, 1, tokens, tokens, tokens)
    lengths = equal_lengths(1, tokens, tokens, device if capturing else None)
    pages = torch.zeros((1, -(-tokens // block_size)), dtype=torch.int32, device=device)  # of a request that nobody attends to
    kept.batch = None
    if capturing:
        kept.plan.update_on_device(lengths.query_start_loc, lengths.seq_lens, max_num_tokens=tokens, block_table=pages, slot_mapping=slot_mapping)
    else:
        kept.plan.update(lengths.query_start_loc, lengths.seq_lens, block_table=pages, slot_mapping=slot_mapping)
    kept.plan.write_kv(layer, k, v)


def _overlaps(x):
    """Elements share memory, as after expand(): kernels take no stride of 0."""
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape))


def _rows(x):
    """[b, h, s, d] as [b * s, h, d] without a copy, or None."""
    b, h, s, d = x.shape
    if x.stride(3) != 1 or _overlaps(x) or (b > 1 and x.stride(0) != s * x.stride(2)):
        return None
    return x.as_strided((b * s, h, d), (x.stride(2), x.stride(1), 1), x.storage_offset())


def _rows_or_copy(x):
    rows = _rows(x)
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]).contiguous() if rows is None else rows


def _heads(x):
    """[b, h, s, d] as [s, b * h, d] without a copy, or None."""
    b, h, s, d = x.shape
    if x.stride(3) != 1 or _overlaps(x) or b * h > _MOST_HEADS or (b > 1 and h > 1 and x.stride(0) != h * x.stride(1)):
        return None
    return x.as_strided((s, b * h, d), (x.stride(2), x.stride(0) if h == 1 else x.stride(1), 1), x.storage_offset())


def _by_rows(q, k, v, score, custom_mask, lse):
    b, h, sq, _ = q.shape
    sk = k.shape[2]
    lengths = equal_lengths(b, sq, sk, q.device if is_capturing(q) else None)
    where = lengths.query_start_loc if custom_mask is None else custom_mask  # arrays of a step lie together
    starts = torch.arange(b + 1, dtype=torch.int32, device=where.device) * sk
    out, lse = attend(_rows_or_copy(q), (_rows_or_copy(k), _rows_or_copy(v)), lengths, score, kv_start_loc=starts, custom_mask=custom_mask, lse=lse)
    out = out.view(b, sq, h, -1).transpose(1, 2)
    return out, None if lse is None else lse.view(b, sq, h).transpose(1, 2)


def _by_heads(q, k, v, score, lse):
    b, h, sq, _ = q.shape
    sk, dv = k.shape[2], v.shape[3]
    q_heads = _heads(q)
    q_heads = _heads(q.contiguous()) if q_heads is None else q_heads
    lengths = equal_lengths(1, sq, sk, q.device if is_capturing(q) else None)
    starts = torch.arange(2, dtype=torch.int32, device=lengths.query_start_loc.device) * sk
    repeated = score._replace(
        sinks=None if score.sinks is None else score.sinks.repeat(b),
        alibi_slopes=None if score.alibi_slopes is None else score.alibi_slopes.repeat(b),
        relative_bias=None if score.relative_bias is None else score.relative_bias.repeat(1, b),
    )
    out = q.new_empty((b, h, sq, dv))
    if lse:
        lse = q.new_empty((b, h, sq), dtype=torch.float32)
    attend(
        q_heads,
        (_heads(k), _heads(v)),
        lengths,
        repeated,
        kv_start_loc=starts,
        out=_heads(out),
        lse=lse.view(b * h, sq).t() if lse is not None else None,
    )
    return out, lse


def _token_pages(x):
    """[b, h, s, d] as pages of one token [n, 1, h, d] and how far apart the requests' first pages are, without a copy; or None."""
    b, h, s, d = x.shape
    if x.stride(3) != 1 or _overlaps(x) or x.stride(0) % x.stride(2) != 0:
        return None
    apart = x.stride(0) // x.stride(2)
    pages = (b - 1) * apart + s
    return x.as_strided((pages, 1, h, d), (x.stride(2), x.stride(2), x.stride(1), 1), x.storage_offset()), apart


def _by_pages(q, k, v, score, custom_mask, lse):
    """As _by_rows, for keys that lie head by head; None where no view shows them."""
    b, h, sq, _ = q.shape
    k_pages, v_pages = _token_pages(k), _token_pages(v)
    if k_pages is None or v_pages is None or k_pages[1] != v_pages[1]:
        return None
    sk = k.shape[2]
    first = torch.arange(b, dtype=torch.int32, device=q.device) * k_pages[1]
    table = first[:, None] + torch.arange(sk, dtype=torch.int32, device=q.device)
    lengths = equal_lengths(b, sq, sk, q.device if is_capturing(q) else None)
    out, lse = attend(_rows_or_copy(q), (k_pages[0], v_pages[0]), lengths, score, block_size=1, block_table=table, custom_mask=custom_mask, lse=lse)
    out = out.view(b, sq, h, -1).transpose(1, 2)
    return out, None if lse is None else lse.view(b, sq, h).transpose(1, 2)


def dense(q, k, v, score, custom_mask=None, lse=None):
    """Attention of a batch of equal lengths, q [b, h, sq, d], k and v [b, hk, sk, d] with any strides; copies only what no view can show.

    custom_mask: bool or uint8 [b, 1, sq, sk] (or [1, 1, sq, sk]), false hides. Returns out [b, h, sq, dv] and lse [b, h, sq] or None.
    """
    b, _, sq, _ = q.shape
    sk = k.shape[2]
    if q.numel() == 0 or sk == 0:
        out = q.new_zeros((b, q.shape[1], sq, v.shape[3]))
        return out, q.new_full(out.shape[:3], float("-inf"), dtype=torch.float32) if lse else None
    if custom_mask is not None:
        custom_mask = custom_mask.expand(b, 1, sq, sk).reshape(-1).contiguous().view(torch.uint8)
        if _rows(k) is None or _rows(v) is None:
            found = _by_pages(q, k, v, score, custom_mask, lse)
            if found is not None:
                return found
    elif _heads(k) is not None and _heads(v) is not None and (_rows(k) is None or _rows(v) is None):
        return _by_heads(q, k, v, score, lse)
    return _by_rows(q, k, v, score, custom_mask, lse)
