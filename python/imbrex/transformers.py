"""Models of transformers on imbrex.

    import imbrex.transformers
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="imbrex")

Registers "imbrex" with transformers' attention and mask interfaces, and "paged|imbrex" for continuous batching. Masks, sliding windows, sinks and soft
caps are passed through; what would change the result and cannot be is refused by name. Inference only: there is no backward pass.
Written against transformers 5.17 and 5.23.
"""
import functools
import inspect
from typing import Any, NamedTuple, Optional, Tuple

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.generation.continuous_batching import PagedAttentionCache, continuous_api

from . import _torch
from .torch import attention

_OLDEST = (5, 0)
# Arguments of other implementations that change a result.
_REFUSED = ("position_bias", "head_mask", "layer_head_mask", "attention_bias", "alibi", "block_mask", "score_mod")


class _Shape(NamedTuple):
    """What a mask of the model says in other words: causal, aligned at the bottom right, with a window (0: none)."""

    window: int


def _code(function):
    return getattr(function, "__code__", None)


def _window_of(mask_function: Any) -> Optional[int]:
    """The window of transformers' causal mask functions, 0 without one; None for any other function."""
    if mask_function is masking_utils.causal_mask_function:
        return 0
    if _code(mask_function) is not _code(masking_utils.sliding_window_causal_mask_function(1)):
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    windows = [p for p in parts if _code(p) is _code(masking_utils.sliding_window_overlay(1))]
    others = [p for p in parts if p not in windows]
    if len(windows) != 1 or others != [masking_utils.causal_mask_function]:
        return None
    return inspect.getclosurevars(windows[0]).nonlocals.get("sliding_window")


def attention_mask(*args: Any, **kwargs: Any) -> Optional[torch.Tensor]:
    """The mask of scaled_dot_product_attention: bool [batch, 1, query_len, seq_len], or None where causal or bidirectional says it all.

    A mask that says no more than "causal, with a window" carries that in an attribute, so that kernels need not read it.
    """
    call = inspect.signature(masking_utils.sdpa_mask).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    mask = masking_utils.sdpa_mask(*args, **kwargs)
    if mask is None or torch.compiler.is_compiling():
        return mask
    padding = given["attention_mask"]
    if padding is not None and not bool(padding.all()):
        return mask
    window = _window_of(given["mask_function"])
    ends = [given["q_offset"], given["q_length"], given["kv_offset"], given["kv_length"]]
    if window is not None and all(type(n) is int for n in ends) and ends[0] + ends[1] == ends[2] + ends[3]:
        mask.imbrex_shape = _Shape(window)
    return mask


def _visible(mask: torch.Tensor) -> torch.Tensor:
    """A mask with 0 and the lowest number, as bool."""
    if mask.dtype in (torch.bool, torch.uint8):
        return mask
    shown, hidden = mask == 0, mask <= torch.finfo(mask.dtype).min / 2
    if not bool((shown | hidden).all()):
        raise NotImplementedError("imbrex: an attention mask with biases: expected bool, or 0 and the lowest number of its type")
    return shown


def _refuse(kwargs: Any, dropout: float) -> None:
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"imbrex: {name}: expected None; use attn_implementation='eager' or 'sdpa'")
    if kwargs.get("output_attentions"):
        raise NotImplementedError("imbrex: output_attentions: weights are never stored; use attn_implementation='eager'")
    if dropout:
        raise NotImplementedError(f"imbrex: dropout: expected 0.0, got {dropout}; call model.eval()")


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Tuple[torch.Tensor, None]:
    """Attention of a layer: query [batch, heads, query_len, d], key and value [batch, kv_heads, seq_len, d]. Returns [batch, query_len, heads, d_v]."""
    if kwargs.get("cache") is not None:
        return paged_attention_forward(module, query, key, value, attention_mask, dropout, scaling, softcap=softcap, s_aux=s_aux, **kwargs)
    _refuse(kwargs, dropout)
    query_len, seq_len = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
    window = (-1, -1)
    shape = getattr(attention_mask, "imbrex_shape", None)
    if shape is not None and attention_mask.shape[2:] == (query_len, seq_len):
        causal, window, attention_mask = True, (shape.window - 1, -1), None
    elif attention_mask is not None:
        if attention_mask.dim() != 4 or attention_mask.shape[1] != 1:
            raise NotImplementedError(f"imbrex: expected a mask [batch, 1, query_len, seq_len], got {list(attention_mask.shape)}")
        causal, attention_mask = False, _visible(attention_mask[..., :seq_len])
    else:
        causal = causal and query_len > 1
        if causal and seq_len > query_len:  # the first step of a cache with room: what lies behind the queries is not there yet
            key, value = key[:, :, :query_len], value[:, :, :query_len]
    out = attention(query, key, value, attention_mask, causal=causal, window=window, scale=scaling, soft_cap=softcap or 0.0, sinks=s_aux)
    return out.transpose(1, 2), None


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Tuple[torch.Tensor, None]:
    """Attention of a step of continuous batching: query [1, heads, num_tokens, d] of all requests, whose keys the cache gathers."""
    _refuse(kwargs, dropout)
    cache = kwargs.pop("cache", None)
    if cache is None:
        raise ValueError("paged|imbrex: expected the cache of continuous batching, got none; use attn_implementation='imbrex'")
    if kwargs.get("block_table") is not None:
        raise NotImplementedError("paged|imbrex: block_table: expected None; set max_blocks_per_request=0 in the continuous batching config")
    if "kwargs" in inspect.signature(cache.update).parameters:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
        keys, values = (x.squeeze(0).transpose(0, 1) for x in (key, value))
    else:
        keys, values = cache.update(
            key_states=key,
            value_states=value,
            layer_idx=module.layer_idx,
            read_index=kwargs["read_index"],
            write_index=kwargs["write_index"],
        )
    window = getattr(module, "sliding_window", None)
    starts, longest = kwargs["cu_seq_lens_k"], kwargs.get("max_length_k", kwargs.get("max_seqlen_k"))
    if isinstance(starts, dict):
        layers = "sliding_attention" if window else "full_attention"
        starts, longest = starts[layers], longest[layers]
    query_starts = kwargs["cu_seq_lens_q"].to(torch.int32)
    starts = starts.to(torch.int32)
    scale = getattr(module, "scaling", None) if scaling is None else scaling
    score = _torch.Score(True, (window - 1 if window else -1, -1), scale, softcap or 0.0, _torch.f32(s_aux))
    lengths = _torch.Lengths(query_starts, starts[1:] - starts[:-1], int(kwargs.get("max_length_q", kwargs.get("max_seqlen_q", 0))), int(longest))
    tokens = query.squeeze(0).transpose(0, 1)
    out = query.new_zeros((tokens.shape[0], tokens.shape[1], values.shape[-1]))  # tokens that only fill up a step stay 0
    _torch.attend(tokens, (keys, values), lengths, score, kv_start_loc=starts, out=out)
    return out.unsqueeze(0), None


def _keep_in_continuous_batching() -> None:
    """Continuous batching knows its implementations by name, and goes over to others it finds: a model on imbrex stays there."""
    manager = getattr(continuous_api, "ContinuousBatchingManager", None)
    switch = getattr(manager, "switch_to_cb_friendly_attn", None)
    if switch is None or hasattr(switch, "imbrex_keeps"):
        return

    @functools.wraps(switch)
    def keep(self, model, *args, **kwargs):
        chosen = model.config._attn_implementation
        if chosen not in ("imbrex", "paged|imbrex"):
            return switch(self, model, *args, **kwargs)
        if chosen == "imbrex" and "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
            model.set_attn_implementation("paged|imbrex")
            self._original_attn_impl = chosen

    keep.imbrex_keeps = True
    manager.switch_to_cb_friendly_attn = keep


def register() -> None:
    """Makes "imbrex" and "paged|imbrex" known to transformers. Done on import; doing it again changes nothing."""
    version = tuple(int(n) for n in transformers.__version__.split(".")[:2])
    if version < _OLDEST:
        raise ImportError(f"imbrex.transformers: expected transformers {_OLDEST[0]}.{_OLDEST[1]} or later, got {transformers.__version__}")
    AttentionInterface.register("imbrex", attention_forward)
    AttentionInterface.register("paged|imbrex", paged_attention_forward)
    AttentionMaskInterface.register("imbrex", attention_mask)
    _keep_in_continuous_batching()


register()
