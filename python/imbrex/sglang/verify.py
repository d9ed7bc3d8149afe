"""Drafts that the target model verifies: the tree of a request, or where SGLang gives none a mask of all keys."""

from typing import Any, NamedTuple, Optional

import torch
from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask
from sglang.srt.runtime_context import get_spec

from .. import _core
from .drafts import parents_of

Tensor = torch.Tensor

MOST_TREE_TOKENS = 64  # of a request: what Mask::tree takes


class Drafts(NamedTuple):
    """What drafts of a step see besides the context: as a tree, or by a mask; neither where they are chains, which are causal."""

    tree: bool = False
    parents: Optional[Tensor] = None  # int32 [requests * width], -1 behind the context; None: chains, in a plan for trees
    mask: Optional[Tensor] = None  # bytes, for each draft token its row over all keys


def asked_mask(device: torch.device) -> Optional[VerifyMask]:
    """What SGLang's workers are to make beside the links of a tree: rows over the draft tokens alone, in memory of their own, as long as the
    links say it all. None: their default, on GPUs rows over all keys of the longest context."""
    if not 0 < (get_spec().speculative_num_draft_tokens or 0) <= MOST_TREE_TOKENS:
        return None
    return VerifyMask(torch.empty(0, dtype=torch.bool, device=device), TreeMaskMode.QLEN_ONLY, max_bs=0, is_read=False)


def drafts_of_each(info: Any) -> Any:
    """How many tokens of each request a step verifies: one number, or int32 [requests] where DSPARK gives requests fewer whose drafts are unlikely to be kept
    (SGLANG_RAGGED_VERIFY_MODE=compact). SGLang runs such a step outside of graphs."""
    layout = getattr(info, "ragged_verify_layout", None)
    return info.draft_token_num if layout is None else layout.verify_lens.to(torch.int32)


def drafts_of(info: Any, num_reqs: int, lens: Optional[Tensor], num_padding: int, graph: bool, device: torch.device) -> Drafts:
    """Of a step's spec_info. lens: keys of each request with its drafts, on the host; None where the host does not know them. Drafts of
    num_padding requests at the end, which are of a graph's padding, are not in spec_info.

    Links between the tokens of a tree come with every tree that SGLang's workers make, and with None in their place only when a worker warms
    up or captures, in which case any mask does.
    """
    width, given = info.draft_token_num, info.custom_mask
    if getattr(info, "tree_topk", getattr(info, "topk", None)) == 1:  # a chain. That of DFlash has `topk` alone
        return Drafts()
    if hasattr(info, "retrieve_next_token") and width <= MOST_TREE_TOKENS:
        child = info.retrieve_next_token
        parents = None if child is None else parents_of(child, info.retrieve_next_sibling)
    elif given is None or given.numel() == 0:
        return Drafts()
    elif given.numel() == num_reqs * width**2 and width <= MOST_TREE_TOKENS and not graph:  # rows over draft tokens alone
        parents = _nearest_ancestors(given.view(-1, width, width))
    else:
        return Drafts(mask=_mask(given, width, num_reqs, lens, num_padding))
    if parents is not None:
        parents = _behind_the_context(parents, num_reqs, device)
    return Drafts(tree=True, parents=parents)


def _behind_the_context(parents: Tensor, num_reqs: int, device: torch.device) -> Tensor:
    """Parents of all requests of a step: the first token of each follows its context, and padding is chains."""
    chains = torch.arange(-1, parents.shape[1] - 1, dtype=torch.int32, device=device).repeat(num_reqs, 1)
    chains[: len(parents), 1:] = parents[:, 1:]
    return chains.view(-1)


def _nearest_ancestors(seen: Tensor) -> Tensor:
    """[requests, tokens] of masks [requests, tokens, tokens]: the last token in front of each that it sees, which is its parent."""
    tokens = torch.arange(seen.shape[1], device=seen.device)
    earlier = seen.bool() & (tokens < tokens[:, None])
    return torch.where(earlier, tokens, -1).amax(-1)


def _mask(given: Tensor, width: int, num_reqs: int, lens: Optional[Tensor], num_padding: int) -> Tensor:
    given = given.reshape(-1).view(torch.uint8) if given.dtype == torch.bool else given.reshape(-1)
    if lens is None:
        return given
    size = width * int(lens.sum())
    if given.numel() == num_reqs * width * width:  # rows over draft tokens alone, of a tree that is too large
        rows = given.view(num_reqs, width, width)
        given = torch.cat([torch.cat([rows[r].new_ones(width, int(n) - width), rows[r]], 1).reshape(-1) for r, n in enumerate(lens)])
    if given.numel() < size - num_padding * width * (width + 1):
        raise _core.Error(f"imbrex: expected a custom_mask of {size} bytes, got {given.numel()}")
    return torch.nn.functional.pad(given[:size], (0, max(0, size - given.numel())), value=1)
