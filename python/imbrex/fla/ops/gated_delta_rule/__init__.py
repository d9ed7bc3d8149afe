"""Gated delta nets."""
from typing import Any, Dict, Hashable, Optional

import torch

from imbrex.fla.ops import _call

Tensor = torch.Tensor

__all__ = ["chunk_gated_delta_rule", "chunk_gdn", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor],
    gk: Optional[Tensor],
    beta: Optional[Tensor],
    scale: Optional[float],
    sequences: _call.Sequences,
    use_gate_in_kernel: bool,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    fields: Dict[str, Hashable],
) -> _call.Result:
    _call.check_heads(q, k, v)
    heads = v.shape[:3]
    _call.surface.check_shape("g", g, heads)
    _call.surface.check_shape("gk", gk, (*heads, q.shape[3]))
    _call.surface.check_shape("beta", beta, heads)
    beta = torch.ones(heads, dtype=torch.float32, device=q.device) if beta is None else beta
    arrays = dict(beta=beta, rates=None, gate_bias=None)
    if use_gate_in_kernel:
        if g is None or A_log is None or gk is not None:
            given = [name for name, x in (("g", g), ("A_log", A_log), ("gk", gk)) if x is not None]
            raise _call.surface.wrong("use_gate_in_kernel", "g and A_log, and no gk", f"{', '.join(given) or 'neither'}")
        _call.surface.check_shape("A_log", A_log, heads[2:])
        _call.surface.check_shape("dt_bias", dt_bias, heads[2:])
        arrays.update(gate=g, rates=A_log, gate_bias=dt_bias)
        fields = dict(fields, gate_kind="softplus")
    elif gk is not None:
        arrays.update(gate=gk if g is None else gk.float() + g.float().unsqueeze(-1))
        fields = dict(fields, gate_kind="log", channel_gate=True)
    elif g is not None:
        arrays.update(gate=g)
        fields = dict(fields, gate_kind="log")
    else:
        arrays.update(rates=torch.zeros(heads[2], dtype=torch.float32, device=q.device))
        fields = dict(fields, gate_kind="fixed")
    return _call.run(q, k, v, sequences, scale, delta=True, **arrays, **fields)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    cu_seqlens_cpu: Optional[Tensor] = None,
    chunk_indices: Optional[Tensor] = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> _call.Result:
    """Outputs [B, T, HV, V], and the final state [N, HV, K, V] or None, of q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV].

    g is the logarithm of the decay, or with use_gate_in_kernel what -exp(A_log) softplus(g + dt_bias) makes one of; A_log and dt_bias [HV]. With cu_seqlens
    [N + 1] the batch is 1 and holds N sequences. chunk_indices and chunk_size change nothing. Refused: cp_context.
    """
    _call.refuse_given(cp_context=cp_context)
    given = _call.others("chunk_gated_delta_rule", kwargs, "use_gate_in_kernel", "A_log", "dt_bias", "transpose_state_layout")
    sequences = _call.Sequences(initial_state, output_final_state, _call.v_first(state_v_first, given), cu_seqlens, cu_seqlens_cpu)
    fields = dict(_call.beta_fields(use_beta_sigmoid_in_kernel, allow_neg_eigval), qk_norm=bool(use_qk_l2norm_in_kernel))
    in_kernel = given.get("use_gate_in_kernel", False)
    return _run(q, k, v, g, None, beta, scale, sequences, in_kernel, given.get("A_log"), given.get("dt_bias"), fields)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor] = None,
    gk: Optional[Tensor] = None,
    gv: Optional[Tensor] = None,
    beta: Optional[Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    **kwargs: Any,
) -> _call.Result:
    """As chunk_gated_delta_rule(); gk [B, T, HV, K] are decays of key channels, as logarithms, and without beta it is 1. Refused: gv."""
    _call.refuse_given(gv=gv)
    given = _call.others("fused_recurrent_gated_delta_rule", kwargs, "transpose_state_layout")
    sequences = _call.Sequences(initial_state, output_final_state, _call.v_first(state_v_first, given), cu_seqlens)
    fields = dict(_call.beta_fields(use_beta_sigmoid_in_kernel, allow_neg_eigval), qk_norm=bool(use_qk_l2norm_in_kernel))
    return _run(q, k, v, g, gk, beta, scale, sequences, use_gate_in_kernel, A_log, dt_bias, fields)


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
