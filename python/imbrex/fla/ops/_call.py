"""What the operators have in common: q, k [batch, length, heads, K] and v [batch, length, value heads, V], and a state for each sequence."""
from typing import Any, Dict, Hashable, NamedTuple, Optional, Tuple

import torch

from imbrex import _state_calls
from imbrex._frameworks import no_gradient

Tensor = torch.Tensor
Result = Tuple[Tensor, Optional[Tensor]]

surface = _state_calls.Surface("imbrex.fla.ops")


class Sequences(NamedTuple):
    """Arguments that all operators have."""

    initial_state: Optional[Tensor] = None  # [sequences, value heads, K, V]
    output_final_state: bool = False
    state_v_first: bool = False
    cu_seqlens: Optional[Tensor] = None
    cu_seqlens_cpu: Optional[Tensor] = None


def others(function: str, arguments: Dict[str, Any], *served: str) -> Dict[str, Any]:
    """Those of **kwargs that a function serves. chunk_size changes nothing: backends have chunks of their own."""
    arguments = dict(arguments)
    taken = {name: arguments.pop(name) for name in served if name in arguments}
    chunk_size = arguments.pop("chunk_size", None)
    if chunk_size is not None and (chunk_size < 1 or chunk_size & (chunk_size - 1)):
        raise surface.wrong("chunk_size", "a power of two", chunk_size)
    if arguments.pop("head_first", False):
        surface.refuse("head_first", "False", True, "tensors are [batch, length, heads, ..], as in FLA since it has no head_first")
    surface.check_unknown(function, arguments)
    return taken


def v_first(state_v_first: bool, arguments: Dict[str, Any]) -> bool:
    """Whether a state is [V, K]: transpose_state_layout is an older name of state_v_first."""
    return bool(arguments.pop("transpose_state_layout", False)) or bool(state_v_first)


def refuse_given(**arguments: Any) -> None:
    """Refuses arguments that are neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            surface.refuse(name, "None or False", True if value is True else type(value).__name__, "it is not there")


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 4 or v.dim() != 4:
        raise surface.wrong("q and v", "[batch, length, heads, dim]", f"{list(q.shape)} and {list(v.shape)}")
    surface.check_shape("k", k, q.shape)
    surface.check_shape("v", v, [*q.shape[:2], *v.shape[2:]])
    if not q.shape[2] or v.shape[2] % q.shape[2]:
        raise surface.wrong("v", f"a multiple of the {q.shape[2]} heads of q", v.shape[2])


def _requests(q: Tensor, sequences: Sequences) -> _state_calls.Requests:
    batch, length = q.shape[:2]
    history = sequences.initial_state is not None
    if sequences.cu_seqlens is None:
        return _state_calls.equal_requests(batch, length, history)
    if batch != 1:
        raise surface.wrong("q", "a batch of 1 with cu_seqlens", batch)
    on_host = sequences.cu_seqlens if sequences.cu_seqlens_cpu is None else sequences.cu_seqlens_cpu
    starts = surface.starts("cu_seqlens", on_host, length)
    return _state_calls.Requests(starts, (history,) * (len(starts) - 1))


def _state(q: Tensor, v: Tensor, sequences: Sequences, requests: _state_calls.Requests) -> Tensor:
    """A new state in float32, with the initial one's numbers."""
    dims = (v.shape[3], q.shape[3]) if sequences.state_v_first else (q.shape[3], v.shape[3])
    shape = (len(requests.history), v.shape[2], *dims)
    surface.check_shape("initial_state", sequences.initial_state, shape)
    if sequences.initial_state is not None:
        return sequences.initial_state.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    make = q.new_zeros if requests.any_empty else q.new_empty  # the state of a sequence without tokens is not written
    return make(shape, dtype=torch.float32)


def _per_token(x: Optional[Tensor], dtype: torch.dtype) -> Optional[Tensor]:
    """Gates and betas: kernels take them in float32 or in the type that q, k and v are computed in."""
    return None if x is None else _state_calls.rows(x if x.dtype in (dtype, torch.float32) else x.to(torch.float32))


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    scale: Optional[float],
    *,
    gate: Optional[Tensor] = None,
    beta: Optional[Tensor] = None,
    rates: Optional[Tensor] = None,
    gate_bias: Optional[Tensor] = None,
    **fields: Hashable,
) -> Result:
    """The recurrence. fields: of RecurrentSpec. Of q, k and v of different types it is computed in one that holds all; the output has that of v."""
    no_gradient(q, k, v, gate, beta, rates, gate_bias, sequences.initial_state)
    requests = _requests(q, sequences)
    state = _state(q, v, sequences, requests)
    if scale is not None and not scale:
        raise surface.wrong("scale", "None or a number other than 0", scale)
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    out = _state_calls.recurrent(
        *(_state_calls.rows(x.to(dtype)) for x in (q, k, v)),
        state,
        requests,
        gate=_per_token(gate, dtype),
        beta=_per_token(beta, dtype),
        rates=_state_calls.f32(rates),
        gate_bias=_state_calls.f32(gate_bias),
        scale=0.0 if scale is None else float(scale),
        layout="v_first" if sequences.state_v_first else "k_first",
        **fields,
    )
    return out.view(v.shape).to(v.dtype), state if sequences.output_final_state else None


def beta_fields(use_beta_sigmoid_in_kernel: bool, allow_neg_eigval: bool) -> Dict[str, Hashable]:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise surface.wrong("allow_neg_eigval", "False without use_beta_sigmoid_in_kernel", True)
    return dict(sigmoid_beta=bool(use_beta_sigmoid_in_kernel), beta_scale=2.0 if allow_neg_eigval else 1.0)
