"""Continuous batching of transformers: attention of a step, and a model that stays with it."""
import functools
import inspect
from typing import Any, Optional, Tuple

import torch
from transformers.generation.continuous_batching import PagedAttentionCache, continuous_api

from .. import _torch_attention
from ._refusals import finish, refuse
from ._versions import check_continuous_batching


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
    position_bias: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Tuple[torch.Tensor, None]:
    """Attention of a step of continuous batching: query [1, heads, num_tokens, d] of all requests, whose keys the cache gathers."""
    refuse(module, (query, key, value, s_aux), dropout, kwargs)
    if position_bias is not None:
        raise NotImplementedError("paged|imbrex: position_bias: expected None; use attn_implementation='sdpa' or 'eager'")
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
    score = _torch_attention.Score(True, (window - 1 if window else -1, -1), scale, softcap or 0.0, _torch_attention.f32(s_aux))
    lengths = _torch_attention.Lengths(
        query_starts, starts[1:] - starts[:-1], int(kwargs.get("max_length_q", kwargs.get("max_seqlen_q", 0))), int(longest)
    )
    tokens = query.squeeze(0).transpose(0, 1)
    out = query.new_zeros((tokens.shape[0], tokens.shape[1], values.shape[-1]))  # tokens that only fill up a step stay 0
    _torch_attention.attend(tokens, (keys, values), lengths, score, kv_start_loc=starts, out=out)
    return finish(out.unsqueeze(0))


def keep_in_continuous_batching() -> None:
    """Keeps a model on imbrex: continuous batching knows its implementations by name, and would switch to another one."""
    manager = getattr(continuous_api, "ContinuousBatchingManager", None)
    switch = getattr(manager, "switch_to_cb_friendly_attn", None)
    if switch is None or hasattr(switch, "imbrex_keeps"):
        return

    @functools.wraps(switch)
    def keep(self, model, *args, **kwargs):
        chosen = model.config._attn_implementation
        if chosen not in ("imbrex", "paged|imbrex"):
            return switch(self, model, *args, **kwargs)
        check_continuous_batching()
        if chosen == "imbrex" and "kwargs" not in inspect.signature(PagedAttentionCache.update).parameters:
            model.set_attn_implementation("paged|imbrex")
            self._original_attn_impl = chosen

    keep.imbrex_keeps = True
    manager.switch_to_cb_friendly_attn = keep
