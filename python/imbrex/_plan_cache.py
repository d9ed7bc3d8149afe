"""A cache of the plans behind functions that take no plan, keyed by spec, device and limits. No framework is imported here.

A plan serves one thread, one batch and one stream at a time, so
* every thread has a cache of its own, which goes with the thread;
* plans of a cache are made with ordered=True: a stream that uses one waits for its last use on another;
* a plan that a CUDA graph captures leaves the cache. It belongs to the graph, whose replays write to it, and goes with the graph.
"""
import threading
from collections import OrderedDict
from typing import Any, Callable, Dict, Hashable, List, NamedTuple, Tuple

from . import _core
from .plan import Plan

_MOST_PLANS = 64  # of a thread
_MOST_NAMES = 4096
_MOST_RECIPES = 256  # of a thread
_LARGEST = 2**31 - 1


class Limits(NamedTuple):
    """Bounds of a plan's batches. query_len 0 is no limit of its own."""

    num_reqs: int
    num_tokens: int
    seq_len: int
    query_len: int = 0

    def hold(self, needed: "Limits") -> bool:
        return (
            self.num_reqs >= needed.num_reqs
            and self.num_tokens >= needed.num_tokens
            and self.seq_len >= needed.seq_len
            and (self.query_len == 0 or 0 < needed.query_len <= self.query_len)
        )

    def grown(self, needed: "Limits") -> "Limits":
        """Powers of two that hold both, so that few plans serve many batches."""
        sizes = [max(a, min(1 << max(0, b - 1).bit_length(), _LARGEST)) for a, b in zip(self[:3], needed[:3])]
        return Limits(*sizes, needed.query_len)

    def arguments(self) -> Dict[str, int]:
        """The arguments of Plan(), which takes no limit below 1."""
        at_least_one = {f"max_{name}": max(value, 1) for name, value in zip(self._fields[:3], self)}
        return dict(at_least_one, max_query_len=self.query_len)


SMALLEST = Limits(1, 1, 1)


class Kept:
    """A plan, its limits, and a name of the batch that it was last updated with, where the same batch may come again."""

    __slots__ = ("plan", "limits", "batch")

    def __init__(self, plan: Plan, limits: Limits) -> None:
        self.plan, self.limits, self.batch = plan, limits, None


# Keys of the plans that were made in this process, whose kernels are compiled. All threads share it, under Python's lock.
_made: "OrderedDict[Hashable, None]" = OrderedDict()


class PlanCache(threading.local):
    """The plans of the calling thread."""

    def __init__(self, smallest: Limits = SMALLEST, most: int = _MOST_PLANS) -> None:
        self._smallest, self._most = smallest, most
        self._kept: "OrderedDict[Hashable, List[Kept]]" = OrderedDict()
        self._count = 0
        self._capture = 0  # the last one that this thread made calls of
        self._captured: Dict[Tuple[Hashable, int], Kept] = {}  # its plans, by stream: branches of a graph run beside each other
        self._recipes: Dict[Hashable, Any] = {}

    def find(self, key: Hashable, needed: Limits, make: Callable[[Limits], Plan], stream: int = 0) -> Kept:
        """Returns a plan whose limits hold a batch. key: names the spec and the device; make: makes a plan, with ordered=True; stream: an address, 0 on CPUs."""
        capture = _core.capture_of(stream) if stream else 0
        if capture:
            return self._find_captured(capture, key, needed, make, stream)
        self.leave_captures(stream)
        plans = self._kept.get(key, ())
        for kept in plans:
            if kept.limits.hold(needed):
                break
        else:
            kept = self._make(key, self._smallest.grown(needed), make)
            self._put(key, kept)
        self._kept.move_to_end(key)
        return kept

    def _make(self, key: Hashable, limits: Limits, make: Callable[[Limits], Plan]) -> Kept:
        kept = Kept(make(limits), limits)
        _made[key] = None
        _made.move_to_end(key)
        if len(_made) > _MOST_NAMES:
            _made.popitem(last=False)
        return kept

    def _put(self, key: Hashable, kept: Kept) -> None:
        """Keeps a new plan in place of those whose limits are within its own. When there are too many, the least recently used are freed."""
        plans = [other for other in self._kept.get(key, ()) if not kept.limits.hold(other.limits)]
        self._count += 1 + len(plans) - len(self._kept.get(key, ()))
        self._kept[key] = [kept, *plans]
        self._recipes.clear()
        self._kept.move_to_end(key)
        while self._count > self._most and len(self._kept) > 1:
            self._count -= len(self._kept.popitem(last=False)[1])
        self._count -= len(self._kept[key][self._most :])
        del self._kept[key][self._most :]

    def _find_captured(self, capture: int, key: Hashable, needed: Limits, make: Callable[[Limits], Plan], stream: int) -> Kept:
        """Of a graph: the calls of a stream come one after the other, so that they share a plan. It has the limits of the batch, not of what
        came before: a replay launches for its limits."""
        if capture != self._capture:
            self._capture, self._captured = capture, {}
        kept = self._captured.get((key, stream))
        if kept is None or not kept.limits.hold(needed):
            limits = self._smallest.grown(needed)
            plans = self._kept.get(key, [])
            kept = next((plan for plan in plans if plan.limits == limits), None)
            if kept is not None:
                plans.remove(kept)
                self._count -= 1
                self._recipes.clear()
            elif key not in _made:
                raise RuntimeError("imbrex: call the function once like this before a CUDA graph captures it: its kernels are compiled then")
            else:
                kept = self._make(key, limits, make)
            kept.batch = None
            kept.plan.keep_for_capture(stream)
            self._captured[key, stream] = kept
        return kept

    def leave_captures(self, stream: int) -> None:
        """Called outside of a capture: the plans of the graph that this thread captured last are no longer found for other calls."""
        if self._captured:
            self._captured = {}  # that graph alone keeps them
        if stream:
            _core.release_captured()

    def recall(self, call: Hashable) -> Any:
        """Returns what remember() was given for a call, or None. Not to be called in a capture; call leave_captures() first."""
        return self._recipes.get(call)

    def remember(self, call: Hashable, recipe: Any) -> None:
        """Remembers how to repeat a call with a plan of this cache, until plans are freed, which it would keep alive."""
        if len(self._recipes) >= _MOST_RECIPES:
            self._recipes.clear()
        self._recipes[call] = recipe

    def kept(self) -> List[Kept]:
        """The plans of the cache, without those of graphs."""
        return [kept for plans in self._kept.values() for kept in plans]
