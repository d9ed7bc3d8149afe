"""Random inputs of the benchmark, in GPU memory that is taken once, and the rows that its outputs are compared with."""
from __future__ import annotations

import math

import torch

from cells import DOCUMENT, Cell

DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
KV_HEADS, HEAD_DIM = 8, 128  # of most paged cells
POOL = (256 << 14) * KV_HEADS * HEAD_DIM  # elements: 16 Ki tokens of 256 requests; the largest cells need four times as many
MB = 1e6
# How far an output may be from float64, in errors of the same attention as a framework would write it in bf16: src/conformance/attention/judge.h
MAX_FACTOR = {"bf16": 2.0, "fp8_e4m3": 4.0}
MEAN_FACTOR = {"bf16": 1.5, "fp8_e4m3": 3.0}
FLOOR = 1e-5


def ragged_lengths() -> dict[str, list[int]]:
    """The random numbers that the peers were measured with: one generator, in this order."""
    generator = torch.Generator().manual_seed(1)
    uniform64 = torch.randint(256, 16384, (64,), generator=generator)
    lognormal128 = (torch.exp(torch.randn(128, generator=generator)) * 1500).clamp(32, 32768).int()
    uniform8 = torch.randint(256, 16384, (8,), generator=generator)
    return {
        "uniform64": uniform64.tolist(),
        "lognormal128": lognormal128.tolist(),
        "skewed64": [131072] + 63 * [1024],
        "uniform8": uniform8.tolist(),
    }


def seq_lens_of(cell: Cell) -> list[int]:
    lens = ragged_lengths()[cell.lengths] if cell.lengths else [cell.context] * cell.batch
    if sum(lens) != cell.tokens:
        raise ValueError(f"{cell.name}: expected {cell.tokens} keys, this PyTorch draws {sum(lens)}")
    return lens


def starts_of(lens: list[int]) -> list[int]:
    starts = [0]
    for n in lens:
        starts.append(starts[-1] + n)
    return starts


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """Standard normal values, a part at a time; types that cannot be drawn are cast."""
    for part in tensor.flatten().split(1 << 28):
        if tensor.dtype == torch.float8_e4m3fn:
            part.copy_(torch.randn(part.shape, device=part.device, dtype=torch.bfloat16))
        else:
            part.normal_()
    return tensor


class Pools:
    """Keys and values of all paged cells: made when first needed, grown when a cell needs more."""

    def __init__(self, device: str):
        self.device = device
        self.pools: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def get(self, cell: Cell, kv: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens, kv heads, dim] each, of whole pages; of type `kv` where that is not the cell's."""
        kv, token = kv or cell.kv, cell.heads[1] * cell.head_dim
        elements = POOL if cell.tokens * token <= POOL else 4 * POOL
        if kv not in self.pools or self.pools[kv][0].numel() < elements:
            self.pools.pop(kv, None)
            made = [torch.empty(elements, dtype=DTYPES[kv], device=self.device) for _ in range(2)]
            self.pools[kv] = (fill(made[0]), fill(made[1]))
        tokens = self.pools[kv][0].numel() // (token * cell.page) * cell.page
        return tuple(side[: tokens * token].view(tokens, cell.heads[1], cell.head_dim) for side in self.pools[kv])


def custom_mask(cell: Cell, device: str) -> torch.Tensor:
    """u8 [batch, queries, keys]. Hides keys behind a query too where the cell is causal, since PyTorch's kernels take one mask."""
    query = torch.arange(cell.context - cell.query, cell.context, device=device).view(1, -1, 1)
    key = torch.arange(cell.context, device=device).view(1, 1, -1)
    if cell.mask == "documents":
        seen = query // DOCUMENT == key // DOCUMENT
    else:
        seen = (torch.rand(cell.batch, cell.query, cell.context, device=device) < 2 / 3) | (query == key)
    return (seen & (key <= query) if cell.causal else seen).expand(cell.batch, -1, -1).to(torch.uint8).contiguous()


class Problem:
    """A cell with queries of its own. Call i of a rotation has keys that lie between those of the others, so every call's pages are spread
    over the whole pool, and one block table serves them all: it counts pages of a view whose stride skips the others' pages."""

    def __init__(self, cell: Cell, pools: Pools):
        device = pools.device
        self.cell = cell
        self.seq_lens = seq_lens_of(cell)
        self.query_start = starts_of(cell.query_lens)
        shape = (self.query_start[-1], cell.heads[0], cell.head_dim)
        self.sinks = torch.randn(cell.heads[0], device=device) if cell.sinks else None
        self.q = fill(torch.empty(shape, device=device, dtype=DTYPES[cell.q]))
        self.out = torch.empty(shape, device=device, dtype=torch.bfloat16)
        self.mask = custom_mask(cell, device) if cell.mask else None
        self.poison()
        if cell.page == 0:
            self.sets, self.table = 1, None
            rows = (cell.tokens, cell.heads[1], cell.head_dim)
            self.k, self.v = (fill(torch.empty(rows, device=device, dtype=DTYPES[cell.kv])) for _ in "kv")
            self.starts = torch.tensor(starts_of(self.seq_lens), dtype=torch.int32)
            return
        self.k, self.v = (pool.view(-1, cell.page, cell.heads[1], cell.head_dim) for pool in pools.get(cell))
        blocks = [math.ceil(n / cell.page) for n in self.seq_lens]
        self.sets = rotation(cell, self.k.shape[0] // sum(blocks))
        ids = torch.randperm(self.k.shape[0] // self.sets, device=device)[: sum(blocks)].int().split(blocks)
        self.table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True).contiguous()

    def poison(self) -> None:
        self.out.fill_(float("nan"))

    def keys(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of call `index`: pages [count, page, kv heads, dim], or rows where there are no pages."""
        if self.table is None:
            return self.k, self.v
        end = self.k.shape[0] // self.sets * self.sets
        return self.k[index : end : self.sets], self.v[index : end : self.sets]

    def rows_of(self, pages: torch.Tensor, request: int, head: int) -> torch.Tensor:
        """[keys, dim] of one request and kv head."""
        n = self.seq_lens[request]
        if self.table is None:
            begin = int(self.starts[request])
            return pages[begin : begin + n, head]
        if pages.dtype == torch.float8_e4m3fn:  # PyTorch gathers bytes everywhere, fp8 not
            return self.rows_of(pages.view(torch.uint8), request, head).view(torch.float8_e4m3fn)
        return pages[self.table[request].long(), :, head].flatten(0, 1)[:n]


def rotation(cell: Cell, fits: int) -> int:
    if not cell.rotate or cell.unit == "TFLOP/s" or cell.protocol == "sustained":
        return 1
    return max(1, min(8 if cell.kv_bytes > 64 * MB else 64, int(600 * MB / cell.kv_bytes) + 1, fits))


def attention_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, soft_cap: float = 0.0, sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row in float64, and as one would write it in bf16: logits, probabilities and output rounded, sums in float. Where q is in bytes,
    exponentials are too, relative to 256 for the largest."""
    in_bytes, scale = q.dtype == torch.float8_e4m3fn, q.shape[-1] ** -0.5
    capped = lambda logits: soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
    weights = lambda logits: torch.softmax(logits if sink is None else torch.cat([logits, sink.to(logits.dtype).view(1)]), 0)[: len(logits)]
    exact = weights(capped(k.double() @ q.double() * scale)) @ v.double()
    k, v, q = k.float(), v.float(), q.float()
    logits = capped(((k @ q).bfloat16() * scale).bfloat16().float())
    if in_bytes:
        exponentials = torch.exp(logits - logits.max())
        p = (256 * exponentials).to(torch.float8_e4m3fn).float() / (256 * exponentials.sum())
    else:
        p = weights(logits).bfloat16().float()
    return exact, (p @ v).bfloat16().double()


def check_rows(problem: Problem, index: int, samples: int) -> dict:
    """Compares rows of the output of call `index` with float64. {"max", "mean", "naive_max", "naive_mean", "failure"}."""
    cell = problem.cell
    k, v = problem.keys(index)
    errors, naive = [], []
    draw = lambda n: int(torch.randint(n, (1,)))
    for _ in range(samples):
        request, head = draw(cell.batch), draw(cell.heads[0])
        queries = cell.query_lens[request]
        token, kv_head = draw(queries), head * cell.heads[1] // cell.heads[0]
        row = problem.query_start[request] + token
        end = problem.seq_lens[request] - (queries - 1 - token if cell.causal else 0)
        begin = max(end - cell.window, 0) if cell.window else 0
        keys, values = (problem.rows_of(side, request, kv_head)[begin:end] for side in (k, v))
        if problem.mask is not None:
            seen = problem.mask[request, token, begin:end].bool()
            keys, values = keys[seen], values[seen]
        sink = None if problem.sinks is None else problem.sinks[head]
        exact, plain = attention_row(problem.q[row, head], keys, values, cell.soft_cap, sink)
        errors.append((problem.out[row, head].double() - exact).abs())
        naive.append((plain - exact).abs())
    ours, theirs = torch.stack(errors), torch.stack(naive)
    found = {"max": ours.max().item(), "mean": ours.mean().item(), "naive_max": theirs.max().item(), "naive_mean": theirs.mean().item()}
    failure = ""
    if not bool(torch.isfinite(problem.out).all()):
        failure = "an output is not finite"
    # Negated, so that a NaN fails.
    elif not found["max"] <= MAX_FACTOR[cell.kv] * found["naive_max"] + FLOOR:
        failure = f"largest error {found['max']:.2e}, naive {found['naive_max']:.2e}"
    elif not found["mean"] <= MEAN_FACTOR[cell.kv] * found["naive_mean"] + FLOOR:
        failure = f"mean error {found['mean']:.2e}, naive {found['naive_mean']:.2e}"
    return {**{name: value if math.isfinite(value) else None for name, value in found.items()}, "failure": failure}
