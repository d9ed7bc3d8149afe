"""Layers with a state in one call, for imbrex.causal_conv1d, imbrex.fla and imbrex.mamba_ssm: torch tensors in, and no plan to be kept.

Plans are found again by what they are for, and are not planned again for the batch of the last call. Lengths are on the host.
"""
import functools
from collections import OrderedDict
from typing import Any, Hashable, NamedTuple, Optional, Sequence, Tuple

import torch

from . import _core
from ._frameworks import device_name, stream_address
from ._plan_cache import Limits, PlanCache
from .recurrent import RecurrentPlan
from .short_conv import ShortConvPlan

Tensor = torch.Tensor

_CPU = torch.device("cpu")  # named wherever a tensor of the host is made: the default device may be another one

_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

_plans = PlanCache()


class Surface:
    """What functions of a module with foreign signatures say of their arguments."""

    def __init__(self, module: str) -> None:
        self.module = module

    def wrong(self, name: str, expected: Any, got: Any) -> ValueError:
        return ValueError(f"{self.module}: {name}: expected {expected}, got {got}")

    def refuse(self, name: str, expected: Any, got: Any, why: str) -> None:
        raise NotImplementedError(f"{self.module}: {name}: expected {expected}, got {got}: {why}")

    def check_shape(self, name: str, x: Optional[Tensor], *shapes: Sequence[int]) -> None:
        """Checks that a tensor that is given has one of some shapes."""
        if x is not None and all(tuple(x.shape) != tuple(shape) for shape in shapes):
            raise self.wrong(name, " or ".join(str(list(shape)) for shape in shapes), list(x.shape))

    def check_unknown(self, function: str, arguments: Any) -> None:
        if arguments:
            raise TypeError(f"{self.module}.{function}: expected no argument {next(iter(arguments))!r}")

    def starts(self, name: str, cu_seqlens: Tensor, num_tokens: int) -> Tuple[int, ...]:
        """Numbers of cu_seqlens [num_reqs + 1], which are brought to the host."""
        if cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise self.wrong(name, "int32 or int64 [num_sequences + 1]", f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}")
        starts = tuple(cu_seqlens.tolist())
        if starts[0] != 0 or starts[-1] != num_tokens or any(a > b for a, b in zip(starts, starts[1:])):
            raise self.wrong(name, f"numbers that do not fall, from 0 to {num_tokens}", list(starts))
        return starts


class Requests(NamedTuple):
    """Whose tokens are whose: those of request i lie from starts[i] to starts[i + 1], it has earlier ones if history[i], and its state is in row slots[i], or i.

    drafts: so many of each request's last tokens are drafts, and so many of the step before were kept.
    """

    starts: Tuple[int, ...]
    history: Tuple[bool, ...]
    slots: Optional[Tuple[int, ...]] = None
    drafts: int = 0

    @property
    def any_empty(self) -> bool:
        return any(a == b for a, b in zip(self.starts, self.starts[1:]))


@functools.lru_cache(maxsize=256)
def equal_requests(count: int, length: int, history: bool, drafts: int = 0) -> Requests:
    """Requests of one length each."""
    return Requests(tuple(i * length for i in range(count + 1)), (history,) * count, drafts=drafts)


def tight(x: Tensor) -> Tensor:
    """The tensor, copied if the numbers of its last dimension do not lie together."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rows(x: Tensor) -> Tensor:
    """[batch, length, ..] as [batch * length, ..], whose last dimension is contiguous; a copy where there is no such view."""
    return tight(x.flatten(0, 1))


def f32(x: Optional[Tensor]) -> Optional[Tensor]:
    return None if x is None else x.to(torch.float32).contiguous()


_MOST_RATES, _FEW = 128, 4096

# By shape, type and first numbers: what such a tensor was, and its rates. All threads share it, under Python's lock.
_rates: "OrderedDict[Hashable, Tuple[Tensor, Tensor]]" = OrderedDict()


def rates_of(A: Tensor) -> Tensor:
    """log(-A), which kernels take as models keep it, contiguous in float32.

    Mamba1 has a number for each channel and number of its state, whose logarithms take longer than a token on a CPU: they are kept by content, since
    callers make A again for each call.
    """
    if A.device.type != "cpu" or A.dim() != 2 or A.numel() < _FEW or not A.is_contiguous() or A.shape[1] * A.element_size() % 8:
        return (-A.float()).log().contiguous()
    A = A.detach()
    key, bits = (A.shape, A.dtype, *A[0, :8].tolist()), A.view(torch.int64)  # which are compared faster than floats
    kept = _rates.get(key)
    if kept is None or not torch.equal(kept[0], bits):
        kept = _rates[key] = (bits.clone(), (-A.float()).log())
        while len(_rates) > _MOST_RATES:
            _rates.popitem(last=False)
    return kept[1]


def _type_name(x: Tensor) -> str:
    if x.dtype not in _TYPES:
        raise TypeError(f"imbrex: expected tensors of {', '.join(map(str, _TYPES))}, got {x.dtype}")
    return _TYPES[x.dtype]


def compute_type(*tensors: Optional[Tensor]) -> torch.dtype:
    """The type that holds the numbers of all tensors."""
    return functools.reduce(torch.promote_types, (x.dtype for x in tensors if x is not None))


def _find(plan_class: Any, spec_class: Any, fields: Tuple[Tuple[str, Hashable], ...], like: Tensor, requests: Requests) -> Any:
    """A plan of the calling thread and of the stream, updated for the requests."""
    device, stream = device_name(like), stream_address(None, like)
    if stream and _core.capture_of(stream):
        raise RuntimeError(
            f"imbrex: a CUDA graph cannot hold this call, whose lengths are on the host: capture imbrex.{plan_class.__name__}, with update_on_device()"
        )

    def make(limits: Limits) -> Any:
        arguments = limits.arguments()
        del arguments["max_query_len"]
        return plan_class(spec_class(**dict(fields)), device, **arguments)

    starts, history, slots, drafts = requests
    longest = max(b - a for a, b in zip(starts, starts[1:])) + 1
    kept = _plans.find((spec_class, device, stream, fields), Limits(len(history), starts[-1], longest), make)
    if kept.batch != requests:
        kept.batch = None
        begin, earlier, rows_of, kept_drafts = (
            torch.tensor(x, dtype=torch.int32, device=_CPU) for x in (starts, history, slots or range(len(history)), [drafts] * len(history))
        )
        options = dict(num_drafts=kept_drafts, accepted_drafts=kept_drafts) if drafts else {}
        # How many tokens there were before does not matter, only whether there were any.
        kept.plan.update(begin, begin[1:] - begin[:-1] + earlier, rows_of, stream=stream, **options)
        kept.batch = requests
    return kept.plan


def short_conv(x: Tensor, weight: Tensor, bias: Optional[Tensor], state: Tensor, requests: Requests, silu: bool) -> Tensor:
    """The plain convolution of x [num_tokens, dim], of one type with weight [dim, width]; state [requests, width - 1 + drafts, dim] is read and written."""
    if not len(x):
        return x.new_empty(x.shape)
    fields = (
        ("dim", x.shape[1]),
        ("width", weight.shape[1]),
        ("bias", bias is not None),
        ("dtype", _type_name(x)),
        ("num_drafts", requests.drafts),
        ("form", "plain"),
        ("activation", "silu" if silu else "none"),
    )
    return _find(ShortConvPlan, _core.ShortConvSpec, fields, x, requests).run(x, weight, state, bias=bias)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    requests: Requests,
    *,
    gate_kind: str,
    gate: Optional[Tensor] = None,
    beta: Optional[Tensor] = None,
    rates: Optional[Tensor] = None,
    gate_bias: Optional[Tensor] = None,
    skip: Optional[Tensor] = None,
    **fields: Hashable,
) -> Tensor:
    """The recurrence over q, k and v [num_tokens, heads, head_dim]; state [requests, value heads, ..] is read and written.

    gate_kind: RecurrentSpec.gate; fields: others of it.
    """
    if not len(q):
        return v.new_empty(v.shape)
    fields = dict(
        num_k_heads=q.shape[1],
        num_v_heads=v.shape[1],
        head_dim_k=q.shape[2],
        head_dim_v=v.shape[2],
        dtype=_type_name(q),
        state_dtype=_type_name(state),
        gate=gate_kind,
        skip=skip is not None,
        **fields,
    )
    plan = _find(RecurrentPlan, _core.RecurrentSpec, tuple(fields.items()), q, requests)
    return plan.run(q, k, v, state.unsqueeze(1), gate=gate, beta=beta, rates=rates, gate_bias=gate_bias, skip=skip)
