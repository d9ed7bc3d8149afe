"""One token of Mamba1 and Mamba2."""
from typing import Optional

import torch

from imbrex import _state_calls
from imbrex._frameworks import no_gradient
from imbrex.mamba_ssm.ops import _scan

Tensor = torch.Tensor


def _is_tied(*tensors: Optional[Tensor]) -> bool:
    """Whether all numbers of a head are one: such tensors come as expanded ones."""
    return all(x is None or x.stride(-1) == 0 for x in tensors)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor] = None,
    z: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    dt_softplus: bool = False,
    state_batch_indices: Optional[Tensor] = None,
) -> Tensor:
    """Outputs [batch, (heads,) dim] of a token's x, dt and z [batch, (heads,) dim], A [(heads,) dim, d_state], B and C [batch, (groups,) d_state], D and dt_bias
    [(heads,) dim]; state [slots, (heads,) dim, d_state] is read and written, in the rows that state_batch_indices [batch] names.

    dt, A, dt_bias and D that are expanded over dim and d_state make a step of Mamba2.
    """
    no_gradient(state, x, dt, A, B, C, D, z, dt_bias)
    if state.dim() not in (3, 4) or x.dim() != state.dim() - 1:
        raise _scan.surface.wrong(
            "state and x", "[slots, (heads,) dim, d_state] and [batch, (heads,) dim]", f"{list(state.shape)} and {list(x.shape)}"
        )
    with_heads, (batch, d_state), own = state.dim() == 4, (len(x), state.shape[-1]), state.shape[1:-1]
    for name, y in (("x", x), ("dt", dt), ("z", z)):
        _scan.surface.check_shape(name, y, (batch, *own))
    for name, y in (("D", D), ("dt_bias", dt_bias)):
        _scan.surface.check_shape(name, y, own)
    _scan.surface.check_shape("A", A, state.shape[1:])
    _scan.surface.check_shape("state_batch_indices", state_batch_indices, (batch,))
    if state_batch_indices is None:
        _scan.surface.check_shape("state", state, (batch, *state.shape[1:]))
    B, C = (y.unsqueeze(1) if y.dim() == 2 else y for y in (B, C))
    _scan.surface.check_shape("B", B, (batch, *B.shape[1:2], d_state))
    _scan.surface.check_shape("C", C, B.shape)
    slots = None if state_batch_indices is None else tuple(state_batch_indices.tolist())
    requests = _state_calls.Requests(tuple(range(batch + 1)), (True,) * batch, slots)
    rows = state if state.stride(-1) == 1 else state.contiguous()
    if with_heads and _is_tied(dt, A, A[..., 0], dt_bias, D):
        if rows.stride(-2) != d_state:
            rows = rows.contiguous()
        skip, bias = (None if y is None else y[..., 0] for y in (D, dt_bias))
        steps, bias = _scan.steps_of(dt[..., 0], bias, dt_softplus)
        out = _scan.scan(x, steps, A[:, 0, 0], B, C, skip, bias, rows, requests)
    else:
        # Each channel is a value head of its own.
        flat = rows.flatten(1, -2) if with_heads else rows
        skip, bias = (None if y is None else y.flatten() for y in (D, dt_bias))
        steps, bias = _scan.steps_of(dt.flatten(1), bias, dt_softplus)
        out = _scan.scan(x.flatten(1).unsqueeze(-1), steps, A.flatten(0, -2), B, C, skip, bias, flat.unsqueeze(2), requests, channel_rates=True)
        rows = flat.view(state.shape)
    if rows.data_ptr() != state.data_ptr():
        state.copy_(rows)
    return _scan.gated(out.view(x.shape), z)
