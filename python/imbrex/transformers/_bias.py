"""T5's position bias: transformers hands it over as a dense tensor, kernels read one number for each head and distance."""
from typing import Optional

import torch
from torch import Tensor

from .. import _torch_attention


_REFUSAL = (
    "imbrex: position_bias: expected one number for each head and distance, as T5 has, got one that {}; use attn_implementation='sdpa' or 'eager' "
    "for this part of the model"
)


@torch.library.custom_op("imbrex::relative_bias_table", mutates_args=())
def _table(position_bias: Tensor) -> Tensor:
    """float32 [4 * reach, heads] from a bias [batch, heads, query_len, seq_len], after a look whether it depends on the distance alone.

    Buckets of T5 are exact for the first quarter of them and, in both directions, for the third: with four times as many as there are distances, each
    distance has its own. Row n is for the key n before the query, row 2 * reach + n for the key n after it. The last query stands at the last key, as it
    does in kernels: so its row holds all distances back, and the last column all distances forward, wherever the model began to count.
    """
    batch, heads, query_len, seq_len = position_bias.shape
    bias = position_bias[0]
    if batch > 1 and not torch.equal(position_bias[1:], position_bias[:-1]):
        raise NotImplementedError(_REFUSAL.format("differs between the requests of a batch"))
    if not torch.equal(bias[:, 1:, 1:], bias[:, :-1, :-1]):
        raise NotImplementedError(_REFUSAL.format("depends on more than the distance from query to key"))
    reach = 1 << (max(query_len, seq_len) - 1).bit_length()  # a power of two, so that few plans serve many lengths
    table = bias.new_zeros((4 * reach, heads), dtype=torch.float32)
    table[:seq_len] = bias[:, -1].flip(1).t()
    table[2 * reach + 1 : 2 * reach + query_len] = bias[:, :-1, -1].flip(1).t()
    return table


@_table.register_fake
def _(position_bias):
    return position_bias.new_empty((torch.library.get_ctx().new_dynamic_size(), position_bias.shape[1]), dtype=torch.float32)


def table_of(position_bias: Optional[Tensor]) -> Optional[Tensor]:
    """The table of a bias, None when it is 0 everywhere, as in T5's cross attention. Layers share a bias, so it carries its table with it."""
    if position_bias is None:
        return None
    if position_bias.dim() != 4:
        raise NotImplementedError(f"imbrex: position_bias: expected [1, heads, query_len, seq_len], got {list(position_bias.shape)}")
    if torch.compiler.is_compiling():
        return _table(position_bias)
    if not hasattr(position_bias, "imbrex_table"):
        table = _table(position_bias)
        position_bias.imbrex_table = table if bool(table.any()) else None
    return position_bias.imbrex_table


@torch.library.custom_op("imbrex::relative_attention", mutates_args=())
def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Optional[Tensor],
    table: Tensor,
    causal: bool,
    scale: Optional[float],
    soft_cap: float,
    sinks: Optional[Tensor],
) -> Tensor:
    """imbrex.torch.attention with a table of relative_bias_table()."""
    score = _torch_attention.Score(
        causal,
        scale=scale,
        soft_cap=soft_cap,
        sinks=_torch_attention.f32(sinks),
        relative_bias=table,
        relative_max_distance=table.shape[0] // 4 + 1,
        relative_bidirectional=True,
    )
    return _torch_attention.dense(q, k, v, score, mask)[0].contiguous()


@relative_attention.register_fake
def _(q, k, v, mask, table, causal, scale, soft_cap, sinks):
    return q.new_empty((*q.shape[:3], v.shape[3]))
