"""Gated delta products: several steps of the delta rule for each token, of which the first decays the state and the last gives the output."""
from typing import Any, Optional

import torch

from imbrex.fla.ops import _call
from imbrex.fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

Tensor = torch.Tensor

__all__ = ["chunk_gated_delta_product"]


def _spread(x: Tensor, steps: int, at: int) -> Tensor:
    """Numbers of tokens [B, T, ..] become those of one step of each, [B, T * steps, ..]; those of the others are zeros."""
    spread = x.new_zeros(*x.shape[:2], steps, *x.shape[2:])
    spread[:, :, at] = x
    return spread.flatten(1, 2)


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor],
    beta: Tensor,
    num_householder: int,
    scale: Optional[float] = None,
    initial_state: Optional[Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Optional[Tensor] = None,
    cu_seqlens_cpu: Optional[Tensor] = None,
    cp_context: Any = None,
) -> _call.Result:
    """Outputs [B, T, HV, V], and the final state [N, HV, K, V] or None, of q [B, T, H, K], g [B, T, HV], which is a logarithm, and of k [B, T * n, H, K],
    v [B, T * n, HV, V] and beta [B, T * n, HV], where n is num_householder: the steps of a token follow each other.

    It is the gated delta rule of all steps, with q of a token at its last one and g at its first. cu_seqlens count tokens. Refused: cp_context.
    """
    _call.refuse_given(cp_context=cp_context)
    steps = int(num_householder)
    if steps < 1 or steps != num_householder:
        raise _call.surface.wrong("num_householder", "a number of steps, 1 or more", num_householder)
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        shapes = " and ".join(str(list(x.shape)) for x in (q, k, v))
        raise _call.surface.wrong("q, k and v", "[batch, length, heads, dim]", shapes)
    batch, tokens, heads, dim = q.shape
    _call.surface.check_shape("k", k, [batch, tokens * steps, heads, dim])
    _call.surface.check_shape("v", v, [batch, tokens * steps, *v.shape[2:]])
    _call.surface.check_shape("g", g, [batch, tokens, v.shape[2]])
    lengths = dict(cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu)
    options = dict(
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        **{name: None if starts is None else starts * steps for name, starts in lengths.items()},
    )
    queries = _spread(q, steps, steps - 1)
    if g is None:
        options.pop("cu_seqlens_cpu")
        out, state = fused_recurrent_gated_delta_rule(queries, k, v, beta=beta, **options)
    else:
        out, state = chunk_gated_delta_rule(queries, k, v, _spread(g.float(), steps, 0), beta, **options)
    return out[:, steps - 1 :: steps], state
