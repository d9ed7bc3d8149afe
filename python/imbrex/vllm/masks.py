"""Masks of vLLM's steps besides a layer's own: images in a causal prompt, requests that are not causal, prompts that stay visible behind a window
(R-SWA). Functions of fields give the arguments of the imbrex.AttentionSpec whose plan such a step has; the others what update() is given."""

from typing import Any, Dict, List, Optional, Tuple

import torch

Fields = Dict[str, Any]


def with_images(fields: Fields) -> Fields:
    """Of a causal layer in which the tokens of an image see each other, as far as its window goes back.

    Without a window the queries of an image stand where its last token does. A window begins with the query itself, so that layers with one have
    an expression, in which t is the number of the query among the step's tokens.
    """
    if "chunk" in fields:
        raise NotImplementedError("imbrex: expected no multimodal prefixes in layers with chunks and a lookback, got them")
    if fields.get("window_left", -1) < 0 and not fields["alibi"]:
        return {**fields, "positions": True}
    token = "t = start[batch] + q - (kv_len - q_len)"
    text = f"int start[]; int first[]; int last[]; {token}; kv <= q | first[t] <= kv & kv <= last[t]"
    return {**fields, "causal": False, "mask_mod": text}


def image_arrays(ranges: Dict[int, List[Tuple[int, int]]], starts: torch.Tensor, lengths: torch.Tensor) -> Optional[Dict[str, torch.Tensor]]:
    """What a step's images are: start of each request's tokens, first and last key of the image that each token is in, its own place where it is in
    none, and a position of each. None where no token of the step is in an image that goes on behind it: every query then sees what it does in text.

    `ranges` are vLLM's mm_req_doc_ranges: for each request (first, last) of its images, in tokens of the request. int32 on the host.
    """
    spans = []
    for request, images in ranges.items():
        begin, end, length = int(starts[request]), int(starts[request + 1]), int(lengths[request])
        context = length - (end - begin)
        for first, last in images:
            last = min(last, length - 1)
            if first < last and begin < end and context < last and first < length:
                spans.append((begin + max(first - context, 0), begin + last - context + 1, first, last))
    if not spans:
        return None
    starts, lengths = starts.cpu().to(torch.int32), lengths.cpu().to(torch.int32)
    counts = starts.diff()
    own = torch.arange(int(starts[-1]), dtype=torch.int32, device="cpu") + torch.repeat_interleave(lengths - counts - starts[:-1], counts)
    made = dict(start=starts[:-1].contiguous(), first=own.clone(), last=own.clone())
    for begin, end, first, last in spans:
        made["first"][begin:end], made["last"][begin:end] = first, last
    return made


def update_with_images(spec: Any, arrays: Dict[str, torch.Tensor]) -> Dict[str, Any]:
    """The arguments of update() for a plan of with_images()."""
    return {"mask_tensors": arrays} if spec.mask_mod else {"positions": arrays["last"]}


def not_causal(fields: Fields) -> Fields:
    """Of a layer whose queries see the keys behind them too; its window is one to both sides."""
    return {**fields, "causal": False, **_both_sides(fields)}


def causal_by_request(fields: Fields) -> Fields:
    """Of a layer in which a tensor says which requests are causal."""
    return {**not_causal(fields), "mask_mod": "bool causal[]; kv <= q | !causal[batch]"}


def _both_sides(fields: Fields) -> Fields:
    if "chunk" in fields:
        raise NotImplementedError("imbrex: expected causal layers with chunks and a lookback, got others")
    return {"window_right": fields["window_left"]} if fields.get("window_left", -1) >= 0 else {}


def retained_prompts(fields: Fields, window: int) -> Fields:
    """R-SWA: of a causal layer whose queries see the prompt, and of the rest `window` keys up to their own."""
    return {**fields, "mask_mod": f"int prefix[]; kv < prefix[batch] | q - kv < {window}"}
