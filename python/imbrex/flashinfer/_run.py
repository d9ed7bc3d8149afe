"""The steps that every run() shares: it makes layers of caches of any layout, applies scales, converts outputs, and LSE to base 2."""
import functools
import math
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union

import torch

from .._torch_attention import no_gradient
from ..plan import KvLayer
from ._options import FP8, alibi_slopes, refuse_nvfp4, spec_dtype
from ._plans import Plans

LOG2E = math.log2(math.e)
Scale = Optional[Union[float, torch.Tensor]]
Cache = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]
Result = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]  # out, or (out, lse)


class Types(NamedTuple):
    """The element types that plan() was given."""

    q: torch.dtype
    kv: torch.dtype
    out: torch.dtype

    def fields(self) -> Dict[str, str]:
        return dict(q_dtype=spec_dtype(self.q), kv_dtype=spec_dtype(self.kv))

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for name, x, planned in (("q", q, self.q), ("k", k, self.kv), ("v", v, self.kv)):
            if x.dtype != planned:
                raise ValueError(f"{name}: expected {planned}, which plan() was told, got {x.dtype}")


def unpack_cache(cache: Cache, kv_layout: str) -> Tuple[torch.Tensor, torch.Tensor]:
    """A (K, V) pair or one tensor with both in dimension 1, as views [num_pages, page_size, num_kv_heads, head_dim].

    Without a dimension for the tokens of a page, pages have one.
    """
    if torch.is_tensor(cache):
        if cache.ndim not in (4, 5) or cache.shape[1] != 2:
            raise ValueError(f"paged_kv_cache: expected [num_pages, 2, ...] with 4 or 5 dimensions, got {list(cache.shape)}")
        parts = cache.unbind(1)
    else:
        parts = tuple(cache)
        if len(parts) != 2 or any(p.ndim not in (3, 4) for p in parts):
            raise ValueError(f"paged_kv_cache: expected (K, V) of 3 or 4 dimensions, got {[list(p.shape) for p in parts]}")
    k, v = (p if p.ndim == 4 else p.unsqueeze(-3 if kv_layout == "NHD" else -2) for p in parts)
    return (k, v) if kv_layout == "NHD" else (k.transpose(1, 2), v.transpose(1, 2))


def ragged(x: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """[num_keys, num_kv_heads, head_dim] of either layout."""
    return x if kv_layout == "NHD" else x.transpose(0, 1)


@functools.lru_cache(maxsize=256)
def _on_host(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32, device="cpu")


def _is_one(scale: Scale) -> bool:
    return scale is None or (not torch.is_tensor(scale) and float(scale) == 1.0)


def _per_head(scale: torch.Tensor, num_heads: int, device: torch.device) -> torch.Tensor:
    """float32 [num_heads] of one number, one for each kv head, or one for each head."""
    scale = scale.detach().to(device, torch.float32).reshape(-1)
    if scale.numel() == 1:
        return scale.expand(num_heads)
    if num_heads % scale.numel():
        raise ValueError(f"scale: expected 1 number or one for each head, got {scale.numel()} for {num_heads} heads")
    return scale.repeat_interleave(num_heads // scale.numel())


def fp8_scale(scale: Scale, device: torch.device, always: bool = False) -> Optional[torch.Tensor]:
    """The scales of an fp8 tensor, as imbrex takes them: None for 1, unless `always`."""
    if scale is None or (_is_one(scale) and not always):
        return None
    if torch.is_tensor(scale):
        return scale.detach().to(device, torch.float32).reshape(-1)
    return _on_host(float(scale))


def _product(scales: Tuple[Scale, ...], num_heads: int, device: torch.device) -> Optional[torch.Tensor]:
    """float32 [num_heads] of what multiplies the logits; None for 1."""
    number, tensor = 1.0, None
    for scale in scales:
        if torch.is_tensor(scale):
            heads = _per_head(scale, num_heads, device)
            tensor = heads if tensor is None else tensor * heads
        elif scale is not None:
            number *= float(scale)
    if tensor is None:
        return None if number == 1.0 else torch.full((num_heads,), number, dtype=torch.float32, device=device)
    return (tensor if number == 1.0 else tensor * number).contiguous()


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """fp8 goes by DLPack as bytes, which the spec names."""
    return x.detach().view(torch.uint8) if x.dtype in FP8 else x.detach()


def _checked(name: str, given: Optional[torch.Tensor], shape: Tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        raise ValueError(f"{name}: expected {dtype} {list(shape)} on {device}, got {given.dtype} {list(given.shape)} on {given.device}")
    return given


def scales_of(args: Tuple[Any, ...], q: torch.Tensor, q_scale: Scale, k_scale: Scale, v_scale: Scale) -> Dict[str, Scale]:
    """run()'s scales. Those of fp8 queries may be positional arguments instead; no others are there."""
    if not args:
        return dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    if q.dtype not in FP8 or len(args) != 3:
        raise NotImplementedError(
            f"imbrex.flashinfer: run() takes no positional arguments after the cache but scale_q, scale_k, scale_v of fp8, got {len(args)}"
        )
    if not (q_scale is None and k_scale is None and v_scale is None):
        raise ValueError("scales: expected them as positional or as named arguments, got both")
    return dict(q_scale=args[0], k_scale=args[1], v_scale=args[2])


def attend(
    plans: Plans,
    types: Types,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    sinks: Optional[torch.Tensor] = None,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    alibi: bool = False,
    changes: Optional[Dict[str, Any]] = None,
    layer: Optional[KvLayer] = None,
) -> Result:
    """Attention of q [num_tokens, num_q_heads, head_dim_qk] for the step that `plans` has begun; k and v as KvLayer has them.

    changes: fields of the spec that this run has otherwise than plan(). layer: the cache with its scales, where k and v with theirs do not say it all.
    """
    no_gradient(q, k, v, *(x for x in (q_scale, k_scale, v_scale, sinks) if torch.is_tensor(x)))
    refuse_nvfp4(None, k, v)
    types.check(q, k, v)
    num_tokens, num_heads, device = q.shape[0], q.shape[1], q.device
    if num_tokens != plans.num_tokens:
        raise ValueError(f"q: expected {plans.num_tokens} tokens, which plan() was told, got {num_tokens}")
    result = _checked("out", out, (num_tokens, num_heads, v.shape[-1]), types.out, device)
    if return_lse or lse is not None:
        lse = _checked("lse", lse, (num_tokens, num_heads), torch.float32, device)

    # Where the cache is fp8 its scales are the layer's. Elsewhere k_scale multiplies logits and v_scale the output. Scales of single q
    # heads multiply logits too.
    kv_is_fp8 = types.kv in FP8
    factors = [None if kv_is_fp8 else k_scale]
    if types.q in FP8 and not (torch.is_tensor(q_scale) and q_scale.numel() > 1):
        q_scale = fp8_scale(q_scale, device)
    else:
        factors.append(q_scale)
        q_scale = None
    head_scales = _product(tuple(factors), num_heads, device)
    if layer is None:
        if not k.shape[0]:  # no keys at all: imbrex wants memory to point to
            k, v = (x.new_empty((1, *x.shape[1:])) for x in (k, v))
        layer = KvLayer(as_bytes(k), as_bytes(v), *((fp8_scale(k_scale, device), fp8_scale(v_scale, device)) if kv_is_fp8 else (None, None)))

    asked = dict(changes or {})
    if head_scales is not None:
        asked["head_scales"] = True
    if sinks is not None:
        asked["sinks"] = True
        sinks = sinks.detach().to(torch.float32).contiguous()
    plan = plans.ready(**asked)
    direct = spec_dtype(types.out) in plan.spec.out_dtypes
    into = result if direct else torch.empty(result.shape, dtype=torch.float32, device=device)
    slopes = alibi_slopes(num_heads, device) if alibi else None
    plan.run(as_bytes(q), layer, into, lse=lse, q_scale=q_scale, sinks=sinks, alibi_slopes=slopes, head_scales=head_scales)
    if not kv_is_fp8 and not _is_one(v_scale):
        into.mul_(_per_head(v_scale, num_heads, device)[:, None] if torch.is_tensor(v_scale) else float(v_scale))
    if not direct:
        result.copy_(into)
    if lse is None:
        return result
    lse.mul_(LOG2E)
    return (result, lse) if return_lse else result
