"""Attention of a layer, as transformers calls it."""
from typing import Any, Optional, Tuple

import torch

from ..torch import attention
from ._bias import relative_attention, table_of
from ._latent import latent_attention, latents_of
from ._masks import shape_of, visible
from ._paged import paged_attention_forward
from ._refusals import finish, refuse


def _is_causal(module: torch.nn.Module) -> bool:
    """By its argument. In some versions of transformers UMT5's decoder does not pass it: its layers with a bias are those that look at their own tokens."""
    return getattr(module, "is_causal", True) or (getattr(module, "is_decoder", False) and getattr(module, "has_relative_attention_bias", False))


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
    position_bias: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Tuple[torch.Tensor, None]:
    """Attention of a layer: query [batch, heads, query_len, d], key and value [batch, kv_heads, seq_len, d]. Returns [batch, query_len, heads, d_v].

    position_bias [1, heads, query_len, seq_len] is added to the logits; it has to be a function of the distance from query to key, as T5's is. In the
    place of keys and values there may be latents and the rotated parts of their keys, [batch, 1, seq_len, ..], which a module handed over.
    """
    latents = latents_of(key)
    if latents is not None and (kwargs.get("cache") is not None or softcap or position_bias is not None):
        (key, value), latents = latents.expand(key, value), None
    if kwargs.get("cache") is not None:
        return paged_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, softcap=softcap, s_aux=s_aux, position_bias=position_bias, **kwargs
        )
    refuse(module, (query, key, value, s_aux, position_bias), dropout, kwargs)
    query_len, seq_len = query.shape[2], key.shape[2]
    causal = _is_causal(module) if is_causal is None else bool(is_causal)
    window = (-1, -1)
    shape = None if position_bias is not None else shape_of(attention_mask, query_len, seq_len)
    if shape is not None:
        causal, window, attention_mask = True, (shape.window - 1, -1), None
    elif attention_mask is not None:
        causal, attention_mask = False, visible(attention_mask, seq_len)
    else:
        causal = causal and query_len > 1
        if causal and seq_len > query_len:  # the first step of a cache with room: what lies behind the queries is not there yet
            key, value = key[:, :, :query_len], value[:, :, :query_len]
            position_bias = None if position_bias is None else position_bias[..., :query_len]
    if latents is not None and (attention_mask is not None or causal or query_len == 1):
        return finish(latent_attention(latents, query, key, value, attention_mask, window[0], scaling, s_aux))
    if latents is not None:
        key, value = latents.expand(key, value)
    table = table_of(position_bias)
    if table is None:
        out = attention(query, key, value, attention_mask, causal=causal, window=window, scale=scaling, soft_cap=softcap or 0.0, sinks=s_aux)
    else:
        out = relative_attention(query, key, value, attention_mask, table, causal, scaling, softcap or 0.0, s_aux)
    return finish(out.transpose(1, 2))
