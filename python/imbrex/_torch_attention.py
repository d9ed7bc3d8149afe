"""Attention of torch tensors in one call, for imbrex.torch, imbrex.flash_attn and imbrex.transformers.

Plans are found again by what they are for. Lengths on a GPU stay there: the plan of the step is then made by a kernel, and a CUDA graph may
hold the call.
"""
import functools
from typing import NamedTuple, Optional, Tuple

import torch

from . import _core
from ._frameworks import device_name, dtype_name, no_gradient, stream_address
from ._plan_cache import Limits, PlanCache
from ._repeated_calls import Call, by_token, key_of, repeat
from .plan import KvLayer, Plan

__all__ = ["Lengths", "Score", "attend", "dense", "equal_lengths", "f32", "is_capturing", "no_gradient", "starts_of", "write_kv"]

_MOST_HEADS = 4096  # of a spec; in a batch of equal lengths the heads of all requests may be those of one
_FEW = 32  # numbers, which PyTorch takes from a list sooner than it computes them
_CPU = torch.device("cpu")  # named wherever a tensor of the host is made: the default device may be another one


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


_plans = PlanCache()
_SPEC_FIELDS = (
    "num_q_heads",
    "num_kv_heads",
    "head_dim_qk",
    "head_dim_v",
    "q_dtype",
    "kv_dtype",
    "block_size",
    "causal",
    "window_left",
    "window_right",
    "custom_mask",
    "scale",
    "soft_cap",
    "sinks",
    "alibi",
    "relative_buckets",
    "relative_max_distance",
    "relative_bidirectional",
)


def _plan_for(q, k, head_dim_v, block_size, score, masked, needed, stream):
    """The plan for a spec, as PlanCache keeps it, and the limits of a batch."""
    device = device_name(q)
    values = (
        q.shape[-2],
        k.shape[-2],
        q.shape[-1],
        head_dim_v,
        dtype_name(q),
        dtype_name(k),
        block_size,
        bool(score.causal),
        int(score.window[0]),
        int(score.window[1]),
        masked,
        0.0 if score.scale is None else float(score.scale),
        float(score.soft_cap or 0.0),
        score.sinks is not None,
        score.alibi_slopes is not None,
        0 if score.relative_bias is None else len(score.relative_bias),
        score.relative_max_distance,
        score.relative_bidirectional,
    )

    def make(limits):
        spec = _core.AttentionSpec(kind="encoder_decoder", **dict(zip(_SPEC_FIELDS, values)))  # there may be fewer keys than queries
        return Plan(spec, device, on_device=device != "cpu", ordered=True, **limits.arguments())

    return _plans.find((device, needed.query_len, *values), needed, make, stream)


class Lengths(NamedTuple):
    """The lengths of a batch: both arrays on the host, or both on the device of q. `same` is a hashable name of host lengths, () when there is none."""

    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs]
    max_query_len: int
    max_seq_len: int
    same: tuple = ()


def _multiples(count, of, device):
    """0, of, 2 * of, .. as int32 [count]."""
    if device.type == "cpu" and count <= _FEW:
        return torch.tensor([i * of for i in range(count)], dtype=torch.int32, device=device)
    return torch.arange(count, dtype=torch.int32, device=device) * of


@functools.lru_cache(maxsize=256)
def _equal_on_host(num_reqs, query_len, seq_len):
    return _equal(num_reqs, query_len, seq_len, _CPU)


def _equal(num_reqs, query_len, seq_len, device):
    return Lengths(
        _multiples(num_reqs + 1, query_len, device),
        torch.full((num_reqs,), seq_len, dtype=torch.int32, device=device),
        query_len,
        seq_len,
        (num_reqs, query_len, seq_len),
    )


def equal_lengths(num_reqs, query_len, seq_len, device=None):
    """Lengths of a batch without padding, not to be written; on a device inside a capture, else on the host."""
    return _equal_on_host(num_reqs, query_len, seq_len) if device is None else _equal(num_reqs, query_len, seq_len, device)


@functools.lru_cache(maxsize=256)
def _equal_starts_on_host(num_reqs, length):
    return _multiples(num_reqs + 1, length, _CPU)


def _equal_starts(num_reqs, length, device):
    """Where each request begins, on the host or a device; not to be written."""
    if device.type == "cpu":
        return _equal_starts_on_host(num_reqs, length)
    return _multiples(num_reqs + 1, length, device)


def starts_of(seq_lens):
    """int32 [num_reqs + 1]: where each request's keys begin when they lie one after the other."""
    return torch.nn.functional.pad(torch.cumsum(seq_lens, 0, dtype=torch.int32), (1, 0))


def is_capturing(x):
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def f32(x):
    """Per-head numbers as kernels take them."""
    return None if x is None else x.detach().to(torch.float32).contiguous()


def attend(q, layer, lengths, score, *, block_size=0, **arrays):
    """Attention of q [num_tokens, num_q_heads, d] over ragged keys (block_size 0) or pages; first new_kv (k, v) go to their slots.

    Further arrays: block_table, kv_start_loc, custom_mask, new_kv, slot_mapping, out, lse. lse: True makes one, a tensor is filled. Returns
    (out, lse or None).
    """
    layer = KvLayer(*layer)
    _check_rows(q, layer.k, layer.v, block_size)
    return _attend(q, layer, lengths, score, block_size=block_size, **arrays)


def _attend(
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
    call=None,
):
    """attend() for tensors whose shapes have been checked; `call` may then be repeated without checks."""
    if not layer.k.shape[0]:  # no keys at all: imbrex wants memory to point to
        layer = layer._replace(k=layer.k.new_empty((1, *layer.k.shape[1:])), v=layer.v.new_empty((1, *layer.v.shape[1:])))
    num_reqs, num_tokens, v_dim = lengths.seq_lens.shape[0], q.shape[0], layer.v.shape[-1]
    if out is None:
        out = q.new_empty((num_tokens, q.shape[1], v_dim))
    if lse is True:
        lse = q.new_empty((num_tokens, q.shape[1]), dtype=torch.float32)
    if num_tokens == 0 or num_reqs == 0:
        return out, lse
    on_device = lengths.query_start_loc.is_cuda
    if not on_device and is_capturing(q):
        raise RuntimeError("imbrex: inside a CUDA graph capture lengths must be on the GPU, got them on the host")
    needed = Limits(num_reqs, num_tokens, lengths.max_seq_len, 1 if lengths.max_query_len == 1 else 0)
    stream = stream_address(None, q)
    kept = _plan_for(q, layer.k, v_dim, block_size, score, custom_mask is not None, needed, stream)
    arrays = dict(block_table=block_table, kv_start_loc=kv_start_loc, slot_mapping=slot_mapping, custom_mask=custom_mask, stream=stream)
    if on_device:
        kept.batch = None
        kept.plan.update_on_device(lengths.query_start_loc, lengths.seq_lens, max_num_tokens=num_tokens, **arrays)
    else:
        # Tables are read where they lie; only lengths are copied, and equal ones need not be planned again.
        same = lengths.same if block_table is None and slot_mapping is None and custom_mask is None else ()
        if not same or kept.batch != same:
            kept.batch = None
            kept.plan.update(lengths.query_start_loc, lengths.seq_lens, **arrays)
            kept.batch = same
    if new_kv is not None:
        kept.plan.write_kv(layer, *new_kv, stream=stream)
    per_head = dict(sinks=score.sinks, alibi_slopes=score.alibi_slopes, relative_bias=score.relative_bias)
    kept.plan.run(q, layer, out, lse=lse, stream=stream, **per_head)
    if call is not None:
        call.remember(_plans, kept, q, layer, out)
    return out, lse


def write_kv(layer, k, v, slot_mapping, block_size):
    """Writes k and v [num_tokens, num_kv_heads, d] to their slots of pages [num_blocks, block_size, num_kv_heads, d], converted; slot -1 is skipped."""
    layer = KvLayer(*layer)
    _check_pages(layer.k, layer.v)
    for name, new, pages in (("k", k, layer.k), ("v", v, layer.v)):
        _expect(name, new, (k.shape[0], *pages.shape[2:]), layer.k.device)
    tokens, device = k.shape[0], k.device
    if tokens == 0:
        return
    stream = stream_address(None, k)
    kept = _plan_for(k, layer.k, layer.v.shape[-1], block_size, Score(), False, Limits(1, tokens, tokens), stream)
    capturing = is_capturing(k)
    lengths = equal_lengths(1, tokens, tokens, device if capturing else None)
    pages = torch.zeros((1, -(-tokens // block_size)), dtype=torch.int32, device=device)  # of a request that nobody attends to
    kept.batch = None
    arrays = dict(block_table=pages, slot_mapping=slot_mapping, stream=stream)
    if capturing:
        kept.plan.update_on_device(lengths.query_start_loc, lengths.seq_lens, max_num_tokens=tokens, **arrays)
    else:
        kept.plan.update(lengths.query_start_loc, lengths.seq_lens, **arrays)
    kept.plan.write_kv(layer, k, v, stream=stream)


def _fits(size, actual):
    return size is None or size == actual


def _expect(name, x, shape, device, dtypes=()):
    """ValueError unless a tensor has a shape (None is any size), a device and one of some types."""
    actual = x.shape
    if len(actual) != len(shape) or not all(map(_fits, shape, actual)):
        raise ValueError(f"{name}: expected [{', '.join('*' if n is None else str(n) for n in shape)}], got {list(actual)}")
    if x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {x.device}")
    if dtypes and x.dtype not in dtypes:
        raise ValueError(f"{name}: expected {' or '.join(str(t).rsplit('.', 1)[-1] for t in dtypes)}, got {str(x.dtype).rsplit('.', 1)[-1]}")


def _check_pages(k, v):
    _expect("k_cache", k, (None, None, None, None), k.device)
    _expect("v_cache", v, (*k.shape[:3], None), k.device, (k.dtype,))


def _check_rows(q, k, v, block_size):
    _expect("q", q, (None, None, None), q.device)
    if block_size:
        _expect("k_cache", k, (None, block_size, None, q.shape[2]), q.device)
        _check_pages(k, v)
    else:
        _expect("k", k, (None, None, q.shape[2]), q.device)
        _expect("v", v, (*k.shape[:2], None), q.device, (k.dtype,))


def _check_dense(q, k, v, mask):
    _expect("q", q, (None, None, None, None), q.device)
    b, _, sq, d = q.shape
    _expect("k", k, (b, None, None, d), q.device)
    _expect("v", v, (*k.shape[:3], None), q.device, (k.dtype,))
    if mask is not None:
        repeated = mask.dim() == 4
        shape = (1 if repeated and mask.shape[0] == 1 else b, 1, 1 if repeated and mask.shape[2] == 1 else sq, k.shape[2])
        _expect("mask", mask, shape, q.device, (torch.bool, torch.uint8))


def _overlaps(x):
    """Whether elements share memory, as after expand(): kernels take no stride of 0."""
    strides = x.stride()
    return 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, x.shape))


def _rows(x):
    """[b, h, s, d] as [b * s, h, d] without a copy, or None."""
    b, h, s, d = x.shape
    apart, by_head, by_token, innermost = x.stride()
    if s == 1:
        by_token = apart
    if innermost != 1 or _overlaps(x) or (b > 1 and apart != s * by_token):
        return None
    return x.as_strided((b * s, h, d), (by_token, by_head, 1), x.storage_offset())


def _rows_or_copy(x):
    rows = _rows(x)
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]).contiguous() if rows is None else rows


def _heads(x):
    """[b, h, s, d] as [s, b * h, d] without a copy, or None."""
    b, h, s, d = x.shape
    if x.stride(3) != 1 or _overlaps(x) or b * h > _MOST_HEADS or (b > 1 and h > 1 and x.stride(0) != h * x.stride(1)):
        return None
    return x.as_strided((s, b * h, d), (x.stride(2), x.stride(0) if h == 1 else x.stride(1), 1), x.storage_offset())


def _of_rows(q, layer, lengths, score, lse, call=None, **arrays):
    """attend() of q [b, h, sq, d]: out [b, h, sq, dv], which lies as rows where no view shows these in it, and lse [b, h, sq]."""
    b, h, sq, _ = q.shape
    dv = layer[1].shape[-1]
    out = q.new_empty((b, h, sq, dv)) if b == 1 or sq == 1 else None
    if call is not None:
        call.by_token, call.shape = out is None, (b * sq, h, dv) if out is None else (b, h, sq, dv)
    into = None if out is None else _rows(out)
    rows, lse = _attend(_rows_or_copy(q), KvLayer(*layer), lengths, score, out=into, lse=lse, call=call, **arrays)
    if out is None:
        out = by_token(rows, q)
    return out, None if lse is None else lse.view(b, sq, h).transpose(1, 2)


def _by_rows(q, k, v, sk, score, custom_mask, lse, call):
    b, _, sq, _ = q.shape
    lengths = equal_lengths(b, sq, sk, q.device if is_capturing(q) else None)
    starts = _equal_starts(b, sk, (lengths.query_start_loc if custom_mask is None else custom_mask).device)  # arrays of a step lie together
    return _of_rows(q, (k, v), lengths, score, lse, call, kv_start_loc=starts, custom_mask=custom_mask)


def _by_heads(q, k, v, score, lse, call):
    b, h, sq, _ = q.shape
    sk, dv = k.shape[2], v.shape[3]
    q_heads = _heads(q)
    q_heads = _heads(q.contiguous()) if q_heads is None else q_heads
    lengths = equal_lengths(1, sq, sk, q.device if is_capturing(q) else None)
    starts = _equal_starts(1, sk, lengths.query_start_loc.device)
    repeated = score._replace(
        sinks=None if score.sinks is None else score.sinks.repeat(b),
        alibi_slopes=None if score.alibi_slopes is None else score.alibi_slopes.repeat(b),
        relative_bias=None if score.relative_bias is None else score.relative_bias.repeat(1, b),
    )
    out = q.new_empty((b, h, sq, dv))
    if lse:
        lse = q.new_empty((b, h, sq), dtype=torch.float32)
    if call is not None:
        call.by_token, call.shape = False, out.shape
    _attend(
        q_heads,
        KvLayer(_heads(k), _heads(v)),
        lengths,
        repeated,
        kv_start_loc=starts,
        out=_heads(out),
        lse=lse.view(b * h, sq).t() if lse is not None else None,
        call=call,
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
    b, _, sq, _ = q.shape
    k_pages, v_pages = _token_pages(k), _token_pages(v)
    if k_pages is None or v_pages is None or k_pages[1] != v_pages[1]:
        return None
    sk = k.shape[2]
    first = torch.arange(b, dtype=torch.int32, device=q.device) * k_pages[1]
    table = first[:, None] + torch.arange(sk, dtype=torch.int32, device=q.device)
    lengths = equal_lengths(b, sq, sk, q.device if is_capturing(q) else None)
    return _of_rows(q, (k_pages[0], v_pages[0]), lengths, score, lse, block_size=1, block_table=table, custom_mask=custom_mask)


def dense(q, k, v, score, custom_mask=None, lse=None):
    """Attention of a batch of equal lengths, q [b, h, sq, d], k and v [b, hk, sk, d] with any strides; copies only what no view can show.

    custom_mask: bool or uint8 [b or 1, 1, sq or 1, sk], false hides. Returns out [b, h, sq, dv] and lse [b, h, sq] or None.
    """
    key = None if custom_mask is not None or lse or is_capturing(q) else key_of(q, k, v, score)
    if key is not None:
        out = repeat(_plans, key, q, k, v)
        if out is not None:
            return out, None
    _check_dense(q, k, v, custom_mask)
    b, _, sq, _ = q.shape
    sk = k.shape[2]
    if q.numel() == 0 or sk == 0:
        out = q.new_zeros((b, q.shape[1], sq, v.shape[3]))
        return out, q.new_full(out.shape[:3], float("-inf"), dtype=torch.float32) if lse else None
    k_rows, v_rows = _rows(k), _rows(v)
    by_rows = k_rows is not None and v_rows is not None
    if custom_mask is not None:
        custom_mask = custom_mask.expand(b, 1, sq, sk).reshape(-1).contiguous().view(torch.uint8)
        found = None if by_rows else _by_pages(q, k, v, score, custom_mask, lse)
        if found is not None:
            return found
    elif not by_rows and _heads(k) is not None and _heads(v) is not None:
        return _by_heads(q, k, v, score, lse, None if key is None else Call(key, (q, k, v), _heads))
    if not by_rows:
        k_rows, v_rows = _rows_or_copy(k), _rows_or_copy(v)
    return _by_rows(q, k_rows, v_rows, sk, score, custom_mask, lse, None if key is None else Call(key, (q, k, v), _rows))
