"""Calls of _torch.dense() that differ from an earlier one in their numbers alone: told apart, and repeated without a second look at them."""
from typing import NamedTuple

import torch

from . import _core
from ._arrays import stream_address
from ._plan_cache import Kept


class Recipe(NamedTuple):
    """How a call is repeated with tensors elsewhere."""

    kept: Kept
    batch: tuple  # that the plan has to be for
    run: _core.PreparedRun
    shape: tuple  # of the output, as it is made
    by_token: bool  # and whether its heads lie together


class Call:
    """A call that may be repeated: what it looks like, where its tensors are, and what became of its output."""

    __slots__ = ("key", "at", "shape", "by_token")

    def __init__(self, key, tensors):
        self.key, self.at = key, [x.data_ptr() for x in tensors]

    def remember(self, plans, kept, q, layer, out):
        """Unless the plan's arrays were copies of the call's tensors: the next call needs such ones too."""
        if kept.batch and self.at == [x.data_ptr() for x in (q, layer.k, layer.v)]:
            plans.remember(self.key, Recipe(kept, kept.batch, kept.plan.prepare(q, layer, out), self.shape, self.by_token))


def key_of(q, k, v, score):
    """Hashable: all that an answer depends on but the tensors' numbers; None for what is not repeated."""
    if score.sinks is not None or score.alibi_slopes is not None or score.relative_bias is not None:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    scale = None if score.scale is None else float(score.scale)
    of_score = (bool(score.causal), tuple(score.window), scale, float(score.soft_cap or 0.0))
    # Written out: a loop over the three takes microseconds more.
    of_tensors = (q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device)
    return of_tensors + of_score


def repeat(plans, key, q, k, v):
    """The output of a call that is known, or None. Not inside of a capture."""
    stream = stream_address(None, q)
    recipe = plans.recall(key, stream)
    if recipe is None or recipe.kept.batch != recipe.batch:
        return None
    out = q.new_empty(recipe.shape)
    recipe.run(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), stream)
    return by_token(out, q) if recipe.by_token else out


def by_token(rows, q):
    """Outputs [b * s, h, d] as [b, h, s, d]."""
    b, h, sq, _ = q.shape
    return rows.view(b, sq, h, rows.shape[-1]).transpose(1, 2)
