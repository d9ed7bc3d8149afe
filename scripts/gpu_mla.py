#!/usr/bin/env python3
"""Times attention over latents (MLA, the absorbed form: keys of 576 dims, of which values are the first 512) beside FlashMLA and FA3, in one
process and in turn, and compares rows of the outputs with float64.

The peers are files of vLLM's wheels: --flashmla _flashmla_C.abi3.so, --fa3 _vllm_fa3_C.abi3.so. A cell is named heads x requests x context,
with /q for query tokens of each request, :p for the tokens of a page, r for ragged contexts and @form for caches that are not bf16:
"128x64x4096", "16x1x4096/2", "128x64x4096:1", "16x64x8192r@e4m3", "16x64x8192@ds_mla". Peers run with bf16 alone: beside other forms, with
the same numbers in bf16. Calls take turns at copies of the cache, so that L2 does not serve what a model's other layers would have
displaced; with --hot-pages there is one cache."""
from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import torch

import protocols
from native import Native, Plan

KEY_DIM, VALUE_DIM, PAGE = 576, 512, 64
SCALE = 192**-0.5  # of DeepSeek-V3
CELLS = [f"{h}x{b}x{n}" for h in (128, 64, 16) for b in (64, 128) for n in (4096, 16384)]
CELLS += [f"128x{b}x{n}/2" for b in (64, 128) for n in (4096, 16384)]
CELLS += [f"{h}x{b}x4096" for h in (128, 16) for b in (1, 8, 32)]


@dataclass(frozen=True)
class Form:
    """How the cache holds a key: of `kv` numbers, in `width` elements of `dtype`."""

    kv_format: str
    kv: str
    dtype: torch.dtype
    width: int

    def encoded(self, keys: torch.Tensor) -> torch.Tensor:
        """keys [.., 576] bf16."""
        if self.kv_format == "latent":
            return keys.to(self.dtype)
        records = torch.empty(*keys.shape[:-1], self.width, dtype=torch.uint8, device=keys.device)
        groups = keys[..., :VALUE_DIM].float().unflatten(-1, (4, 128))
        scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448)))
        records[..., :512] = (groups / scales).to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)
        records[..., 512:528] = scales.squeeze(-1).contiguous().view(torch.uint8)
        records[..., 528:] = keys[..., VALUE_DIM:].contiguous().view(torch.uint8)
        return records

    def decoded(self, stored: torch.Tensor) -> torch.Tensor:
        if self.kv_format == "latent":
            return stored.to(torch.bfloat16)
        latent = stored[..., :512].view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
        scales = stored[..., 512:528].contiguous().view(torch.float32).unsqueeze(-1)
        return torch.cat([(latent * scales).flatten(-2).bfloat16(), stored[..., 528:].contiguous().view(torch.bfloat16)], -1)


FORMS = {
    "bf16": Form("latent", "bf16", torch.bfloat16, KEY_DIM),
    "e4m3": Form("latent", "fp8_e4m3", torch.float8_e4m3fn, KEY_DIM),
    "ds_mla": Form("fp8_ds_mla", "fp8_e4m3", torch.uint8, 656),
}


@dataclass(frozen=True)
class Cell:
    heads: int
    batch: int
    context: int
    query: int = 1
    page: int = PAGE
    ragged: bool = False
    form: str = "bf16"

    @staticmethod
    def parse(text: str) -> Cell:
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:/(\d+))?(?::(\d+))?(r?)(?:@(\w+))?", text)
        if found is None or (found[7] or "bf16") not in FORMS:
            raise SystemExit(f'expected a cell such as "128x64x4096/2:64", got "{text}"')
        heads, batch, context, query, page, ragged, form = found.groups()
        return Cell(int(heads), int(batch), int(context), int(query or 1), int(page or PAGE), ragged == "r", form or "bf16")

    def __str__(self) -> str:
        return f"{self.heads}x{self.batch}x{self.context}/{self.query}:{self.page}" + ("r" if self.ragged else "") + (f"@{self.form}" if self.form != "bf16" else "")

    def lengths(self) -> list[int]:
        if not self.ragged:
            return [self.context] * self.batch
        draw = random.Random(7)
        return [draw.randint(max(self.query, self.context // 16), self.context) for _ in range(self.batch)]


class Problem:
    """The tensors of a cell. Pages lie in any order, and what no request owns is NaN."""

    def __init__(self, cell: Cell, hot_pages: int = 0, one_cache: bool = False):
        self.cell, self.lens, self.form = cell, cell.lengths(), FORMS[cell.form]
        draw = torch.Generator(device="cuda").manual_seed(11)
        pages = [(n + cell.page - 1) // cell.page for n in self.lens]
        total = sum(pages) + 3
        self.cache = torch.empty(total, cell.page, 1, KEY_DIM, dtype=torch.bfloat16, device="cuda")
        self.cache.normal_(generator=draw)
        order = torch.randperm(total - 3, generator=draw, device="cuda").int() + 3
        self.cache[:3] = float("nan")
        self.table = torch.zeros(cell.batch, max(pages), dtype=torch.int32, device="cuda")
        if hot_pages:
            order = order[torch.arange(len(order), device="cuda") % hot_pages]
        begin = 0
        for i, n in enumerate(pages):
            self.table[i, :n] = order[begin : begin + n]
            begin += n
            if self.lens[i] % cell.page:
                self.cache[int(self.table[i, n - 1]), self.lens[i] % cell.page :] = float("nan")
        self.stored = self.cache
        if cell.form != "bf16":  # the peers' cache has the numbers that the records have
            self.stored = self.form.encoded(self.cache)
            self.cache = self.form.decoded(self.stored)
        bytes_read = self.form.width * self.form.dtype.itemsize * sum(self.lens)
        copies = 1 if hot_pages or one_cache else min(8 if bytes_read > 64e6 else 64, int(600e6 / bytes_read) + 1)
        self.caches = [self.cache] + [self.cache.clone() for _ in range(copies - 1)]
        self.all_stored = self.caches if self.stored is self.cache else [self.stored] + [self.stored.clone() for _ in range(copies - 1)]
        tokens = cell.batch * cell.query
        self.q = torch.randn(tokens, cell.heads, KEY_DIM, generator=draw, device="cuda").bfloat16()
        self.out = torch.full((tokens, cell.heads, VALUE_DIM), float("nan"), dtype=torch.bfloat16, device="cuda")
        self.lens_on_device = torch.tensor(self.lens, dtype=torch.int32, device="cuda")

    def flops(self) -> float:
        return 2.0 * self.cell.heads * (KEY_DIM + VALUE_DIM) * sum(self.lens) * self.cell.query

    def bytes(self) -> float:
        return self.form.width * self.form.dtype.itemsize * sum(self.lens) + 2.0 * self.q.numel() + 2.0 * self.out.numel()

    def worst_error(self, out: torch.Tensor, samples: int = 6) -> float:
        """The greatest difference from float64 over some rows, relative to the greatest output of the row."""
        draw, worst, cell = random.Random(5), 0.0, self.cell
        for _ in range(samples):
            r, i, h = draw.randrange(cell.batch), draw.randrange(cell.query), draw.randrange(cell.heads)
            seen = self.lens[r] - cell.query + i + 1
            blocks = self.table[r, : (seen + cell.page - 1) // cell.page].long()
            keys = self.cache[blocks].view(-1, KEY_DIM)[:seen].double()
            weights = torch.softmax(keys @ self.q[r * cell.query + i, h].double() * SCALE, 0)
            expected = weights @ keys[:, :VALUE_DIM]
            error = (out[r * cell.query + i, h].double() - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(error)) if torch.isfinite(error) else float("inf")
        return worst


def imbrex_call(native: Native, problem: Problem, balanced: bool, longest: int, keep: list, no_others: bool = False) -> list[protocols.Call]:
    """A call for each copy of the cache, as the peers' functions return them."""
    cell = problem.cell
    spec = {"q_heads": cell.heads, "kv_heads": 1, "head_dim": KEY_DIM, "head_dim_v": VALUE_DIM, "kv_format": problem.form.kv_format, "scale": SCALE,
            "q": "bf16", "kv": problem.form.kv, "page": cell.page, "causal": True}  # fmt: skip
    tokens = cell.batch * cell.query
    limits = {"requests": cell.batch, "tokens": tokens, "seq_len": max(longest, cell.context), "query_len": cell.query}
    if no_others:
        limits["min_query_len"] = cell.query
    plan = Plan(native, "cuda:0", "auto", spec, limits, balanced)
    keep.append(plan)
    stream = torch.cuda.current_stream().cuda_stream
    starts = [i * cell.query for i in range(cell.batch + 1)]
    plan.update(starts, problem.lens, problem.table.data_ptr(), problem.table.shape[1], stream)

    def of_cache(cache: torch.Tensor) -> protocols.Call:
        fixed = (problem.q.data_ptr(), cache.data_ptr(), 0, cache.shape[0], cache.stride(0), problem.out.data_ptr())
        return lambda: plan.run(*fixed, torch.cuda.current_stream().cuda_stream)

    return [of_cache(cache) for cache in problem.all_stored]


def flashmla_call(problem: Problem) -> list[protocols.Call]:
    cell = problem.cell
    q = problem.q.view(cell.batch, cell.query, cell.heads, KEY_DIM)
    decode = torch.ops._flashmla_C.dense_decode_fwd
    more = [None] * (len(decode.default._schema.arguments) - 9)  # newer versions may be given tensors for the outputs
    fixed = (VALUE_DIM, problem.lens_on_device, problem.table, SCALE, True)
    made = decode(q, problem.cache, *fixed, None, None, *more)[2:4]  # the schedule, which depends on the lengths alone
    return [lambda cache=cache: decode(q, cache, *fixed, *made, *more)[0] for cache in problem.caches]


def fa3_call(problem: Problem) -> list[protocols.Call]:
    cell = problem.cell
    starts = torch.arange(cell.batch + 1, dtype=torch.int32, device="cuda") * cell.query
    longest = max(problem.lens)
    q, qv = problem.q[..., VALUE_DIM:], problem.q[..., :VALUE_DIM]
    plan = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        cell.batch, cell.query, longest, cell.heads, 1, KEY_DIM - VALUE_DIM, VALUE_DIM, q.dtype, problem.lens_on_device, starts,
        None, None, None, None, cell.page, 0, True, -1, -1, False, 0, None, 0)  # fmt: skip
    out = torch.empty_like(problem.out)
    return [lambda cache=cache: torch.ops._vllm_fa3_C.fwd(
        q, cache[..., VALUE_DIM:], cache[..., :VALUE_DIM], None, None, qv, out, starts, None, None, None, problem.lens_on_device, cell.query, longest, problem.table, None, None,
        None, None, None, None, None, None, SCALE, True, -1, -1, 0.0, True, plan, 0, None, 0, None, 1, 0, None)[0] for cache in problem.caches]  # fmt: skip


def measure(native: Native, cell: Cell, args: argparse.Namespace) -> str:
    problem, keep = Problem(cell, args.hot_pages), []
    calls = {"imbrex": imbrex_call(native, problem, False, args.longest, keep, args.no_other_queries)}
    if args.balanced:
        calls["balanced"] = imbrex_call(native, problem, True, args.longest, keep, args.no_other_queries)
    peers = []
    if args.flashmla and cell.page == PAGE:
        peers.append(("FlashMLA", flashmla_call))
    if args.fa3:
        peers.append(("FA3", fa3_call))
    errors = []
    for name, make in peers:
        try:
            calls[name] = make(problem)
            error = problem.worst_error(calls[name][0]().view_as(problem.out))
            if error > args.tolerance:
                errors.append(f"{name} WRONG {error:.3g}")
        except (RuntimeError, AttributeError) as problem_of_peer:
            calls.pop(name, None)
            errors.append(f"{name}: {str(problem_of_peer).splitlines()[0][:80]}")
    for name in [n for n in ("imbrex", "balanced") if n in calls]:
        problem.out.fill_(float("nan"))
        calls[name][0]()
        torch.cuda.synchronize()
        error = problem.worst_error(problem.out)
        if not error <= args.tolerance:
            errors.append(f"{name} WRONG {error:.3g}")
    if args.graph:
        times = {name: statistics.median(protocols.Graph(turns).replays(args.ms)) * 1e3 for name, turns in calls.items()}
    else:
        times = protocols.sustained({name: protocols.in_turn(turns) for name, turns in calls.items()}, args.ms, args.rounds)
    best = min([us for name, us in times.items() if name not in ("imbrex", "balanced")], default=float("nan"))
    ours = times["imbrex"]
    for plan in keep:
        plan.close()
    row = f"{str(cell):22} {ours:9.1f} us {problem.flops() / ours / 1e6:6.0f} TFLOP/s {problem.bytes() / ours / 1e6:5.2f} TB/s  {best / ours:5.2f}x"
    return row + "".join(f"  {name} {us:.1f}" for name, us in times.items() if name != "imbrex") + "".join(f"  {e}" for e in errors)


def moved(native: Native, cells: list[Cell], args: argparse.Namespace) -> str:
    """Whether any cell's result moves a bit where all of them run at a time: each on a stream of its own, and replays of its graph on another
    stream between its calls, into an output of their own."""
    problems, keep = [Problem(cell, one_cache=True) for cell in cells], []
    calls = [imbrex_call(native, problem, False, args.longest, keep)[0] for problem in problems]
    lone = []
    for problem, call in zip(problems, calls):
        call()
        torch.cuda.synchronize()
        lone.append(problem.out.clone())
    replayed = [torch.empty_like(out) for out in lone]
    replays = []
    for problem, out in zip(problems, replayed):
        eager, problem.out = problem.out, out
        graph = torch.cuda.CUDAGraph()
        call = imbrex_call(native, problem, False, args.longest, keep)[0]
        call()
        with torch.cuda.graph(graph):
            call()
        replays.append(graph)
        problem.out = eager
    streams = [(torch.cuda.Stream(), torch.cuda.Stream()) for _ in cells]
    wrong = [0] * len(cells)
    for _ in range(args.beside):
        for problem, out in zip(problems, replayed):
            problem.out.fill_(float("nan"))
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for _ in range(3):
            for i, (first, second) in enumerate(streams):
                with torch.cuda.stream(first):
                    calls[i]()
                with torch.cuda.stream(second):
                    replays[i].replay()
        torch.cuda.synchronize()
        for i, problem in enumerate(problems):
            wrong[i] += sum(not torch.equal(lone[i], out) for out in (problem.out, replayed[i]))
    for plan in keep:
        plan.close()
    return ", ".join(f"{cell}: {n} of {2 * args.beside} differ" for cell, n in zip(cells, wrong))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--library", type=Path, default=ROOT / "build" / "libimbrex_bench.so")
    parser.add_argument("--flashmla", type=Path)
    parser.add_argument("--fa3", type=Path)
    parser.add_argument("--balanced", action="store_true", help="also with cuts that follow the load")
    parser.add_argument("--graph", action="store_true", help="calls in a CUDA graph instead of back to back")
    parser.add_argument("--no-other-queries", action="store_true", help="plans are for requests of the cell's number of query tokens alone")
    parser.add_argument("--ms", type=float, default=40, help="milliseconds of a turn")
    parser.add_argument("--hot-pages", type=int, default=0, help="all requests share so many pages, which L2 holds: the pace of products")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=int, default=131072, help="tokens of a request that plans are made for")
    parser.add_argument("--beside", type=int, metavar="ROUNDS", help="times nothing: runs all cells at a time, on streams and in graphs, and compares with lone calls")
    parser.add_argument("--tolerance", type=float, default=0.02)
    args = parser.parse_args()
    for library in (args.flashmla, args.fa3):
        if library:
            torch.ops.load_library(str(library))
    native = Native(args.library)
    print(f"{torch.cuda.get_device_name()}: best peer / imbrex", flush=True)
    if args.beside:
        print(moved(native, [Cell.parse(text) for text in args.cells], args))
        return
    for text in args.cells:
        print(measure(native, Cell.parse(text), args), flush=True)


if __name__ == "__main__":
    main()
