"""How a call is timed on the GPU: back to back under the power cap, inside a CUDA graph, or as a graph of its own."""
from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

Call = Callable[[], object]
NOTHING: dict[str, Call] = {}


def idle() -> None:
    pass


def pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def estimate(call: Call) -> float:
    """Milliseconds of one call."""
    begin, end = pair()
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return max(begin.elapsed_time(end), 5e-3)


def in_turn(calls: list[Call]) -> Call:
    """Each call is the next one of `calls`."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def back_to_back(call: Call, target_ms: float) -> list[float]:
    """Milliseconds of each of n calls, so many that they take target_ms; the clock has settled before the first that counts."""
    call(), call()
    n = int(min(max(target_ms / estimate(call), 5), 200))
    for _ in range(max(2, n // 5)):
        call()
    events = [pair() for _ in range(n)]
    for begin, end in events:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def sustained(calls: dict[str, Call], target_ms: float, rounds: int) -> dict[str, float]:
    """Microseconds of a call: the median over rounds in which each library has its turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name] += back_to_back(call, target_ms)
    return {name: statistics.median(ms) * 1e3 for name, ms in times.items()}


class Graph:
    """Calls captured one behind the other, rotating over `calls`, 20 ms of them at most and no more than 50 (or each once); replayed once,
    after `before`. The last call of a replay is the last of `calls`."""

    def __init__(self, calls: list[Call], before: Call = idle, count: int = 0):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls[:2]:
                call()
        torch.cuda.synchronize()
        self.call_ms = estimate(calls[0])
        self.count = count or max(int(min(max(20 / self.call_ms, len(calls)), 50)) // len(calls), 1) * len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=side):
            for i in range(self.count):
                calls[i % len(calls)]()
        before()
        self.graph.replay()
        torch.cuda.synchronize()

    def replays(self, target_ms: float) -> list[float]:
        """Milliseconds of a call in each replay."""
        times = []
        for _ in range(int(min(max(target_ms / (self.call_ms * self.count), 3), 20))):
            begin, end = pair()
            begin.record()
            self.graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / self.count)
        return times


def in_graph(calls: dict[str, list[Call]], target_ms: float, rounds: int, before: dict[str, Call] = NOTHING) -> dict[str, float]:
    """Microseconds of a call; every name has calls that differ in their keys alone."""
    graphs = {name: Graph(rotating, before.get(name, idle)) for name, rotating in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name] += graph.replays(target_ms / rounds)
    return {name: statistics.median(ms) * 1e3 for name, ms in times.items()}


def replayed(calls: dict[str, list[Call]], before: dict[str, Call] = NOTHING, count: int = 300) -> dict[str, float]:
    """Microseconds of a call that is a graph by itself, by the host's clock over `count` replays back to back."""
    result = {}
    for name, rotating in calls.items():
        graph = Graph(rotating, before.get(name, idle), count=1).graph
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        result[name] = (time.perf_counter() - begin) / count * 1e6
    return result
