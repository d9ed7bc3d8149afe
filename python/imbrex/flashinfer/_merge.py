"""Merges attention states (outputs with LSE in base 2), in float32, in the order given. A state with LSE -inf has no effect."""
from typing import Optional, Sequence, Tuple

import torch


def _joined(vs: Sequence[torch.Tensor], ss: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
    """v [.., d] and s [..] each. float32."""
    ss = [s.to(torch.float32) for s in ss]
    top = ss[0]
    for s in ss[1:]:
        top = torch.maximum(top, s)
    top = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    weights = [torch.exp2(s - top) for s in ss]
    total = weights[0]
    for w in weights[1:]:
        total = total + w
    share = torch.where(total > 0, 1 / total, torch.zeros_like(total))
    joint = None
    for v, w in zip(vs, weights):
        part = torch.where(w[..., None] > 0, v.to(torch.float32) * (w * share)[..., None], 0.0)  # an empty part may hold anything
        joint = part if joint is None else joint + part
    assert joint is not None
    return joint, torch.log2(total) + top


def _check(v: torch.Tensor, s: torch.Tensor) -> None:
    if v.ndim < 2 or v.shape[:-1] != s.shape:
        raise ValueError(f"expected v [.., num_heads, head_dim] and s [.., num_heads], got {list(v.shape)} and {list(s.shape)}")


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Two states of the same queries: v [num_tokens, num_heads, head_dim], s [num_tokens, num_heads]. Returns (v, s), s in float32."""
    _check(v_a, s_a)
    _check(v_b, s_b)
    v, s = _joined([v_a, v_b], [s_a, s_b])
    return v.to(v_a.dtype), s


def merge_state_in_place(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: Optional[torch.Tensor] = None) -> None:
    """merge_state() into v and s, of any type. mask [num_tokens]: false leaves a token as it is."""
    _check(v, s)
    _check(v_other, s_other)
    joint, total = _joined([v, v_other], [s, s_other])
    if mask is not None:
        merged = mask.to(torch.bool)
        joint = torch.where(merged[:, None, None], joint, v.to(torch.float32))
        total = torch.where(merged[:, None], total, s.to(torch.float32))
    v.copy_(joint)
    s.copy_(total)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """v [num_tokens, num_states, num_heads, head_dim], s [num_tokens, num_states, num_heads]. Returns (v, s), s in float32."""
    _check(v, s)
    joint, total = _joined(v.unbind(1), s.unbind(1))
    return joint.to(v.dtype), total
