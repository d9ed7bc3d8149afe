"""Latent attention (MLA): layers hand over their latents instead of the keys and values that they would make of them.

Attention modules of DeepSeek's kind keep latents in the cache and call their method expand_kv() for keys and values of all heads. Here that method
returns the latents as they are, and the attention function computes each request in latent space or with expanded keys, whichever is faster
(docs/mla.md). For modules that imbrex.MlaPlan does not run, in torch.compile, in the capture of a CUDA graph and in training the method stays what it
is.
"""
import functools
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from .. import _core, _torch_attention
from .._frameworks import device_name, dtype_name
from .._plan_cache import Kept, Limits, PlanCache
from ..mla import MlaPlan
from ..plan import KvLayer, select
from ..torch import _either

_PAGE = 64  # tokens of a page of LatentCache

_plans = PlanCache()


class Latents(NamedTuple):
    """What a module handed over, and how to expand it after all."""

    expand: Any
    kv_b: Tensor  # [heads, nope + v, rank]
    nope: int
    v: int


@functools.lru_cache(maxsize=256)
def _runs(device: str, **fields: Any) -> bool:
    """Whether imbrex runs latent attention of this shape on a device."""
    try:
        return select(_core.MlaSpec(**fields), device).backend is not None
    except _core.Error:
        return False


def _weight_of(module: torch.nn.Module, latent: Tensor) -> Optional[Tensor]:
    """The weight of kv_b_proj by heads, if the module is one that has nothing but a weight, as it is."""
    linear, size = module.kv_b_proj, module.qk_nope_head_dim + module.v_head_dim
    if type(linear) is not torch.nn.Linear or linear.bias is not None or linear._forward_hooks or linear._forward_pre_hooks:
        return None
    weight = linear.weight
    if type(weight) not in (Tensor, torch.nn.Parameter) or weight.dtype != latent.dtype or weight.device != latent.device:
        return None
    if hasattr(linear, "_hf_hook") or not weight.is_contiguous() or weight.shape[0] % size or weight.shape[1] != latent.shape[-1]:
        return None
    return weight.view(-1, size, weight.shape[1])


def _latents_of(module: torch.nn.Module, expand: Any, latent: Tensor, rope: Tensor) -> Optional[Latents]:
    if module.config._attn_implementation != "imbrex" or module.training or torch.compiler.is_compiling():
        return None
    captured = latent.is_cuda and torch.cuda.is_current_stream_capturing()  # a step is planned on the host
    if (
        not (latent.is_cpu or latent.is_cuda)
        or captured
        or latent.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or latent.shape[1] != 1
        or rope.shape[:3] != latent.shape[:3]
    ):
        return None
    kv_b = _weight_of(module, latent)
    if kv_b is None:
        return None
    dims = dict(kv_lora_rank=latent.shape[3], qk_nope_dim=module.qk_nope_head_dim, qk_rope_dim=rope.shape[3], v_dim=module.v_head_dim)
    types = dict(dtype=dtype_name(latent), kv_dtype=dtype_name(latent))
    if not _runs(device_name(latent), num_heads=kv_b.shape[0], **dims, **types):
        return None
    return Latents(functools.partial(expand, module), kv_b, module.qk_nope_head_dim, module.v_head_dim)


def hand_over_latents(module: torch.nn.Module) -> None:
    """Makes modules of a class with latents hand them over, when they are on imbrex. Done once for a class."""
    cls = type(module)
    expand = getattr(cls, "expand_kv", None)
    if expand is None or hasattr(expand, "imbrex") or not hasattr(module, "kv_b_proj"):
        return

    @functools.wraps(expand)
    def expand_kv(self: torch.nn.Module, kv_nope: Tensor, k_rot: Tensor) -> Tuple[Tensor, Tensor]:
        latents = _latents_of(self, expand, kv_nope, k_rot)
        if latents is None:
            return expand(self, kv_nope, k_rot)
        kv_nope = kv_nope.view(kv_nope.shape)  # a tensor of its own, that can carry an attribute
        kv_nope.imbrex_latents = latents
        return kv_nope, k_rot

    expand_kv.imbrex = True
    cls.expand_kv = expand_kv


def latents_of(key: Tensor) -> Optional[Latents]:
    """What came with a key that is none, but the latents of a module."""
    return getattr(key, "imbrex_latents", None)


def _together(latent: Tensor, rope: Tensor) -> Optional[Tensor]:
    """[b, 1, s, rank + rope] without a copy, where the columns of `rope` follow those of `latent` in memory; else None."""
    same = latent.untyped_storage().data_ptr() == rope.untyped_storage().data_ptr()
    if not same or latent.stride() != rope.stride() or rope.storage_offset() - latent.storage_offset() != latent.shape[3]:
        return None
    return latent.as_strided((*latent.shape[:3], latent.shape[3] + rope.shape[3]), latent.stride(), latent.storage_offset())


class _Pages(NamedTuple):
    """Rows [b, 1, s, d] as pages [n, size, 1, d], and how many pages apart the requests are."""

    pages: Tensor
    size: int
    apart: int


def _pages_of(x: Tensor, whole: bool) -> _Pages:
    """Without a copy, but for rows whose elements lie apart. whole: in pages of _PAGE tokens, if there is memory behind the last token for that."""
    b, _, s, d = x.shape
    if x.stride(3) != 1 or x.stride(2) < d or (b > 1 and (x.stride(0) % x.stride(2) or x.stride(0) < s * x.stride(2))):
        x = x.contiguous()
    row, apart = x.stride(2), x.stride(0) // x.stride(2) if b > 1 else 0
    last = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - d  # where a row may begin
    size, rows = _PAGE, (b - 1) * apart + -(-s // _PAGE) * _PAGE
    if not whole or apart % _PAGE or (rows - 1) * row > last:
        size, rows = 1, (b - 1) * apart + s
    return _Pages(x.as_strided((rows // size, size, 1, d), (size * row, row, d, 1)), size, apart // size)


def _plan_for(q: Tensor, kv_b: Tensor, rope_dim: int, nope: int, needed: Limits, **fields: Any) -> Kept:
    dtype, device = dtype_name(q), device_name(q)
    values: Dict[str, Any] = dict(
        num_heads=q.shape[1],
        kv_lora_rank=kv_b.shape[2],
        qk_nope_dim=nope,
        qk_rope_dim=rope_dim,
        v_dim=kv_b.shape[1] - nope,
        dtype=dtype,
        kv_dtype=dtype,
        **fields,
    )

    def make(limits: Limits) -> Any:
        reqs, tokens, keys = (max(n, 1) for n in limits[:3])
        return MlaPlan(_core.MlaSpec(**values), device, max_num_reqs=reqs, max_num_tokens=tokens, max_seq_len=keys, out_dtype=dtype)

    return _plans.find((device, *values.items()), needed, make)


def _attend(
    q: Tensor,
    latent: Tensor,
    rope: Tensor,
    kv_b: Tensor,
    mask: Optional[Tensor],
    sinks: Optional[Tensor],
    nope: int,
    window_left: int,
    scale: Optional[float],
) -> Tensor:
    """Causal attention, or under a mask bool [b or 1, 1, sq or 1, s], of q [b, h, sq, nope + rope] over latents [b, 1, s, rank] and their rope parts."""
    b, heads, query_len, _ = q.shape
    seq_len = latent.shape[2]
    joined = _together(latent, rope) if rope.shape[3] else latent
    pages = _pages_of(latent if joined is None else joined, joined is not None)
    fields: Dict[str, Any] = dict(block_size=pages.size, scale=0.0 if scale is None else float(scale), sinks=sinks is not None)
    if mask is None:
        fields.update(causal=True, window_left=window_left)
    else:
        fields.update(causal=False, custom_mask=True)
    layer = KvLayer(pages.pages)
    if joined is None:
        of_rope = _pages_of(rope, False)
        if of_rope[1:] != pages[1:]:
            latent, rope = latent.contiguous(), rope.contiguous()
            pages, of_rope = _pages_of(latent, False), _pages_of(rope, False)
        fields.update(kv_format="latent_rope", block_size=pages.size)
        layer = KvLayer(pages.pages, k_rope=of_rope.pages)
    kept = _plan_for(q, kv_b, rope.shape[3], nope, Limits(b, b * query_len, seq_len), **fields)
    lengths = _torch_attention.equal_lengths(b, query_len, seq_len)
    step = (b, query_len, seq_len, pages.apart)
    if mask is not None or kept.batch != step:
        first = torch.arange(b, dtype=torch.int32, device="cpu")[:, None] * pages.apart
        table = first + torch.arange(-(-seq_len // pages.size), dtype=torch.int32, device="cpu")
        custom = None if mask is None else mask.expand(b, 1, query_len, seq_len).reshape(-1).contiguous().view(torch.uint8)
        kept.batch = None
        kept.plan.update(lengths.query_start_loc, lengths.seq_lens, block_table=table.to(q.device), custom_mask=custom)
        kept.batch = None if mask is not None else step
    out = q.new_empty((b * query_len, heads, kv_b.shape[1] - nope))
    kept.plan.run(_torch_attention._rows_or_copy(q), kv_b, layer, out, sinks=sinks)
    return out.view(b, query_len, heads, -1)


@torch.library.custom_op("imbrex::latent_attention", mutates_args=())
def _operator(
    q: Tensor,
    latent: Tensor,
    rope: Tensor,
    kv_b: Tensor,
    mask: Optional[Tensor],
    sinks: Optional[Tensor],
    nope: int,
    window_left: int,
    scale: Optional[float],
) -> Tensor:
    return _attend(q, latent, rope, kv_b, mask, sinks, nope, window_left, scale)


@_operator.register_fake
def _(q, latent, rope, kv_b, mask, sinks, nope, window_left, scale):
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], kv_b.shape[1] - nope))


def latent_attention(
    latents: Latents,
    q: Tensor,
    latent: Tensor,
    rope: Tensor,
    mask: Optional[Tensor],
    window_left: int,
    scale: Optional[float],
    sinks: Optional[Tensor],
) -> Tensor:
    """Returns [b, sq, h, v] of what a module handed over; without a mask causal, aligned at the bottom right."""
    tensors = q, latent, rope, latents.kv_b, mask, _torch_attention.f32(sinks)
    return _either(_attend, _operator, *tensors)(*tensors, latents.nope, window_left, scale)


class _LatentLayer(DynamicLayer):
    """A layer of LatentCache. keys and values, as transformers calls the two parts of a latent, are views of one tensor with room for more tokens."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._rows: Optional[Tensor] = None  # [b, 1, room, rank + rope]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        have, new, rank = self.get_seq_length(), key_states.shape[2], key_states.shape[3]
        rows = self._with_room(key_states, value_states, have, have + new)
        rows[:, :, have : have + new, :rank] = key_states
        rows[:, :, have : have + new, rank:] = value_states
        self.keys, self.values = rows[:, :, : have + new, :rank], rows[:, :, : have + new, rank:]
        return self.keys, self.values

    def _with_room(self, key_states: Tensor, value_states: Tensor, have: int, needed: int) -> Tensor:
        """The tensor of the layer. A larger one where there is no room, and where keys are no longer views of it, since they were selected or reordered."""
        rows = self._rows
        own = rows is not None and (have == 0 or (self.keys.data_ptr() == rows.data_ptr() and self.keys.stride() == rows.stride()))
        if own and rows.shape[2] >= needed and rows.shape[:2] == key_states.shape[:2]:
            return rows
        room = -(-(needed + needed // 4) // _PAGE) * _PAGE
        rows = key_states.new_zeros((*key_states.shape[:2], room, key_states.shape[3] + value_states.shape[3]))
        if have:
            rows[:, :, :have] = torch.cat([self.keys, self.values], -1)
        self._rows = rows
        return rows

    def reset(self) -> None:
        self._rows = None
        super().reset()


class LatentCache(DynamicCache):
    """A cache of transformers that grows in place: new tokens are written to pages of 64, and nothing that is there is moved.

        model.generate(ids, past_key_values=imbrex.transformers.LatentCache(model.config))

    For models with latent attention. DynamicCache copies all latents in each step; imbrex reads either where it is. Layers that attend with a window or
    have a state are those of DynamicCache.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layers = [_LatentLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
