#!/usr/bin/env python3
"""Times steps in graphs of plans for several kinds of requests, whose graphs have a launch for each kind, and compares what graphs compute with
calls outside of them, bit by bit: queries and outputs of all calls in a graph lie in the same two tensors, which copies fill and empty.

A step is named after its requests, requests x keys / query tokens, joined by "+": "8x4096", "16x4096/4", "8x4096+1x2048/256"; it has
SLOTS requests at most. Plans are for SLOTS requests of up to --longest keys. With several libraries (--object, again and again) they take
turns, and the table has a column for each."""
from __future__ import annotations

import argparse
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import torch  # noqa: E402

import protocols  # noqa: E402
from native import OBJECT, Native, Plan  # noqa: E402

DIM, PAGE, SLOTS, QUERIES = 128, 16, 16, 3
CHECKED_CALLS, TIMED_CALLS = 12, 40
STEPS = [
    "1x1024",
    "1x8000",
    "8x4096",
    "16x4096",
    "1x4096/4",
    "16x4096/4",
    "1x4096/512",
    "8x4096+1x2048/256",
    "8x4096/4+1x2048/256",
    "8x4096+8x4096/4",
]


def requests_of(step: str) -> list[tuple[int, int]]:
    """Query tokens and keys of each request."""
    requests = []
    for part in step.split("+"):
        found = re.fullmatch(r"(\d+)x(\d+)(?:/(\d+))?", part)
        if found is None:
            raise SystemExit(f'expected a step such as "8x4096+1x2048/256", got "{step}"')
        requests += [(int(found[3] or 1), int(found[2]))] * int(found[1])
    if len(requests) > SLOTS:
        raise SystemExit(f"expected {SLOTS} requests at most, got {len(requests)} in {step}")
    return requests


class Layer:
    """The tensors of a layer, and the plan and graphs of one library for it."""

    def __init__(self, native: Native, heads: tuple[int, int], query_len: int, longest: int):
        draw = torch.Generator(device="cuda").manual_seed(3)
        random = lambda *sizes: torch.randn(*sizes, device="cuda", generator=draw).bfloat16()  # noqa: E731
        columns = (longest + PAGE - 1) // PAGE
        self.k, self.v = (random(SLOTS * columns + 8, PAGE, heads[1], DIM) for _ in range(2))
        self.table = torch.randperm(len(self.k), device="cuda", generator=draw).int()[: SLOTS * columns].view(SLOTS, columns).contiguous()
        self.tokens = SLOTS * max(query_len // 8, min(query_len, 8))
        self.queries = [random(self.tokens, heads[0], DIM) for _ in range(QUERIES)]
        self.q, self.out = self.queries[0].clone(), torch.zeros_like(self.queries[0])
        self.outs = [torch.zeros_like(self.out) for _ in range(CHECKED_CALLS)]
        spec = {
            "q_heads": heads[0],
            "kv_heads": heads[1],
            "head_dim": DIM,
            "head_dim_v": DIM,
            "q": "bf16",
            "kv": "bf16",
            "page": PAGE,
            "causal": True,
        }
        limits = {"requests": SLOTS, "tokens": self.tokens, "seq_len": longest, "query_len": query_len}
        self.plan = Plan(native, "cuda:0", "auto", spec, limits)
        self.update([(self.tokens // SLOTS, longest)] * SLOTS)  # a captured call has rows for all tokens
        self.run()
        torch.cuda.synchronize()
        self.checked, self.timed = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.checked):
            for i in range(CHECKED_CALLS):
                self.q.copy_(self.queries[i % QUERIES])
                self.run()
                self.outs[i].copy_(self.out)
        with torch.cuda.graph(self.timed):
            for _ in range(TIMED_CALLS):
                self.run()

    def run(self) -> None:
        addresses = (self.q.data_ptr(), self.k.data_ptr(), self.v.data_ptr(), self.k.shape[0], self.k.stride(0), self.out.data_ptr())
        self.plan.run(*addresses, torch.cuda.current_stream().cuda_stream)

    def update(self, requests: list[tuple[int, int]]) -> None:
        starts = [0]
        for query_len, _ in requests:
            starts.append(starts[-1] + query_len)
        lens = [keys for _, keys in requests]
        self.plan.update(starts, lens, self.table.data_ptr(), self.table.shape[1], torch.cuda.current_stream().cuda_stream)

    def takes(self, requests: list[tuple[int, int]], query_len: int, longest: int) -> bool:
        fit = all(asked <= query_len and keys <= longest for asked, keys in requests)
        return fit and sum(asked for asked, _ in requests) <= self.tokens

    def differing(self, requests: list[tuple[int, int]], rounds: int = 5) -> int:
        """Calls in replays that do not have the bits of a call outside."""
        self.update(requests)
        rows, expected, wrong = sum(asked for asked, _ in requests), [], 0
        for q in self.queries:
            self.q.copy_(q)
            self.out.fill_(float("nan"))
            self.run()
            expected.append(self.out[:rows].clone())
        for _ in range(rounds):
            for out in self.outs:
                out.fill_(float("nan"))
            self.checked.replay()
            self.checked.replay()
            torch.cuda.synchronize()
            wrong += sum(not torch.equal(out[:rows], expected[i % QUERIES]) for i, out in enumerate(self.outs))
        return wrong

    def microseconds(self, replays: int) -> list[float]:
        """Of a call, in each replay."""
        times = []
        for _ in range(replays):
            begin, end = protocols.pair()
            begin.record()
            self.timed.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / TIMED_CALLS * 1e3)
        return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=STEPS)
    parser.add_argument("--object", type=Path, action="append", help=f"a library to load (default: build/{OBJECT})")
    parser.add_argument("--heads", default="32/8,16/2,8/1", help="q heads / kv heads of the layers (default: %(default)s)")
    parser.add_argument("--query-lens", default="4,512", help="query tokens of a request that plans allow (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=8192, help="keys of a request that plans allow (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    natives = [Native(path) for path in args.object or [ROOT / "build" / OBJECT]]
    all_wrong = 0
    for query_len in map(int, args.query_lens.split(",")):
        for text in args.heads.split(","):
            q_heads, kv_heads = map(int, text.split("/"))
            layers = [Layer(native, (q_heads, kv_heads), query_len, args.longest) for native in natives]
            for step in args.steps:
                requests = requests_of(step)
                if not layers[0].takes(requests, query_len, args.longest):
                    continue
                wrong = [layer.differing(requests) for layer in layers]
                times: list[list[float]] = [[] for _ in layers]
                for _ in range(args.rounds):
                    for layer, of_layer in zip(layers, times):
                        of_layer += layer.microseconds(5)
                row = " ".join(f"{statistics.median(of_layer):8.1f}" for of_layer in times)
                print(
                    f"{text:6} {query_len:5} {step:22} {row} us, of {5 * CHECKED_CALLS} calls {', '.join(map(str, wrong))} differ",
                    flush=True,
                )
                all_wrong += sum(wrong)
            for layer in layers:
                layer.plan.close()
    sys.exit(all_wrong > 0)


if __name__ == "__main__":
    main()
