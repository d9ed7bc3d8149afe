"""What SGLang's layers are to imbrex: their masks and logits, and what of them it does not have."""

import math
from typing import Any, Dict

from sglang.srt.layers.radix_attention import AttentionType

from .verify import Drafts


def sees_later_tokens(layer: Any, prompts: bool) -> bool:
    """Whether a layer's queries see the tokens behind them in a step; window_left is then how far they see in both directions."""
    return layer.attn_type == AttentionType.ENCODER_ONLY or (layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL and prompts)


def mask_fields(layer: Any, prompts: bool, chunk: int) -> Dict[str, Any]:
    """What a layer's queries see. chunk: tokens of a chunk of the model's layers with local attention (Llama 4), 0 where there are none."""
    if layer.is_cross_attention:
        return dict(causal=False)
    bidirectional, window = sees_later_tokens(layer, prompts), layer.sliding_window_size
    return dict(causal=not bidirectional, window_left=window, window_right=window if bidirectional else -1, chunk=chunk if layer.use_irope else 0)


def score_mod(layer: Any, drafts: Drafts) -> str:
    """The temperature by length of Grok's layers: behind so many tokens logits are multiplied by the logarithm of the query's position to this base."""
    length = layer.xai_temperature_len
    if length is None or length <= 1:
        return ""
    if drafts.tree or drafts.mask is not None:
        raise NotImplementedError("imbrex: expected no tree of draft tokens in layers with a temperature by length (xai) in SGLang")
    return f"score * where(q > {length}, log(q) * {1 / math.log(length)!r}, 1.0)"


def refuse_parts_of_prompts(layer: Any, batch: Any) -> None:
    """Of bidirectional layers, whose keys of a prompt's earlier part are made without the later."""
    prefixes, counts = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    if layer.attn_type == AttentionType.DECODER or prefixes is None or batch.forward_mode.is_target_verify():
        return
    if any(prefix > 0 and count > 1 for prefix, count in zip(prefixes, counts)):
        raise NotImplementedError(
            f"imbrex: expected whole prompts for attention of type {layer.attn_type.value} in SGLang, got prefixes of {list(prefixes)} tokens: "
            "--chunked-prefill-size -1, --disable-radix-cache"
        )


def refuse_layer(layer: Any, batch: Any, kwargs: Dict[str, Any]) -> None:
    """Raises NotImplementedError for a feature that a layer or its call needs and imbrex does not have here."""
    for name, value in kwargs.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"imbrex: expected no {name} in SGLang, got one")
    if layer.is_cross_attention and batch.encoder_lens is None:
        raise NotImplementedError("imbrex: expected encoder_lens with layers of cross attention in SGLang, got none")
    refuse_parts_of_prompts(layer, batch)
    if layer.pos_encoding_mode != "NONE":
        raise NotImplementedError(f"imbrex: expected layers with pos_encoding_mode NONE in SGLang, got {layer.pos_encoding_mode}")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        raise NotImplementedError(f"imbrex: expected logit_capping_method tanh, got {layer.logit_capping_method}")
    if batch.mha_return_lse:
        raise NotImplementedError("imbrex: expected mha_return_lse False in SGLang, got True")
