"""Linear attention with one decay of each head."""
from typing import Any, Optional

import torch

from imbrex.fla.ops import _call

Tensor = torch.Tensor

__all__ = ["chunk_simple_gla", "fused_recurrent_simple_gla"]


def _run(
    q: Tensor, k: Tensor, v: Tensor, g: Optional[Tensor], g_gamma: Optional[Tensor], scale: Optional[float], sequences: _call.Sequences
) -> _call.Result:
    _call.check_heads(q, k, v)
    heads = v.shape[2]
    if g is not None and g_gamma is not None:
        raise _call.surface.wrong("g and g_gamma", "one of them, or neither", "both")
    if g is not None:
        _call.surface.check_shape("g", g, v.shape[:3])
        return _call.run(q, k, v, sequences, scale, gate=g, gate_kind="log")
    _call.surface.check_shape("g_gamma", g_gamma, (heads,))
    rates = torch.zeros(heads, dtype=torch.float32, device=q.device) if g_gamma is None else -g_gamma
    return _call.run(q, k, v, sequences, scale, rates=rates, gate_kind="fixed")


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor] = None,
    g_gamma: Optional[Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    cu_seqlens_cpu: Optional[Tensor] = None,
    **kwargs: Any,
) -> _call.Result:
    """Outputs [B, T, HV, V], and the final state [N, HV, K, V] or None, of q, k [B, T, H, K] and v [B, T, HV, V].

    Logarithms of decays are g [B, T, HV], or g_gamma [HV] whatever the token, or 0. With cu_seqlens [N + 1] the batch is 1 and holds N sequences.
    """
    _call.others("chunk_simple_gla", kwargs)
    return _run(q, k, v, g, g_gamma, scale, _call.Sequences(initial_state, output_final_state, bool(state_v_first), cu_seqlens, cu_seqlens_cpu))


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor] = None,
    g_gamma: Optional[Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    **kwargs: Any,
) -> _call.Result:
    """As chunk_simple_gla(). Refused: reverse."""
    _call.refuse_given(reverse=reverse)
    given = _call.others("fused_recurrent_simple_gla", kwargs, "transpose_state_layout")
    sequences = _call.Sequences(initial_state, output_final_state, _call.v_first(state_v_first, given), cu_seqlens)
    return _run(q, k, v, g, g_gamma, scale, sequences)
