"""Plans behind calls that SGLang's backends make in each layer, which bring lengths and slots with them."""

import logging
from typing import Any, Dict, Optional, Tuple

import torch

from .. import _core
from .. import _engine_states as states
from .._plan_cache import SMALLEST, Kept, Limits, PlanCache
from ..engines import device_text, settings
from .drafts import DraftStep

Tensor = torch.Tensor

logger = logging.getLogger("imbrex.sglang")

_plans = PlanCache()
_announced = set()


class Plans:
    """Of one backend: they are found by what they are for, and updated for the step. On a GPU an update is a part of the call, which graphs of decoding hold."""

    def __init__(self, device: Any) -> None:
        self._device, self._settings = device_text(device), settings()
        self._of_decode: Dict[Tuple[type, states.Fields, Limits], Kept] = {}

    def updated(
        self,
        plan_class: Any,
        spec_class: Any,
        fields: states.Fields,
        starts: Tensor,
        slots: Tensor,
        num_tokens: int,
        stream: int,
        earlier: Optional[Tensor] = None,
        drafts: Optional[DraftStep] = None,
    ) -> Any:
        """A plan of requests that have earlier tokens, or only those of which `earlier` [num_reqs] says so; starts [num_reqs + 1] and slots are where the tensors are."""
        starts, slots = starts.to(torch.int32), slots[: len(starts) - 1].to(torch.int32).contiguous()
        if drafts is not None:
            fields = tuple({**dict(fields), **drafts.fields}.items())
        more = {} if drafts is None else drafts.arrays(starts, num_tokens)
        for_good = drafts is not None or len(slots) == num_tokens
        limits = Limits(len(slots), num_tokens, num_tokens + 1)
        kept = self._find(plan_class, spec_class, fields, limits, for_good, starts.device.type != "cpu", stream)
        lengths = starts.diff() + (1 if earlier is None else earlier[: len(slots)].to(torch.int32))
        if starts.device.type != "cpu":
            kept.plan.update_on_device(starts, lengths, slots, max_num_tokens=num_tokens, stream=stream, **more)
            return kept.plan
        batch = tuple(n for numbers in (starts, slots, lengths, *more.values()) for n in numbers.tolist())
        if kept.batch != batch:
            kept.batch = None
            kept.plan.update(starts, lengths, slots, **more)
            kept.batch = batch
        return kept.plan

    def _find(self, plan_class: Any, spec_class: Any, fields: states.Fields, needed: Limits, for_good: bool, on_device: bool, stream: int) -> Kept:
        """Plans of steps with a token a request, or with drafts, are kept for good, since graphs hold them: an update is a part of each graph."""

        def make(limits: Limits) -> Any:
            arguments = limits.arguments()
            del arguments["max_query_len"]
            return self._make(plan_class, spec_class, fields, on_device=on_device, **arguments)

        if not for_good:
            if stream and _core.capture_of(stream):
                raise NotImplementedError("imbrex: expected CUDA graphs of decoding alone, got one of prompts")
            return _plans.find((plan_class, fields, self._device, self._settings, stream), needed, make, stream)
        limits = SMALLEST.grown(needed)
        kept = self._of_decode.get((plan_class, fields, limits))
        if kept is None:
            kept = self._of_decode[plan_class, fields, limits] = Kept(make(limits), limits)
        return kept

    def _make(self, plan_class: Any, spec_class: Any, fields: states.Fields, **options: Any) -> Any:
        plan = states.make_plan(plan_class, spec_class, fields, self._device, self._settings, **options)
        if fields not in _announced:
            _announced.add(fields)
            states.announce(logger, states.LayerPlans(None, plan), "linear attention")
        return plan
