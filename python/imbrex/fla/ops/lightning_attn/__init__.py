"""Lightning attention: linear attention whose decay depends on the head and the layer alone."""
from typing import Any, Optional

import torch

from imbrex.fla.ops import _call
from imbrex.fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

Tensor = torch.Tensor

__all__ = ["chunk_lightning_attn", "fused_recurrent_lightning_attn"]


def _decays(q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    """Logarithms of the heads' decays: arithmetic slopes, which are not those of MiniMax's checkpoints."""
    heads = q.shape[2]
    return torch.arange(heads, dtype=torch.float32, device=q.device) * (-8 / heads * (1 - layer_idx / num_layers))


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    **kwargs: Any,
) -> _call.Result:
    """chunk_simple_gla() with the decays of a layer: head h of H keeps exp(-8 h / H (1 - layer_idx / num_layers)) of a token's state for the next."""
    _call.others("chunk_lightning_attn", kwargs)
    return chunk_simple_gla(
        q,
        k,
        v,
        g_gamma=_decays(q, layer_idx, num_layers),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Optional[Tensor] = None,
) -> _call.Result:
    """As chunk_lightning_attn(). Refused: reverse."""
    return fused_recurrent_simple_gla(
        q,
        k,
        v,
        g_gamma=_decays(q, layer_idx, num_layers),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
    )
