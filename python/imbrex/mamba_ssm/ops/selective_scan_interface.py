"""Mamba1's scan."""
from typing import Optional, Tuple, Union

import torch

from imbrex import _state_calls
from imbrex._frameworks import no_gradient
from imbrex.mamba_ssm.ops import _scan

Tensor = torch.Tensor


def _by_token(name: str, x: Tensor, batch: int, d_state: int, length: int) -> Tensor:
    """[batch * length, groups, d_state] of [batch, d_state, length], or of groups in front of d_state."""
    if x.dim() not in (3, 4) or x.is_complex():
        _scan.surface.refuse(
            name, "real numbers for each token, [batch, (groups,) d_state, length]", f"{x.dtype} {list(x.shape)}", "there is no other form"
        )
    x = x.unsqueeze(1) if x.dim() == 3 else x
    _scan.surface.check_shape(name, x, (batch, x.shape[1], d_state, length))
    return _state_calls.rows(x.permute(0, 3, 1, 2))


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor] = None,
    z: Optional[Tensor] = None,
    delta_bias: Optional[Tensor] = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Outputs [batch, dim, length], and the last state [batch, dim, d_state] if it is asked for, of u, delta and z [batch, dim, length], A [dim, d_state],
    B and C [batch, (groups,) d_state, length], D and delta_bias [dim]."""
    no_gradient(u, delta, A, B, C, D, z, delta_bias)
    if u.dim() != 3 or A.dim() != 2:
        raise _scan.surface.wrong("u and A", "[batch, dim, length] and [dim, d_state]", f"{list(u.shape)} and {list(A.shape)}")
    (batch, dim, length), d_state = u.shape, A.shape[1]
    for name, x, shape in (
        ("delta", delta, u.shape),
        ("z", z, u.shape),
        ("A", A, (dim, d_state)),
        ("D", D, (dim,)),
        ("delta_bias", delta_bias, (dim,)),
    ):
        _scan.surface.check_shape(name, x, shape)
    B, C = (_by_token(name, x, batch, d_state, length) for name, x in (("B", B), ("C", C)))
    _scan.surface.check_shape("C", C, B.shape)
    values, steps = (_state_calls.rows(x.transpose(1, 2)) for x in (u, delta))
    steps, delta_bias = _scan.steps_of(steps, delta_bias, delta_softplus)
    make = u.new_empty if length else u.new_zeros
    state = make((batch, dim, 1, d_state), dtype=torch.float32)
    requests = _state_calls.equal_requests(batch, length, False)
    out = _scan.scan(values.unsqueeze(-1), steps, A, B, C, D, delta_bias, state, requests, channel_rates=True)
    out = _scan.gated(out.view(batch, length, dim).transpose(1, 2), z)
    return (out, state.squeeze(2)) if return_last_state else out
