"""Mamba2's scan, and the layer around it."""
from typing import Any, Optional, Tuple

import torch

from imbrex import _state_calls
from imbrex._frameworks import no_gradient
from imbrex.causal_conv1d import causal_conv1d_fn
from imbrex.mamba_ssm.ops import _scan

Tensor = torch.Tensor


class _Sequences:
    """The sequences of a batch [batch, length], and the last one of each row; seq_idx [batch, length] says which tokens belong together."""

    def __init__(self, batch: int, length: int, seq_idx: Optional[Tensor], history: bool) -> None:
        self.first = self.last = None
        if seq_idx is None or not length:
            self.requests = _state_calls.equal_requests(batch, length, history)
            return
        begins = torch.ones_like(seq_idx, dtype=torch.bool)
        begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        at = begins.flatten().nonzero().flatten()
        self.first = (at % length == 0).nonzero().flatten()
        self.last = torch.cat((self.first[1:], self.first.new_tensor([len(at)]))) - 1
        # As in mamba_ssm, initial states are those of sequence 0.
        goes_on = (at % length == 0) & (seq_idx.flatten()[at] == 0) & history
        self.requests = _state_calls.Requests((*at.tolist(), batch * length), tuple(goes_on.tolist()))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Optional[Tensor] = None,
    z: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    cu_seqlens: Optional[Tensor] = None,
    dt_softplus: bool = False,
    dt_limit: Tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    """Outputs of the shape of x, and states that are asked for, of x and z [batch, length, heads, dim], dt [batch, length, heads], A and dt_bias [heads], B and C
    [batch, length, groups, d_state] and D [heads] or [heads, dim].

    initial_states [batch, heads, dim, d_state] are those of sequence 0 where seq_idx [batch, length] tells sequences apart. Final states are those of each
    row's last sequence; return_varlen_states gives that of every sequence [sequences, heads, dim, d_state], and cu_seqlens has to agree with seq_idx then.
    chunk_size changes nothing.
    """
    no_gradient(x, dt, A, B, C, D, z, dt_bias, initial_states)
    if x.dim() != 4 or B.dim() != 4:
        raise _scan.surface.wrong(
            "x and B", "[batch, length, heads, dim] and [batch, length, groups, d_state]", f"{list(x.shape)} and {list(B.shape)}"
        )
    (batch, length, heads, dim), (groups, d_state) = x.shape, B.shape[2:]
    if not groups or heads % groups:
        raise _scan.surface.wrong("x", f"a multiple of the {groups} groups of B as heads", heads)
    shapes = dict(
        dt=(dt, x.shape[:3]), A=(A, (heads,)), B=(B, (batch, length, groups, d_state)), C=(C, B.shape), z=(z, x.shape), dt_bias=(dt_bias, (heads,))
    )
    shapes.update(initial_states=(initial_states, (batch, heads, dim, d_state)), seq_idx=(seq_idx, (batch, length)))
    for name, (tensor, shape) in shapes.items():
        _scan.surface.check_shape(name, tensor, shape)
    _scan.surface.check_shape("D", D, (heads,), (heads, dim))
    sequences = _Sequences(batch, length, seq_idx, initial_states is not None)
    if return_varlen_states:
        starts = None if cu_seqlens is None else _scan.surface.starts("cu_seqlens", cu_seqlens, batch * length)
        if batch != 1 or starts is None or starts != sequences.requests.starts:
            expected = f"a batch of 1, and with return_varlen_states the sequences of seq_idx, {list(sequences.requests.starts)}"
            raise _scan.surface.wrong("cu_seqlens", expected, f"a batch of {batch}, and {starts if starts is None else list(starts)}")
    state = x.new_zeros((len(sequences.requests.history), heads, dim, d_state), dtype=torch.float32)
    if initial_states is not None:
        state[slice(None) if sequences.first is None else sequences.first] = initial_states.float()
    per_head = D if D is not None and D.dim() == 1 else None
    values, steps, keys, queries = (_state_calls.rows(y) for y in (x, dt, B, C))
    steps, dt_bias = _scan.steps_of(steps, dt_bias, dt_softplus)
    out = _scan.scan(values, steps, A, keys, queries, per_head, dt_bias, state, sequences.requests, **_scan.limits_of(dt_limit)).view(x.shape)
    if D is not None and per_head is None:
        out = (out.float() + x.float() * D.float()).to(out.dtype)
    results = [_scan.gated(out, z)]
    if return_final_states:
        results.append(state if sequences.last is None else state[sequences.last])
    if return_varlen_states:
        results.append(state)
    return results[0] if len(results) == 1 else tuple(results)


def _normal(x: Tensor, weight: Tensor, eps: float, z: Tensor, group: int, norm_before_gate: bool) -> Tensor:
    """x over the root of its mean square in each group of channels, times the weight, with the gate silu(z) in front of that or behind; in float32."""
    gate, x = torch.nn.functional.silu(z.float()), x.float()
    x = x if norm_before_gate else x * gate
    x = (x.unflatten(-1, (-1, group)) * torch.rsqrt(x.unflatten(-1, (-1, group)).square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.float()
    return x * gate if norm_before_gate else x


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Optional[Tensor],
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    dt_limit: Tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: Optional[str] = "silu",
    rmsnorm_weight: Optional[Tensor] = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Optional[Tensor] = None,
    outproj_bias: Optional[Tensor] = None,
    headdim: Optional[int] = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """A layer of Mamba2 from its projection zxbcdt [batch, length, 2 (others + dim) + 2 ngroups d_state + heads] on, dim being heads headdim: convolution, scan,
    gate, norm and out_proj where their weights are given. Norm, gate and projection are PyTorch's."""
    no_gradient(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, initial_states, rmsnorm_weight, outproj_weight, outproj_bias)
    if D.dim() == 1 and headdim is None:
        raise _scan.surface.wrong("headdim", "a number where D is [heads]", None)
    heads, headdim = (len(D), headdim) if D.dim() == 1 else D.shape
    dim = heads * headdim
    d_state = (len(conv1d_weight) - dim) // ngroups // 2
    others = (zxbcdt.shape[-1] - 2 * dim - 2 * ngroups * d_state - heads) // 2
    if others < 0 or zxbcdt.dim() != 3 or len(conv1d_weight) != dim + 2 * ngroups * d_state:
        expected = f"[batch, length, {2 * dim + 2 * ngroups * d_state + heads} or more] for conv1d_weight {list(conv1d_weight.shape)}"
        raise _scan.surface.wrong("zxbcdt", expected, list(zxbcdt.shape))
    if outproj_weight is None and outproj_bias is not None:
        raise _scan.surface.wrong("outproj_bias", "None without outproj_weight", list(outproj_bias.shape))
    beside, z, xbc, dt = zxbcdt.split((2 * others, dim, len(conv1d_weight), heads), -1)
    xbc = causal_conv1d_fn(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation).transpose(1, 2)
    x, B, C = xbc.split((dim, ngroups * d_state, ngroups * d_state), -1)
    x, B, C = x.unflatten(-1, (heads, headdim)), B.unflatten(-1, (ngroups, d_state)), C.unflatten(-1, (ngroups, d_state))
    options = dict(initial_states=initial_states, seq_idx=seq_idx, dt_softplus=True, dt_limit=dt_limit, return_final_states=True)
    gate = z.unflatten(-1, (heads, headdim)) if rmsnorm_weight is None else None
    out, final_states = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=D, z=gate, dt_bias=dt_bias, **options)
    out = out.flatten(2)
    if rmsnorm_weight is not None:
        out = _normal(out, rmsnorm_weight, rmsnorm_eps, z, dim // ngroups, norm_before_gate).to(out.dtype)
    if others:
        left, right = beside.chunk(2, -1)
        out = torch.cat((torch.nn.functional.silu(left) * right, out), -1)
    if outproj_weight is not None:
        out = torch.nn.functional.linear(out, outproj_weight, outproj_bias)
    return (out, final_states) if return_final_states else out
