"""The operators, by family as in fla.ops. Modules of this package import each other by absolute names."""
from imbrex.fla.ops import gated_delta_product, gated_delta_rule, kda, lightning_attn, simple_gla
from imbrex.fla.ops.gated_delta_product import chunk_gated_delta_product
from imbrex.fla.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
)
from imbrex.fla.ops.kda import chunk_kda, fused_recurrent_kda
from imbrex.fla.ops.lightning_attn import chunk_lightning_attn, fused_recurrent_lightning_attn
from imbrex.fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

__all__ = [
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_simple_gla",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_simple_gla",
    "gated_delta_product",
    "gated_delta_rule",
    "kda",
    "lightning_attn",
    "simple_gla",
]
