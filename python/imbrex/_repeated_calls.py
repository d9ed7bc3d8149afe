"""Recognises calls of _torch_attention.dense() that differ from an earlier one only in the tensors' numbers, and repeats them without checking again."""
from typing import Callable, NamedTuple

import torch

from . import _core
from ._frameworks import stream_address
from ._plan_cache import Kept


class Recipe(NamedTuple):
    """How to repeat a call with other tensors."""

    kept: Kept
    batch: tuple  # that the plan has to be for: requests, query length, key length
    run: _core.PreparedRun
    view: Callable  # of keys and values, as rows
    shape: tuple  # of the output, as it is made
    by_token: bool  # and whether its heads lie together


class Call:
    """A call that may be repeated: its key, its tensors, how keys are viewed as rows, and how its output was made."""

    __slots__ = ("key", "at", "view", "shape", "by_token")

    def __init__(self, key, tensors, view):
        self.key, self.at, self.view = key, [x.data_ptr() for x in tensors], view

    def remember(self, plans, kept, q, layer, out):
        """Remembers the call, unless the plan was given copies of its tensors: then the next call needs copies too."""
        if kept.batch and self.at == [x.data_ptr() for x in (q, layer.k, layer.v)]:
            run = kept.plan.prepare(q, layer, out)
            _keep(plans, self.key, Recipe(kept, kept.batch, run, self.view, self.shape, self.by_token))


def key_of(q, k, v, score):
    """A hashable key in two parts: all that a result depends on except the tensors' numbers. None for calls that are not repeated."""
    if score.sinks is not None or score.alibi_slopes is not None or score.relative_bias is not None:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    scale = None if score.scale is None else float(score.scale)
    # Written out: a loop over the three takes microseconds more.
    of_keys = (k.shape, k.stride(), v.shape, v.stride())
    of_tensors = (q.shape, q.stride(), q.dtype, q.device, k.dtype, k.device, v.dtype, v.device)
    return of_keys, of_tensors + (bool(score.causal), tuple(score.window), scale, float(score.soft_cap or 0.0))


def _keep(plans, key, recipe):
    """Remembers a recipe under the whole key, and under the key without the lengths and strides of keys, for calls with a cache that has grown."""
    plans.remember(key, recipe)
    (k_shape, _, v_shape, _), others = key
    plans.remember((k_shape[:2], k_shape[3:], v_shape[3:], others), recipe)


def _with_other_lengths(plans, key, k, v):
    """Returns a recipe for a call that differs from an earlier one in the number of keys, or None."""
    (k_shape, _, v_shape, _), others = key
    if k_shape[:3] != v_shape[:3]:
        return None
    recipe = plans.recall((k_shape[:2], k_shape[3:], v_shape[3:], others))
    if recipe is None or not 0 < k_shape[2] <= recipe.kept.limits.seq_len:
        return None
    k_rows, v_rows = recipe.view(k), recipe.view(v)
    if k_rows is None or v_rows is None:
        return None
    batch = (*recipe.batch[:2], k_shape[2])
    recipe = recipe._replace(batch=batch, run=recipe.run.with_keys(k_rows.shape[0], k_rows.stride()[:2], v_rows.stride()[:2]))
    _keep(plans, key, recipe)
    return recipe


def repeat(plans, key, q, k, v):
    """Repeats a known call and returns its output, or None for a call that is not known. Not to be called in a capture."""
    stream = stream_address(None, q)
    plans.leave_captures(stream)
    recipe = plans.recall(key) or _with_other_lengths(plans, key, k, v)
    if recipe is None:
        return None
    kept = recipe.kept
    if kept.batch != recipe.batch:
        kept.batch = None
        recipe.run.update(*recipe.batch, stream)
        kept.batch = recipe.batch
    out = q.new_empty(recipe.shape)
    recipe.run(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), stream)
    return by_token(out, q) if recipe.by_token else out


def by_token(rows, q):
    """Outputs [b * s, h, d] as [b, h, s, d]."""
    b, h, sq, _ = q.shape
    return rows.view(b, sq, h, rows.shape[-1]).transpose(1, 2)
