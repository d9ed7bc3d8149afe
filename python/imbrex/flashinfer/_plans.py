"""The plans behind a wrapper: one is made when a spec or larger limits are first needed, updated by plan(), and used by every run()."""
from collections import OrderedDict
from typing import Any, Dict, NamedTuple, Optional, Tuple

import torch

from .. import _core
from .._plan_cache import Limits
from ..plan import Plan

Key = Tuple[Tuple[str, Any], ...]  # fields of a spec, sorted
_SMALLEST = Limits(8, 64, 1024)


class Step(NamedTuple):
    """One batch, as Plan.update() takes it: starts and lengths int32 on the host, arrays all on the host or all on the device."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    arrays: Dict[str, torch.Tensor]
    query_len: int = 0  # what the plan is limited to: 1 for decode, 0 for anything

    @property
    def needs(self) -> Limits:
        longest = int(self.seq_lens.max()) if len(self.seq_lens) else 0
        return Limits(len(self.seq_lens), int(self.query_start_loc[-1]), longest, self.query_len)


class _Made:
    def __init__(self, plan: Plan, limits: Limits) -> None:
        self.plan, self.limits = plan, limits
        self._capture = 0  # the last one that it is part of

    @property
    def captured(self) -> bool:
        """Whether there is a graph that holds the plan."""
        return self._capture != 0 and self.plan.num_graphs > 0

    def capture(self, stream: int) -> None:
        """Makes the graph that the stream is captured into keep the plan, also when the wrapper is gone."""
        capture = _core.capture_of(stream)
        if capture not in (0, self._capture):
            self.plan.keep_for_capture(stream)
            self._capture = capture


def device_text(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ValueError(f"expected tensors on cpu or cuda, got {device}")
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


def stream_of(device: torch.device) -> int:
    """The address of the current stream; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Plans:
    """Plans of one wrapper, by spec.

    begin() takes a step and the fields of its spec. ready() gives the plan for these and for what a run() changes of them (sinks, say);
    what the runs of a step asked for is ready when the next one begins. With `graph` plans have fixed limits and stay: all of the same
    fields are updated by begin(), so that what is captured with them replays the new step. Without, a plan that a graph holds stays too,
    and a step beyond its limits is an error.
    """

    def __init__(self, device: torch.device, backend: str = "", graph: bool = False, kept: int = 4, on_demand: bool = True) -> None:
        """kept: how many plans are kept that no graph holds. on_demand: kernels are compiled when a step first needs them."""
        self.device, self.backend, self.graph, self.kept = device, backend, graph, kept
        self.on_demand = on_demand and not graph
        self.num_tokens = 0  # of the step
        self._step: Optional[Step] = None
        self._needs = Limits(0, 0, 0)
        self._fields: Dict[str, Any] = {}
        self._limits: Optional[Limits] = None
        self._made: "OrderedDict[Tuple[Key, int], _Made]" = OrderedDict()
        self._ready: Dict[Key, _Made] = {}  # for this step
        self._asked: Dict[Key, None] = {}  # changes that its runs asked for
        self._asked_before: "OrderedDict[Key, Dict[Key, None]]" = OrderedDict()  # the same of earlier steps, by their fields

    def begin(self, fields: Dict[str, Any], step: Step, limits: Optional[Limits] = None) -> None:
        """limits: those of every step, with `graph`."""
        if is_capturing(self.device):
            raise RuntimeError("imbrex.flashinfer: plan() is no part of a CUDA graph: call it before the capture, and before replays")
        base = _key(fields)
        expected = self._asked_before.pop(base, None) or {(): None}
        self._step, self._fields, self._limits = step, fields, limits
        self._needs = step.needs
        self.num_tokens = self._needs.num_tokens
        self._ready, self._asked = {}, dict(expected) if self.graph else {}
        self._asked_before[base] = self._asked
        if not self.graph and len(self._asked_before) > self.kept:
            self._asked_before.popitem(last=False)
        for changes in expected:
            self._ready[changes] = self._updated(dict(changes))

    def ready(self, **changes: Any) -> Plan:
        key = _key({name: value for name, value in changes.items() if self._fields.get(name) != value})
        made = self._ready.get(key)
        capturing = is_capturing(self.device)
        if made is None:
            if capturing:
                raise RuntimeError("imbrex.flashinfer: call run() with these arguments once before a CUDA graph captures it")
            made = self._ready[key] = self._updated(dict(key))
        self._asked[key] = None
        if capturing:
            made.capture(stream_of(self.device))
        return made.plan

    def _updated(self, changes: Dict[str, Any]) -> _Made:
        step, needs = self._step, self._needs
        if step is None:
            raise RuntimeError("imbrex.flashinfer: run() before plan()")
        fields = {**self._fields, **changes}
        key = (_key(fields), step.query_len)
        made = self._made.get(key)
        if made is None or (self._limits is None and not made.limits.hold(needs)):
            if made is not None and made.captured:
                raise RuntimeError(
                    f"imbrex.flashinfer: a CUDA graph holds a plan of {made.limits}, this batch needs {needs}: plan() the largest batch "
                    "before the capture, or use a wrapper with use_cuda_graph=True"
                )
            limits = self._limits or (_SMALLEST if made is None else made.limits).grown(needs)
            made = self._made[key] = _Made(self._make(fields, limits), limits)
        self._made.move_to_end(key)
        if not self.graph:
            idle = [k for k, m in self._made.items() if k != key and not m.captured and m not in self._ready.values()]
            for old in idle[: max(0, len(self._made) - self.kept)]:
                del self._made[old]
        made.plan.update(step.query_start_loc, step.seq_lens, **step.arrays, stream=stream_of(self.device))
        return made

    def _make(self, fields: Dict[str, Any], limits: Limits) -> Plan:
        return Plan(
            _core.AttentionSpec(**fields),
            device_text(self.device),
            backend=self.backend,
            load_on_demand=self.device.type == "cuda" and self.on_demand,
            ordered=True,
            **limits.arguments(),
        )


def _key(fields: Dict[str, Any]) -> Key:
    return tuple(sorted(fields.items()))
