"""Kimi delta attention: gated delta nets whose decay is of each key channel."""
from typing import Any, Dict, Hashable, Optional

import torch

from imbrex.fla.ops import _call

Tensor = torch.Tensor

__all__ = ["chunk_kda", "fused_recurrent_kda"]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float],
    sequences: _call.Sequences,
    use_gate_in_kernel: bool,
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    lower_bound: Optional[float],
    fields: Dict[str, Hashable],
) -> _call.Result:
    _call.check_heads(q, k, v)
    heads, channels = v.shape[2], q.shape[3]
    _call.surface.check_shape("g", g, (*v.shape[:3], channels))
    _call.surface.check_shape("beta", beta, v.shape[:3])
    fields = dict(fields, channel_gate=True)
    if not use_gate_in_kernel:
        return _call.run(q, k, v, sequences, scale, gate=g, beta=beta, delta=True, gate_kind="log", **fields)
    if lower_bound is None and A_log is None:
        raise _call.surface.wrong("A_log", f"[{heads}] with use_gate_in_kernel and without lower_bound", None)
    if lower_bound is not None and not lower_bound < 0:
        raise _call.surface.wrong("lower_bound", "a number below 0", lower_bound)
    if A_log is None:
        A_log = torch.zeros(heads, dtype=torch.float32, device=q.device)
    if A_log.numel() != heads:
        raise _call.surface.wrong("A_log", f"[{heads}]", list(A_log.shape))
    if dt_bias is not None and dt_bias.numel() != heads * channels:
        raise _call.surface.wrong("dt_bias", f"[{heads * channels}]", list(dt_bias.shape))
    bias = None if dt_bias is None else dt_bias.reshape(heads, channels)
    fields.update(dict(gate_kind="softplus") if lower_bound is None else dict(gate_kind="sigmoid", gate_min=float(lower_bound)))
    return _call.run(q, k, v, sequences, scale, gate=g, beta=beta, rates=A_log.reshape(heads), gate_bias=bias, delta=True, **fields)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: Optional[float] = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    cu_seqlens_cpu: Optional[Tensor] = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: Optional[int] = None,
    **kwargs: Any,
) -> _call.Result:
    """Outputs [B, T, HV, V], and the final state [N, HV, K, V] or None, of q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K] and beta [B, T, HV].

    g are logarithms of decays, or with use_gate_in_kernel what -exp(A_log) softplus(g + dt_bias) makes them of, or with lower_bound too
    lower_bound sigmoid(exp(A_log) (g + dt_bias)); A_log [HV], dt_bias [HV * K]. With cu_seqlens [N + 1] the batch is 1 and holds N sequences. safe_gate,
    disable_recompute and chunk_size change nothing. Refused: return_intermediate_states, cp_context, use_graph.
    """
    _call.refuse_given(return_intermediate_states=return_intermediate_states, cp_context=cp_context, use_graph=use_graph)
    given = _call.others("chunk_kda", kwargs, "A_log", "dt_bias", "transpose_state_layout")
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise _call.surface.wrong("lower_bound", "a number with safe_gate and use_gate_in_kernel", None)
    sequences = _call.Sequences(initial_state, output_final_state, _call.v_first(state_v_first, given), cu_seqlens, cu_seqlens_cpu)
    fields = dict(_call.beta_fields(use_beta_sigmoid_in_kernel, allow_neg_eigval), qk_norm=bool(use_qk_l2norm_in_kernel))
    return _run(q, k, v, g, beta, scale, sequences, use_gate_in_kernel, given.get("A_log"), given.get("dt_bias"), lower_bound, fields)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: Optional[float] = None,
    state_v_first: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    **kwargs: Any,
) -> _call.Result:
    """As chunk_kda()."""
    given = _call.others("fused_recurrent_kda", kwargs, "transpose_state_layout")
    sequences = _call.Sequences(initial_state, output_final_state, _call.v_first(state_v_first, given), cu_seqlens)
    fields = dict(_call.beta_fields(use_beta_sigmoid_in_kernel, allow_neg_eigval), qk_norm=bool(use_qk_l2norm_in_kernel))
    return _run(q, k, v, g, beta, scale, sequences, use_gate_in_kernel, A_log, dt_bias, lower_bound, fields)
