"""torch.nn.attention.flex_attention on plans: functions become expressions, which a layer's spec holds."""
import functools
import math

import torch

from . import _core
from ._expressions import trace_mask_mod, trace_score_mod
from ._frameworks import device_name, dtype_name, no_gradient
from .plan import KvLayer, Plan

__all__ = ["flex_attention"]

_MOST_PLANS = 64


@functools.lru_cache(maxsize=_MOST_PLANS)
def _plan_of(device, num_reqs, num_tokens, num_keys, spec):
    return Plan(
        _core.AttentionSpec(kind="encoder_decoder", block_size=0, causal=False, **dict(spec)),
        device,
        max_num_reqs=num_reqs,
        max_num_tokens=num_tokens,
        max_seq_len=num_keys,
    )


def _rows(x):
    """[b, h, s, d] as [b * s, h, d]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _check(query, key, value, enable_gqa):
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected [batch, heads, length, dim], got {list(x.shape)}")
        if x.device != query.device or x.dtype != query.dtype:
            raise ValueError(f"{name}: expected {query.dtype} on {query.device}, got {x.dtype} on {x.device}")
    if key.shape[:3] != value.shape[:3] or key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)} do not fit")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"expected as many key heads as query heads without enable_gqa, got {key.shape[1]} and {query.shape[1]}")


def flex_attention(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False):
    """See imbrex.torch.flex_attention."""
    _check(query, key, value, enable_gqa)
    no_gradient(query, key, value)
    b, h, sq, d = query.shape
    sk, dv = key.shape[2], value.shape[3]
    out = query.new_zeros((b * sq, h, dv))
    lse = query.new_full((b * sq, h), -math.inf, dtype=torch.float32) if return_lse else None
    if out.numel() and sk:
        mask_mod = getattr(block_mask, "mask_mod", block_mask)
        mask = None if mask_mod is None else trace_mask_mod(mask_mod, sq, sk)
        score = None if score_mod is None else trace_score_mod(score_mod, sq, sk)
        spec = {
            "num_q_heads": h,
            "num_kv_heads": key.shape[1],
            "head_dim_qk": d,
            "head_dim_v": dv,
            "q_dtype": dtype_name(query),
            "kv_dtype": dtype_name(key),
            "scale": float(scale or 0.0),
            "mask_mod": "" if mask is None else mask.text,
            "score_mod": "" if score is None else score.text,
        }
        plan = _plan_of(device_name(query), b, b * sq, sk, tuple(spec.items()))
        starts = torch.arange(b + 1, dtype=torch.int32)
        plan.update(
            starts * sq,
            torch.full((b,), sk, dtype=torch.int32),
            kv_start_loc=starts * sk,
            mask_tensors={} if mask is None else mask.tensors,
        )
        plan.run(_rows(query), KvLayer(_rows(key), _rows(value)), out, lse=lse, score_tensors={} if score is None else score.tensors)
    out = out.view(b, sq, h, dv).transpose(1, 2)
    return (out, lse.view(b, sq, h).transpose(1, 2)) if return_lse else out
