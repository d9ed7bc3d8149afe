"""Translates the masks of transformers into causality, windows and explicit masks."""
import functools
import inspect
from typing import Any, Dict, NamedTuple, Optional

import torch
from transformers import masking_utils


class Shape(NamedTuple):
    """The meaning of a mask of the model: causal, aligned at the bottom right, with a window (0: none)."""

    window: int


def _code(function):
    return getattr(function, "__code__", None)


def _closed_over(function: Any) -> Dict[str, Any]:
    """The variables of the functions around it. inspect.getclosurevars() looks for global ones too, which takes a tenth of a millisecond."""
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))


def _window_of(mask_function: Any) -> Optional[int]:
    """The window of transformers' causal mask functions, 0 without one; None for any other function."""
    if mask_function is masking_utils.causal_mask_function:
        return 0
    if _code(mask_function) is not _code(masking_utils.sliding_window_causal_mask_function(1)):
        return None
    parts = _closed_over(mask_function).get("mask_functions", ())
    windows = [p for p in parts if _code(p) is _code(masking_utils.sliding_window_overlay(1))]
    others = [p for p in parts if p not in windows]
    if len(windows) != 1 or others != [masking_utils.causal_mask_function]:
        return None
    return _closed_over(windows[0]).get("sliding_window")


@functools.lru_cache(maxsize=None)
def _signature_of(function: Any) -> inspect.Signature:
    """The result is kept: finding it takes a tenth of a millisecond, and every step of a model needs it."""
    return inspect.signature(function)


def attention_mask(*args: Any, **kwargs: Any) -> Optional[torch.Tensor]:
    """The mask of scaled_dot_product_attention: bool [batch, 1, query_len, seq_len], or None where causal or bidirectional says it all.

    A mask that says no more than "causal, with a window" carries that in an attribute, so that kernels need not read it.
    """
    mask = masking_utils.sdpa_mask(*args, **kwargs)
    if mask is None or torch.compiler.is_compiling():
        return mask
    call = _signature_of(masking_utils.sdpa_mask).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    padding = given["attention_mask"]
    if padding is not None and not bool(padding.all()):
        return mask
    window = _window_of(given["mask_function"])
    ends = [given["q_offset"], given["q_length"], given["kv_offset"], given["kv_length"]]
    if window is not None and all(type(n) is int for n in ends) and ends[0] + ends[1] == ends[2] + ends[3]:
        mask.imbrex_shape = Shape(window)
    return mask


def shape_of(mask: Optional[torch.Tensor], query_len: int, seq_len: int) -> Optional[Shape]:
    """The meaning that attention_mask() found, if the mask is still the one that it returned."""
    shape = getattr(mask, "imbrex_shape", None)
    return shape if shape is not None and mask.shape[2:] == (query_len, seq_len) else None


def visible(mask: torch.Tensor, seq_len: int) -> torch.Tensor:
    """A mask of the model or of the caller as bool [batch, 1, query_len, seq_len], false hides; one that holds more than that is refused."""
    if mask.dim() != 4:
        raise NotImplementedError(f"imbrex: attention_mask: expected [batch, 1, query_len, seq_len], got {list(mask.shape)}")
    mask = mask[..., :seq_len]
    if mask.dtype in (torch.bool, torch.uint8):
        shown = mask
    else:
        shown = mask == 0
        if not bool((shown | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            raise NotImplementedError(
                "imbrex: attention_mask: expected bool, or 0 and the lowest number of its type, got other numbers: a bias that the model adds to its "
                "logits (as Swin and BEiT do); kernels read no dense bias, so use attn_implementation='sdpa' or 'eager' for this part of the model"
            )
    if mask.shape[1] != 1:
        raise NotImplementedError(
            f"imbrex: attention_mask: expected [batch, 1, query_len, seq_len], got {list(mask.shape)}: kernels read one mask for all heads; "
            "use attn_implementation='sdpa' or 'eager' for this part of the model"
        )
    return shown
