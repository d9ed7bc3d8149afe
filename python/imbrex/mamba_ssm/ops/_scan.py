"""What the operators have in common: Mamba's layers as recurrences, in which C is the query, B the key and x the value."""
from typing import Any, Dict, Hashable, Optional, Tuple

import torch

from imbrex import _state_calls

Tensor = torch.Tensor

surface = _state_calls.Surface("imbrex.mamba_ssm")


def steps_of(dt: Tensor, bias: Optional[Tensor], softplus: bool) -> Tuple[Tensor, Optional[Tensor]]:
    """What kernels take for a step, and the bias of it. They take its softplus, so that a step which is one already goes through the inverse."""
    if softplus:
        return dt, bias
    step = dt.float() if bias is None else dt.float() + bias.float()
    return step + (-torch.expm1(-step)).log(), None


def rates_of(A: Tensor) -> Tensor:
    """Kernels take the logarithm of -A, as models keep it."""
    if A.is_complex():
        surface.refuse("A", "real numbers", A.dtype, "states are real")
    return _state_calls.rates_of(A)


def gated(out: Tensor, z: Optional[Tensor]) -> Tensor:
    """out silu(z), in float32."""
    return out if z is None else (out.float() * torch.nn.functional.silu(z.float())).to(out.dtype)


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Optional[Tensor],
    dt_bias: Optional[Tensor],
    state: Tensor,
    requests: _state_calls.Requests,
    **fields: Hashable,
) -> Tensor:
    """x [num_tokens, heads, dim], dt [num_tokens, heads], A [heads] or of channels [heads, d_state], B and C [num_tokens, groups, d_state], D and dt_bias [heads];
    state [slots, heads, dim, d_state] is read and written. Returns what has the shape and type of x."""
    dtype = _state_calls.compute_type(x, B, C)
    out = _state_calls.recurrent(
        *(_state_calls.tight(y.to(dtype)) for y in (C, B, x)),
        state,
        requests,
        gate_kind="softplus",
        gate=_state_calls.tight(dt if dt.dtype in (dtype, torch.float32) else dt.float()),
        rates=rates_of(A),
        gate_bias=_state_calls.f32(dt_bias),
        skip=_state_calls.f32(D),
        scaled_values=True,
        scale=1.0,
        layout="v_first",
        **fields,
    )
    return out.to(x.dtype)


def limits_of(dt_limit: Tuple[float, float]) -> Dict[str, Any]:
    """Fields of a spec for the least and the largest step."""
    low, high = (float(x) for x in dt_limit)
    if not 0 <= low <= high or high == 0:
        raise surface.wrong("dt_limit", "two numbers that do not fall, from 0 on, the second above 0", dt_limit)
    return dict(gate_min=low, gate_max=0.0 if high == float("inf") else high)
