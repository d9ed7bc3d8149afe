"""imbrex as PyTorch operators: registered with shapes for the compiler, so that torch.compile keeps them whole and CUDA graphs may hold them.

    import imbrex.torch                      # torch.ops.imbrex.attention, .varlen_attention, .paged_attention, .write_kv
    out = imbrex.torch.attention(q, k, v, causal=True)

There is no backward pass: backward() of what they give, and write_kv of tensors that want a gradient, are refused by name. Before the first CUDA
graph is captured, call them once like this: kernels are compiled then. Inside a capture lengths are on the GPU.
"""
import functools
import inspect
from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _flex_attention, _torch_attention
from ._frameworks import NO_BACKWARD


def _score(
    causal: bool,
    window_left: int,
    window_right: int,
    scale: Optional[float],
    soft_cap: float,
    sinks: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
) -> _torch_attention.Score:
    return _torch_attention.Score(
        causal, (window_left, window_right), scale, soft_cap, _torch_attention.f32(sinks), _torch_attention.f32(alibi_slopes)
    )


def _operator(name: str, function):
    """Registers a function that returns out and lse or None. An operator has no None among its results, which the compiler takes to be contiguous."""

    @functools.wraps(function)
    def operator(q, *others):
        out, lse = function(q, *others)
        return out.contiguous(), q.new_empty((0,), dtype=torch.float32) if lse is None else lse.contiguous()

    operator.__signature__ = inspect.signature(function).replace(return_annotation=Tuple[Tensor, Tensor])
    return torch.library.custom_op(name, operator, mutates_args=())


try:  # what PyTorch has no public names for; without them an operator is always called
    from torch._C import _len_torch_dispatch_stack
    from torch._C._functorch import maybe_current_level
    from torch.autograd import _profiler_enabled

    def _eager() -> bool:
        """Whether execution is eager, so that no tracer, transform or profiler needs to see an operator."""
        return not (
            torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or _len_torch_dispatch_stack()
            or maybe_current_level() is not None
            or _profiler_enabled()
        )

except ImportError:

    def _eager() -> bool:
        return False


def _is_plain(x: Tensor, wants_gradient: bool) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter) and (x.is_cuda or x.is_cpu) and not (wants_gradient and x.requires_grad)


def _either(function, operator, *tensors: Optional[Tensor]):
    """Calls the function directly where that is enough: calling an operator through PyTorch costs 20 to 30 us."""
    if getattr(forward_ad, "_current_level", -1) >= 0 and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("imbrex has no forward derivative: give it tensors without tangents")
    gradients = torch.is_grad_enabled()
    return function if _eager() and all(x is None or _is_plain(x, gradients) for x in tensors) else operator


def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Optional[Tensor],
    causal: bool,
    window_left: int,
    window_right: int,
    scale: Optional[float],
    soft_cap: float,
    sinks: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    return_lse: bool,
) -> Tuple[Tensor, Optional[Tensor]]:
    score = _score(causal, window_left, window_right, scale, soft_cap, sinks, alibi_slopes)
    return _torch_attention.dense(q, k, v, score, mask, lse=True if return_lse else None)


_attention = _operator("imbrex::attention", _dense)


@_attention.register_fake
def _(q, k, v, mask, causal, window_left, window_right, scale, soft_cap, sinks, alibi_slopes, return_lse):
    b, h, sq, _ = q.shape
    return q.new_empty((b, h, sq, v.shape[3])), q.new_empty((b, h, sq) if return_lse else (0,), dtype=torch.float32)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    kv_start_loc: Tensor,
    max_query_len: int,
    max_seq_len: int,
    causal: bool,
    window_left: int,
    window_right: int,
    scale: Optional[float],
    soft_cap: float,
    sinks: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    return_lse: bool,
) -> Tuple[Tensor, Optional[Tensor]]:
    score = _score(causal, window_left, window_right, scale, soft_cap, sinks, alibi_slopes)
    lengths = _torch_attention.Lengths(query_start_loc, kv_start_loc[1:] - kv_start_loc[:-1], max_query_len, max_seq_len)
    return _torch_attention.attend(q, (k, v), lengths, score, kv_start_loc=kv_start_loc, lse=True if return_lse else None)


_varlen_attention = _operator("imbrex::varlen_attention", _varlen)


@_varlen_attention.register_fake
def _(
    q,
    k,
    v,
    query_start_loc,
    kv_start_loc,
    max_query_len,
    max_seq_len,
    causal,
    window_left,
    window_right,
    scale,
    soft_cap,
    sinks,
    alibi_slopes,
    return_lse,
):
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)


def _paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    k_scale: Optional[Tensor],
    v_scale: Optional[Tensor],
    causal: bool,
    window_left: int,
    window_right: int,
    scale: Optional[float],
    soft_cap: float,
    sinks: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    return_lse: bool,
) -> Tuple[Tensor, Optional[Tensor]]:
    score = _score(causal, window_left, window_right, scale, soft_cap, sinks, alibi_slopes)
    lengths = _torch_attention.Lengths(query_start_loc, seq_lens, max_query_len, max_seq_len)
    layer = (k_cache, v_cache, k_scale, v_scale)
    return _torch_attention.attend(q, layer, lengths, score, block_size=k_cache.shape[1], block_table=block_table, lse=True if return_lse else None)


_paged_attention = _operator("imbrex::paged_attention", _paged)


@_paged_attention.register_fake
def _(
    q, k_cache, v_cache, query_start_loc, seq_lens, block_table, max_query_len, max_seq_len, k_scale, v_scale, causal, window_left,
    window_right, scale, soft_cap, sinks, alibi_slopes, return_lse,
):  # fmt: skip
    return q.new_empty((*q.shape[:2], v_cache.shape[3])), q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)


def _no_backward(context, *gradients):
    raise NotImplementedError(NO_BACKWARD)


for _operator in (_attention, _varlen_attention, _paged_attention):
    _operator.register_autograd(_no_backward)


@torch.library.custom_op("imbrex::write_kv", mutates_args=("k_cache", "v_cache"))
def _write_kv(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, k_scale: Optional[Tensor], v_scale: Optional[Tensor]
) -> None:
    _torch_attention.write_kv((k_cache, v_cache, k_scale, v_scale), k, v, slot_mapping, k_cache.shape[1])


@_write_kv.register_fake
def _(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale):
    return None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Optional[Tensor] = None,
    *,
    causal: bool = False,
    window: Tuple[int, int] = (-1, -1),
    scale: Optional[float] = None,
    soft_cap: float = 0.0,
    sinks: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    return_lse: bool = False,
):
    """Attention of a batch of equal lengths: q [batch, heads, query_len, d], k [batch, kv_heads, seq_len, d], v [.., d_v], any strides.

    mask bool [batch or 1, 1, query_len or 1, seq_len]: false hides a key, together with causal (aligned at the bottom right) and window (left,
    right; inclusive, -1 is no limit). scale None is 1 / sqrt(d). sinks and alibi_slopes [heads]. Returns out [batch, heads, query_len, d_v], with
    return_lse also the natural logarithm of the denominators, float32 [batch, heads, query_len]. In eager mode these may be strided: rows of a
    token's heads lie together, where no view of contiguous memory shows them so.
    """
    call = _either(_dense, _attention, q, k, v, mask, sinks, alibi_slopes)
    out, lse = call(q, k, v, mask, causal, window[0], window[1], scale, soft_cap, sinks, alibi_slopes, return_lse)
    return (out, lse) if return_lse else out


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_loc: Tensor,
    kv_start_loc: Tensor,
    max_query_len: int,
    max_seq_len: int,
    *,
    causal: bool = False,
    window: Tuple[int, int] = (-1, -1),
    scale: Optional[float] = None,
    soft_cap: float = 0.0,
    sinks: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    return_lse: bool = False,
):
    """Attention of requests one after the other: q [num_tokens, heads, d], k and v [num_keys, kv_heads, d].

    query_start_loc and kv_start_loc int32 [num_reqs + 1], both on the host or both where q is; the longest query and request bound them. The
    rest is as in attention(). Returns out [num_tokens, heads, d_v], with return_lse also float32 [num_tokens, heads].
    """
    call = _either(_varlen, _varlen_attention, q, k, v, query_start_loc, kv_start_loc, sinks, alibi_slopes)
    out, lse = call(
        q, k, v, query_start_loc, kv_start_loc, max_query_len, max_seq_len, causal, window[0], window[1], scale, soft_cap, sinks,
        alibi_slopes, return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_query_len: int,
    max_seq_len: int,
    *,
    k_scale: Optional[Tensor] = None,
    v_scale: Optional[Tensor] = None,
    causal: bool = True,
    window: Tuple[int, int] = (-1, -1),
    scale: Optional[float] = None,
    soft_cap: float = 0.0,
    sinks: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    return_lse: bool = False,
):
    """Attention of q [num_tokens, heads, d] over pages [num_blocks, block_size, kv_heads, d], any strides; fp8 pages with scales float32 [1].

    query_start_loc int32 [num_reqs + 1] and seq_lens int32 [num_reqs], both on the host or both where q is; seq_lens counts the queries' own keys,
    which are in the cache. block_table int32 [num_reqs, max_blocks] is where q is. The rest is as in varlen_attention().
    """
    call = _either(_paged, _paged_attention, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, k_scale, v_scale, sinks, alibi_slopes)
    out, lse = call(
        q, k_cache, v_cache, query_start_loc, seq_lens, block_table, max_query_len, max_seq_len, k_scale, v_scale, causal, window[0],
        window[1], scale, soft_cap, sinks, alibi_slopes, return_lse,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def write_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Optional[Tensor] = None,
    v_scale: Optional[Tensor] = None,
) -> None:
    """k and v [num_tokens, kv_heads, d] to their slots of pages, converted where these have another type.

    slot_mapping int64 [num_tokens] is where k is: block * block_size + offset, -1 is not written.
    """
    _torch_attention.no_gradient(k_cache, v_cache, k, v, k_scale, v_scale)
    _write_kv(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod=None,
    block_mask=None,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options=None,
    *,
    return_aux=None,
):
    """torch.nn.attention.flex_attention: query [batch, heads, query_len, d], key and value [batch, kv_heads, seq_len, d], any strides.

    score_mod(score, batch, head, q_idx, kv_idx) and the mask_mod(batch, head, q_idx, kv_idx) of block_mask, or one in its place, are traced to
    expressions (docs/expressions.md): arithmetic, comparisons, torch.where, tanh, exp and their kind, elements of tensors by index. Tiles that a mask
    hides are found by imbrex itself, and are not read; where the lists of block_mask hide more than its mask_mod does, or show more, they count.
    Functions are traced in each call; each thread keeps plans by their texts. Returns the output, and with return_lse the LSE, or with return_aux an
    AuxOutput. There is no backward pass, and torch.compile does not look inside.
    """
    return _flex_attention.flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux)
