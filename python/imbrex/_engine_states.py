"""Layers with a state in serving engines: the plans of a step, what kernels take of weights, and the layers themselves. No engine is imported here.

A layer is a convolution and, but for LFM2's, a recurrence over its channels. Both states lie in the engine's own cache, and a request's are in its slot of it.
"""
import logging
from importlib import metadata
from typing import Any, Dict, Hashable, List, NamedTuple, Optional, Tuple

import torch

from . import _core
from .engines import Settings, all_cores
from .plan import Workspace, select
from .recurrent import RecurrentPlan
from .short_conv import ShortConvPlan

Tensor = torch.Tensor

Fields = Tuple[Tuple[str, Hashable], ...]


class Kind(NamedTuple):
    """What the kernels of a layer are made for: fields of ShortConvSpec, and of RecurrentSpec where it has a recurrence."""

    conv: Optional[Fields]
    recurrence: Optional[Fields] = None


def conv_fields(dim: int, width: int, bias: bool, dtype: str, *, gated: bool = False, activation: str = "silu") -> Fields:
    """The convolution in front of a recurrence, or with `gated` LFM2's layer."""
    if gated:
        return tuple(dict(dim=dim, width=width, bias=bias, dtype=dtype, form="gated").items())
    return tuple(dict(dim=dim, width=width, bias=bias, dtype=dtype, form="plain", activation=activation).items())


def delta_fields(k_heads: int, v_heads: int, k_dim: int, v_dim: int, dtype: str, state_dtype: str) -> Fields:
    """A gated delta net, whose state is [value heads, v_dim, k_dim]."""
    heads = dict(num_k_heads=k_heads, num_v_heads=v_heads, head_dim_k=k_dim, head_dim_v=v_dim, dtype=dtype, state_dtype=state_dtype)
    return tuple(dict(heads, gate="softplus", delta=True, sigmoid_beta=True, qk_norm=True, layout="v_first").items())


def kda_fields(heads: int, dim: int, dtype: str, state_dtype: str, lower_bound: Optional[float]) -> Fields:
    """Kimi delta attention; the gate is a softplus, or a sigmoid over a lower bound."""
    gate = dict(channel_gate=True) if lower_bound is None else dict(channel_gate=True, gate="sigmoid", gate_min=float(lower_bound))
    return tuple({**dict(delta_fields(heads, heads, dim, dim, dtype, state_dtype)), **gate}.items())


def mamba_fields(groups: int, heads: int, d_state: int, dim: int, dtype: str, state_dtype: str, *, channel_rates: bool = False) -> Fields:
    """Mamba2, or with channel_rates Mamba1, whose channels are heads of one value. The state is [heads, dim, d_state]."""
    made = dict(num_k_heads=groups, num_v_heads=heads, head_dim_k=d_state, head_dim_v=dim, dtype=dtype, state_dtype=state_dtype)
    made.update(gate="softplus", scaled_values=True, skip=True, scale=1.0, layout="v_first", channel_rates=channel_rates)
    return tuple(made.items())


def make_plan(plan_class: Any, spec_class: Any, fields: Fields, device: str, chosen: Settings, **options: Any) -> Any:
    """A plan as the settings have it. A backend that they name is taken where the family has it: others are of attention alone."""
    spec = spec_class(**dict(fields))
    known = [name for name, _ in select(spec, device).candidates]
    backend = chosen.backend if chosen.backend in known else ""
    with all_cores():
        return plan_class(spec, device, backend=backend, num_threads=chosen.num_threads, validate=chosen.validate, **options)


class LayerPlans(NamedTuple):
    conv: Optional[ShortConvPlan]
    recurrence: Optional[RecurrentPlan]


class StepPlans:
    """The plans of some kinds of layers, which one step is planned for at once. For one thread at a time, and one stream."""

    def __init__(self, device: str, chosen: Settings, *, on_device: bool = False, workspace: Optional[Workspace] = None, **limits: int) -> None:
        self._device, self._chosen = device, chosen
        self._options = dict(limits, on_device=on_device, workspace=workspace)
        self._plans: Dict[Tuple, Any] = {}
        self._kinds: Dict[Kind, LayerPlans] = {}

    def add(self, kind: Kind) -> LayerPlans:
        if kind not in self._kinds:
            conv = None if kind.conv is None else self._plan(ShortConvPlan, _core.ShortConvSpec, kind.conv)
            recurrence = None if kind.recurrence is None else self._plan(RecurrentPlan, _core.RecurrentSpec, kind.recurrence)
            self._kinds[kind] = LayerPlans(conv, recurrence)
        return self._kinds[kind]

    def _plan(self, plan_class: Any, spec_class: Any, fields: Fields) -> Any:
        key = (plan_class, fields)
        if key not in self._plans:
            self._plans[key] = make_plan(plan_class, spec_class, fields, self._device, self._chosen, **self._options)
        return self._plans[key]

    def __getitem__(self, kind: Kind) -> LayerPlans:
        return self._kinds[kind]

    def update(self, starts: Tensor, seq_lens: Tensor, slots: Tensor, **options: Tensor) -> None:
        """int32 on the host: query_start_loc, lengths with the step's tokens, and the slot of each request; others by the names that plans have for them."""
        for plan in self._plans.values():
            plan.update(starts, seq_lens, slots, **options)

    def update_on_device(self, starts: Tensor, seq_lens: Tensor, slots: Tensor, num_tokens: int, **options: Tensor) -> None:
        for plan in self._plans.values():
            plan.update_on_device(starts, seq_lens, slots, max_num_tokens=num_tokens, **options)


def announce(log: logging.Logger, plans: LayerPlans, layers: str) -> None:
    """One line of the engine's log: which imbrex and which of its backends computes `layers`."""
    try:
        version = metadata.version("imbrex")
    except metadata.PackageNotFoundError:
        version = "(not installed, run from its sources)"
    parts = [f"{str(plan).split(':')[0]} runs {plan.spec}" for plan in plans if plan is not None]
    log.info("imbrex %s: %s: %s", version, layers, "; ".join(parts))


def f32(x: Tensor) -> Tensor:
    """Contiguous, in float32. Made of a parameter in each call, since engines change these in place, and graphs see it then."""
    return x.detach().to(torch.float32).contiguous()


def matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight of a convolution [dim, 1, width] or [dim, width] as [dim, width]."""
    return x.detach().reshape(x.shape[0], x.shape[-1]).to(dtype).contiguous()


def tight(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def heads_of(x: Tensor, spec: _core.RecurrentSpec, order: str) -> List[Tensor]:
    """The channels of a convolution [tokens, dim] as views of q, k and v [tokens, heads, dim], in the order they have there: "qkv", or Mamba2's "vkq"."""
    keys, values = (spec.num_k_heads, spec.head_dim_k), (spec.num_v_heads, spec.head_dim_v)
    shapes = [values if name == "v" else keys for name in order]
    parts = dict(zip(order, x.split([heads * dim for heads, dim in shapes], -1)))
    return [parts[name].unflatten(-1, values if name == "v" else keys) for name in "qkv"]


def delta(
    plans: LayerPlans,
    qkv: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    state: Tensor,
    gate: Tensor,
    beta: Tensor,
    rates: Tensor,
    bias: Tensor,
    out: Tensor,
) -> None:
    """GDN and KDA of qkv [tokens, channels], gate and beta [tokens, value heads, ..], into out [tokens, value heads, v_dim]. conv_state [slots, width - 1,
    channels] and state [slots, value heads, v_dim, k_dim] are read and written."""
    q, k, v = heads_of(plans.conv.run(tight(qkv), weight, conv_state), plans.recurrence.spec, "qkv")
    plans.recurrence.run(q, k, v, state.unsqueeze(1), gate=tight(gate), beta=tight(beta), rates=rates, gate_bias=bias, out=out)


def mamba2(
    plans: LayerPlans,
    xbc: Tensor,
    weight: Tensor,
    conv_bias: Optional[Tensor],
    conv_state: Tensor,
    state: Tensor,
    dt: Tensor,
    rates: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    out: Tensor,
) -> None:
    """Mamba2 of xbc [tokens, channels] and dt [tokens, heads], into out [tokens, heads, dim]; states as in delta()."""
    q, k, v = heads_of(plans.conv.run(tight(xbc), weight, conv_state, bias=conv_bias), plans.recurrence.spec, "vkq")
    plans.recurrence.run(q, k, v, state.unsqueeze(1), gate=tight(dt), rates=rates, gate_bias=dt_bias, skip=skip, out=out)
