#!/usr/bin/env python3
"""Masks and scores as expressions beside PyTorch's flex_attention under torch.compile, in one process and in turn: prompts of one length each.

A cell is named requests x tokens: "4x4096". Of flex_attention several tiles are tried, and the best of them counts; with --tuned also what torch.compile
finds itself ("max-autotune"). It has q, k and v as [batch, heads, tokens, dims], imbrex as [tokens, heads, dims], each contiguous. Block masks and
update() are not in the times of calls; they are made once, and how long that takes the second time is printed beside. Every output is compared
with float64: of some heads, all rows or as many as --rows. Needs PyTorch and the object `libimbrex_bench.so` of a build. Exit code 1 when an output is wrong."""
from __future__ import annotations

import argparse
import math
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import protocols
from gpu_bench import find_compiler
from native import OBJECT, Native, NativeError, Plan

CELLS = ["4x4096", "2x16384", "8x1024"]
WINDOW, DOCUMENT, PREFIX, CAP = 1024, 700, 500, 30.0
WINDOWED = {"causal": True, "window": WINDOW}  # a spec's own words for windowed()
BIAS = "float bias[,]; score + bias[head, kv]"
TILES: dict[str, dict | None] = {
    "default": None,
    "128x128": {"BLOCK_M": 128, "BLOCK_N": 128, "num_stages": 2, "num_warps": 8},
    "128x64": {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3, "num_warps": 8},
    "64x128": {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 3, "num_warps": 4},
}
TORCH_TYPES = {torch.int32: "i32", torch.float32: "f32"}


@dataclass(frozen=True)
class Shape:
    """Of a layer."""

    q_heads: int
    kv_heads: int
    dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)x([1-9]\d*)", text)
        if not found or int(found[1]) % int(found[2]) != 0:
            raise argparse.ArgumentTypeError(f"expected q heads that are a multiple of the kv heads, like 32/8x128, got {text}")
        return cls(*map(int, found.groups()))

    def __str__(self) -> str:
        return f"{self.q_heads}/{self.kv_heads}x{self.dim}"


@dataclass
class Variant:
    """A mask and a score, as texts for imbrex and as functions for PyTorch."""

    mask_text: str
    mask: Callable
    score_text: str = ""
    score: Callable | None = None
    twin: dict | None = None  # fields of a spec that says the same without expressions
    mask_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    score_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    per_request: bool = False
    fields: dict = field(default_factory=dict)  # of the spec beside the texts

    def spec(self) -> dict:
        texts = {"mask_mod": self.mask_text, "score_mod": self.score_text}
        return {"causal": False, **{name: text for name, text in texts.items() if text}, **self.fields}


def causal(b, h, i, j):
    return i >= j


def windowed(b, h, i, j):
    return (i >= j) & (i - j < WINDOW)


def variants(batch: int, length: int, device: str, q_heads: int) -> dict[str, Variant]:
    numbers = torch.arange(length, device=device, dtype=torch.int32)
    # Documents end at other tokens in each request.
    docs = torch.stack([(numbers + 97 * r) // DOCUMENT for r in range(batch)]).contiguous()
    prefix = torch.tensor([min(PREFIX + 13 * r, length) for r in range(batch)], device=device, dtype=torch.int32)
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / q_heads) for h in range(q_heads)], device=device)
    bias = torch.randn(q_heads, length, generator=torch.Generator(device=device).manual_seed(7), device=device)
    add_bias = lambda s, b, h, i, j: s + bias[h, j]
    in_documents = dict(mask_tensors={"doc": docs}, per_request=True)
    document_mask = lambda b, h, i, j: (docs[b, i] == docs[b, j]) & (i >= j)
    document_text = "int doc[,]; doc[batch, q] == doc[batch, kv] & kv <= q"
    return {
        "causal": Variant("kv <= q", causal, twin={"causal": True}),
        "window": Variant(f"kv <= q & q - kv < {WINDOW}", windowed, twin=WINDOWED),
        "documents": Variant(document_text, document_mask, **in_documents),
        "prefix": Variant(
            "int prefix[]; kv < prefix[batch] | kv <= q", lambda b, h, i, j: (j < prefix[b]) | (i >= j), mask_tensors={"prefix": prefix}, per_request=True
        ),
        "soft cap": Variant(
            "kv <= q",
            causal,
            f"{CAP} * tanh(score / {CAP})",
            lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
            twin={"causal": True, "soft_cap": CAP},
        ),
        "ALiBi": Variant(
            "kv <= q", causal, "float slope[]; score + slope[head] * (kv - q)", lambda s, b, h, i, j: s + slopes[h] * (j - i), score_tensors={"slope": slopes}
        ),
        "bias": Variant("kv <= q", causal, BIAS, add_bias, score_tensors={"bias": bias}),
        "bias in documents": Variant(document_text, document_mask, BIAS, add_bias, score_tensors={"bias": bias}, **in_documents),
        "windowed bias": Variant("", windowed, BIAS, add_bias, score_tensors={"bias": bias}, fields=WINDOWED),
    }


class Problem:
    """The tensors of a cell: PyTorch's [batch, heads, tokens, dims], and the same numbers as [tokens, heads, dims]."""

    def __init__(self, batch: int, length: int, shape: Shape, device: str):
        self.batch, self.length, self.shape, self.device = batch, length, shape, device
        draw = torch.Generator(device=device).manual_seed(11)
        make = lambda heads: torch.randn(batch, heads, length, shape.dim, generator=draw, device=device).bfloat16()
        self.q, self.k, self.v = make(shape.q_heads), make(shape.kv_heads), make(shape.kv_heads)
        self.rows = [x.transpose(1, 2).reshape(batch * length, -1, shape.dim).contiguous() for x in (self.q, self.k, self.v)]
        self.out = torch.full_like(self.rows[0], float("nan"))

    def as_batch(self, out: torch.Tensor) -> torch.Tensor:
        return out.view(self.batch, self.length, self.shape.q_heads, self.shape.dim).transpose(1, 2)

    def worst_error(self, variant: Variant, out: torch.Tensor, heads: int, rows: int) -> float:
        """The greatest difference from float64 over all requests and some heads of each, relative to the greatest output of its row.
        out: [batch, heads, tokens, dims]."""
        chosen, worst = random.Random(5), 0.0
        group = self.shape.q_heads // self.shape.kv_heads
        keys = torch.arange(self.length, device=self.device)
        for b in range(self.batch):
            for h in chosen.sample(range(self.shape.q_heads), min(heads, self.shape.q_heads)):
                some = range(self.length) if rows >= self.length else sorted(chosen.sample(range(self.length), rows))
                at = torch.tensor(list(some), device=self.device)
                logits = self.q[b, h, at].double() @ self.k[b, h // group].double().T / math.sqrt(self.shape.dim)
                place = (torch.tensor(b, device=self.device), torch.tensor(h, device=self.device), at[:, None], keys[None])
                if variant.score is not None:
                    logits = variant.score(logits, *place)
                weights = torch.softmax(logits.masked_fill(~variant.mask(*place), -math.inf), -1)
                expected = weights @ self.v[b, h // group].double()
                error = (out[b, h, at].double() - expected).abs().amax(-1) / expected.abs().amax(-1)
                worst = max(worst, float(error.max())) if torch.isfinite(error).all() else math.inf
        return worst


class Clock:
    """Times of calls in turn: on a GPU of protocols.py, on a CPU by the host's clock."""

    def __init__(self, device: str, ms: float, rounds: int):
        self.on_gpu, self.ms, self.rounds = device != "cpu", ms, rounds

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.on_gpu else 0

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def sustained(self, calls: dict[str, protocols.Call]) -> dict[str, float]:
        """Microseconds of a call."""
        if self.on_gpu:
            return protocols.sustained(calls, self.ms, self.rounds)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, call in calls.items():
                times[name].append(self.once(call))
        return {name: statistics.median(each) for name, each in times.items()}

    def once(self, call: protocols.Call) -> float:
        """Microseconds of one call by the host's clock, until the device has done it."""
        self.wait()
        begin = time.perf_counter()
        call()
        self.wait()
        return (time.perf_counter() - begin) * 1e6


class Imbrex:
    def __init__(self, native: Native, problem: Problem, variant: Variant, backend: str, page: int, spec: dict, clock: Clock):
        shape = problem.shape
        full = {"q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "head_dim": shape.dim, "q": "bf16", "kv": "bf16", "page": page, **spec}
        b, n = problem.batch, problem.length
        limits = {"requests": b, "tokens": b * n, "seq_len": n, "query_len": n}
        self.plan = Plan(native, "cpu" if problem.device == "cpu" else "cuda:0", backend, full, limits)
        self.problem, self.page, self.clock = problem, page, clock
        self.kept = [x.contiguous() for x in variant.score_tensors.values()] if "score_mod" in spec else []
        for name, x in zip(variant.score_tensors, self.kept):
            self.plan.add_tensor(False, name, x.data_ptr(), TORCH_TYPES[x.dtype], tuple(x.shape))
        if "mask_mod" in spec:
            for name, x in variant.mask_tensors.items():
                self.kept.append(x.cpu().contiguous())
                self.plan.add_tensor(True, name, self.kept[-1].data_ptr(), TORCH_TYPES[x.dtype], tuple(x.shape))
        self.starts = torch.arange(b + 1, dtype=torch.int32) * n
        if page:
            self.starts_or_table = torch.arange(b * n // page, dtype=torch.int32, device=problem.device).view(b, n // page)
        else:
            self.starts_or_table = self.starts

    def update(self) -> None:
        b, n, keys = self.problem.batch, self.problem.length, self.starts_or_table
        self.plan.update(self.starts.tolist(), [n] * b, keys.data_ptr(), keys.shape[-1], self.clock.stream())

    def call(self) -> protocols.Call:
        q, k, v = self.problem.rows
        page = self.page or 1
        fixed = (q.data_ptr(), k.data_ptr(), v.data_ptr(), k.shape[0] // page, k.stride(0) * page, self.problem.out.data_ptr())
        return lambda: self.plan.run(*fixed, self.clock.stream())


def flex_calls(problem: Problem, variant: Variant, blocks, tiles: list[str], tuned: bool) -> dict[str, protocols.Call]:
    """Those of the tiles that compile and run."""
    torch._dynamo.reset()  # nothing is left of other cells: not even their marks for dims that change
    ways = {name: (torch.compile(flex_attention, dynamic=False), TILES[name]) for name in tiles}
    if tuned:
        ways["tuned"] = (torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs"), None)

    def bound(function, options):
        return lambda: function(
            problem.q, problem.k, problem.v, score_mod=variant.score, block_mask=blocks, enable_gqa=True, kernel_options=options
        )  # fmt: skip

    calls = {}
    for name, (function, options) in ways.items():
        call = bound(function, options)
        try:
            call()
        except Exception as error:  # of Dynamo, Inductor or Triton, which share no type: too much shared memory, most of the time
            said = re.sub(r"\s+", " ", str(error))
            print(f"  flex_attention, {name}: {type(error).__name__}: {said[:110]}", flush=True)
            continue
        calls[name] = call
    return calls


def measure(native: Native, problem: Problem, name: str, variant: Variant, args: argparse.Namespace) -> tuple[str, bool]:
    clock = Clock(args.device, args.ms, args.rounds)
    n = problem.length
    make_blocks = lambda: create_block_mask(variant.mask, problem.batch if variant.per_request else None, None, n, n, device=problem.device)
    blocks = make_blocks()
    flex = flex_calls(problem, variant, blocks, args.tiles, args.tuned)
    ours = {"imbrex": Imbrex(native, problem, variant, args.backend, args.page, variant.spec(), clock)}
    if variant.twin is not None and args.built_in:
        ours["built in"] = Imbrex(native, problem, variant, args.backend, args.page, variant.twin, clock)
    if args.rounds == 0:
        return "", False
    errors, calls = {}, {}
    for label, one in ours.items():
        problem.out.fill_(float("nan"))
        one.update()
        calls[label] = one.call()
        calls[label]()
        clock.wait()
        errors[label] = problem.worst_error(variant, problem.as_batch(problem.out), args.heads, args.rows)
    for label, call in flex.items():
        errors[label] = problem.worst_error(variant, call(), args.heads, args.rows)
        calls[label] = call
    times = clock.sustained(calls)
    update_us, blocks_us = clock.once(ours["imbrex"].update), clock.once(make_blocks)
    for one in ours.values():
        one.plan.close()
    right = [label for label in flex if errors[label] <= args.tolerance]
    best = min(right, key=times.__getitem__, default=None)
    peer = math.nan if best is None else times[best]
    row = f"{f'{problem.batch}x{n}':8} {name:13} {times['imbrex']:10.1f} {peer:10.1f} {peer / times['imbrex']:6.2f}x  {best or '-':8}"
    row += f" {times.get('built in', math.nan):10.1f} {update_us:10.0f} {blocks_us:10.0f}  {errors['imbrex']:.4f} {errors.get(best, math.nan):.4f} "
    row += "".join(f"  {label} {times[label]:.1f}" for label in flex)
    wrong = [label for label, error in errors.items() if not error <= args.tolerance]
    return row + "".join(f"  {label} WRONG {errors[label]:.3g}" for label in wrong), "imbrex" in wrong or "built in" in wrong


def compile_kernels(args: argparse.Namespace) -> None:
    """Fills the caches of Inductor, Triton and imbrex on disk, in a process for each row of the table."""

    def one(row: tuple[str, str]) -> None:
        command = [sys.executable, __file__, row[0], "--only", f"{row[1]}$", "--rounds", "0", *["--tuned"] * args.tuned, *["--built-in"] * args.built_in]
        command += ["--object", str(args.object), "--shape", str(args.shape), "--backend", args.backend, "--page", str(args.page)]
        command += ["--device", args.device, "--tiles", *args.tiles]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)

    names = [name for name in variants(1, 1, "cpu", 1) if re.match(args.only, name)]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, [(cell, name) for cell in args.cells for name in names]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=CELLS)
    parser.add_argument("--shape", type=Shape.parse, default=Shape(32, 8, 128), help="q heads/kv heads x dims (default: 32/8x128)")
    parser.add_argument("--object", type=Path, default=ROOT / "build" / OBJECT)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="auto", help="auto: what select() says")
    parser.add_argument("--page", type=int, default=0, help="tokens of a page; 0: ragged keys without pages (default)")
    parser.add_argument("--only", default="", metavar="REGEX", help="variants whose names begin like this")
    parser.add_argument("--tiles", nargs="*", choices=list(TILES), default=list(TILES), help="of flex_attention")
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--built-in", action="store_true", help="also the layers that say the same without expressions")
    parser.add_argument("--ms", type=float, default=60, help="milliseconds of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each; 0: only compile")
    parser.add_argument("--heads", type=int, default=2, help="heads of each request that are compared with float64")
    parser.add_argument("--rows", type=int, default=4096, help="rows of a head that are compared, at most")
    parser.add_argument("--tolerance", type=float, default=0.03)
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile kernels in front; 0: none")
    args = parser.parse_args()
    find_compiler()
    if args.jobs:
        compile_kernels(args)
    torch._dynamo.config.cache_size_limit = 256
    native = Native(args.object)
    card = "CPU" if args.device == "cpu" else torch.cuda.get_device_name()
    print(f"{card}, PyTorch {torch.__version__}, {args.shape} (q heads/kv heads x dims), bf16; microseconds", flush=True)
    print(f"{'cell':8} {'variant':13} {'imbrex':>10} {'flex':>10} {'ratio':>7}  {'tiles':8} {'built in':>10} {'update':>10} {'blocks':>10}  errors", flush=True)
    wrong = False
    for cell in args.cells:
        batch, length = (int(x) for x in cell.split("x"))
        problem = Problem(batch, length, args.shape, args.device)
        for name, variant in variants(batch, length, args.device, args.shape.q_heads).items():
            if not re.match(args.only, name):
                continue
            try:
                row, is_wrong = measure(native, problem, name, variant, args)
            except NativeError as error:
                row, is_wrong = f"{cell:8} {name:13} {error}", True
            print(row, flush=True)
            wrong |= is_wrong
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
