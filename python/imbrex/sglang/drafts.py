"""Drafts that SGLang verifies, in layers with a state: behind each token of a request's step, a chain or a tree, its pool keeps the state of the recurrence and
the last rows of the convolution, of which it commits one when it knows which drafts are kept. Nothing else of the pool is written meanwhile.

So are imbrex's slots of layers with drafts: row 0 is the state behind the token that is certain, the first of the step, and row i the one behind token i.
"""

import dataclasses
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch

Tensor = torch.Tensor


class DraftStep(NamedTuple):
    """A step of requests whose first token is certain; the others are drafts."""

    count: int  # the tokens of a request, at most
    parents: Optional[Tensor] = None  # the token that each follows, counted in its request; None: the one in front of it

    @property
    def fields(self) -> Dict[str, Any]:
        """What a spec has of it."""
        return dict(num_drafts=self.count - 1, tree_drafts=self.parents is not None and self.count > 1)

    def arrays(self, starts: Tensor, num_tokens: int) -> Dict[str, Tensor]:
        """What an update of a plan is given."""
        if self.count == 1:
            return {}
        arrays = dict(num_drafts=(starts.diff() - 1).clamp(min=0))
        if self.parents is None:
            return arrays
        if self.parents.numel() != num_tokens:
            raise NotImplementedError(f"imbrex: expected the parents of {num_tokens} drafts of trees, got {list(self.parents.shape)}")
        return dict(arrays, draft_parents=self.parents.reshape(-1).to(torch.int32))


def replays(pool: Any) -> bool:
    """Whether the pool of states keeps what drafts are computed from instead of the states behind them (ReplaySSM)."""
    return any(getattr(pool.mamba_cache, name, None) is not None for name in ("replayssm_d", "replayssm_rawv"))


def begin(kept: Tensor, rows: Tensor, states: Tensor, slots: Tensor) -> Tensor:
    """Copies the state of each request's slot into the first place of its row of kept [rows, tokens, ...], where the step begins. Returns the rows, as slots;
    requests of padding, whose slot is negative, have none."""
    rows = rows[: len(slots)]
    kept[rows.long(), 0] = states[slots.clamp(min=0).long()]
    return torch.where(slots < 0, slots.to(rows.dtype), rows)


def parents_of(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Of trees [requests, tokens], which have each token's first child and its next sibling, or -1: the token that each follows, and 0 of the first."""
    count = next_token.shape[1]
    own = torch.arange(count, device=next_token.device).repeat(len(next_token), 1)

    def pointed_at_by(there: Tensor, otherwise: Tensor) -> Tensor:
        wider = torch.nn.functional.pad(otherwise, (0, 1))  # by one place for pointers to nothing
        return wider.scatter(1, torch.where(there < 0, count, there).long(), own)[:, :count]

    eldest = pointed_at_by(next_sibling, own)
    for _ in range(count.bit_length()):
        eldest = eldest.gather(1, eldest)
    return pointed_at_by(next_token, torch.zeros_like(own)).gather(1, eldest).to(torch.int32)


def commit(original: Callable, caches: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's function that copies the states behind the drafts that are kept into the pool. A state of the pool has to be contiguous there: where
    convolution.lay_out() has put channels together it is when its dimensions are turned round."""

    def turned(states: List[Tensor]) -> List[Tensor]:
        return [x.transpose(-1, -2) for x in states]

    if any(x.stride(-1) != 1 and x.stride(-2) == 1 for x in caches.conv):
        caches = dataclasses.replace(caches, conv=turned(caches.conv), intermediate_conv_window=turned(caches.intermediate_conv_window))
    return original(caches, *args, **kwargs)
