"""Requests behind one prompt on a GPU: imbrex and FlashInfer in one process, in turn, over the same pages, with float64 beside them."""
from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

import protocols
from cascade_cells import HEAD_DIM, PAGE, Cell
from native import Native, Plan

SCALE = HEAD_DIM**-0.5
WORKSPACE_BYTES = 512 << 20  # of a wrapper of FlashInfer: room for the partial results of every split

Attend = Callable[[torch.Tensor], torch.Tensor]  # a call over a cache; it returns the output


class Problem:
    """The tensors of a cell: caches of their own numbers, [pages, 2, page, kv heads, dims] each, whose pages lie in any order."""

    def __init__(self, cell: Cell, caches: int, seed: int):
        self.cell = cell
        draw = torch.Generator(device="cuda").manual_seed(seed)
        prompt, own = cell.common // PAGE, -(-cell.own // PAGE)
        pages = prompt + cell.requests * own
        order = torch.randperm(pages, generator=draw, device="cuda").int()
        self.prompt_pages, self.own_pages = order[:prompt].clone(), order[prompt:].view(cell.requests, own).clone()
        self.table = torch.cat([self.prompt_pages.expand(cell.requests, -1), self.own_pages], 1).contiguous()
        self.host_table = self.table.cpu()
        shape = (pages, 2, PAGE, cell.kv_heads, HEAD_DIM)
        self.caches = [torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=draw) for _ in range(caches)]
        # Twice as large as usual, so that a row depends on few of its keys and one that is missing shows.
        self.q = (2 * torch.randn(cell.tokens, cell.q_heads, HEAD_DIM, generator=draw, device="cuda")).bfloat16()

    def expected(self, request: int, cache: torch.Tensor) -> torch.Tensor:
        """[query tokens, q heads, dims] in float64."""
        cell, n = self.cell, self.cell.length
        k, v = (side.flatten(0, 1)[:n].double() for side in cache[self.table[request].long()].unbind(1))
        q = self.q.view(cell.requests, cell.query, cell.kv_heads, -1, HEAD_DIM)[request].double()
        scores = torch.einsum("thgd,nhd->hgtn", q, k) * SCALE
        position = torch.arange(n - cell.query, n, device="cuda")
        scores.masked_fill_(torch.arange(n, device="cuda") > position[:, None], float("-inf"))
        return torch.einsum("hgtn,nhd->thgd", torch.softmax(scores, -1), v).reshape(cell.query, cell.q_heads, HEAD_DIM)

    def worst_error(self, out: torch.Tensor, cache: torch.Tensor) -> float:
        """The greatest difference from float64 in three requests, relative to the greatest output of the row."""
        cell, worst = self.cell, 0.0
        for request in sorted({0, cell.requests // 2, cell.requests - 1}):
            expected = self.expected(request, cache)
            got = out.view(cell.requests, cell.query, cell.q_heads, HEAD_DIM)[request].double()
            error = ((got - expected).abs().amax(-1) / expected.abs().amax(-1)).max()
            worst = max(worst, float(error)) if torch.isfinite(error) else float("inf")
        return worst


def imbrex_ways(native: Native, problem: Problem, longest: int, plans: dict[str, Plan]) -> dict[str, Callable[[], Attend]]:
    """`plans` gets the plan of each way, which the caller closes."""
    cell = problem.cell
    spec = {"q_heads": cell.q_heads, "kv_heads": cell.kv_heads, "head_dim": HEAD_DIM, "scale": SCALE, "kv": "bf16", "page": PAGE, "causal": True}

    def way(name: str, shared: bool, balanced: bool) -> Attend:
        limits = {"requests": cell.requests, "tokens": cell.tokens, "seq_len": max(longest, cell.length), "query_len": cell.query,
                  "min_query_len": cell.query if cell.query > 1 else 0, "shared_prompts": shared}  # fmt: skip
        plan = plans[name] = Plan(native, "cuda:0", "auto", spec, limits, balanced, host_table=True)
        starts = [cell.query * i for i in range(cell.requests + 1)]
        stream = torch.cuda.current_stream().cuda_stream
        plan.update(starts, [cell.length] * cell.requests, problem.host_table.data_ptr(), problem.host_table.shape[1], stream)
        out = torch.empty_like(problem.q)

        def attend(cache: torch.Tensor) -> torch.Tensor:
            k, v = cache.unbind(1)
            stream = torch.cuda.current_stream().cuda_stream
            plan.run(problem.q.data_ptr(), k.data_ptr(), v.data_ptr(), cache.shape[0], cache.stride(0), out.data_ptr(), stream)
            return out

        return attend

    kinds = {"imbrex, shared and balanced": (True, True), "imbrex, apart": (False, False)}
    if cell.query == 1:  # drafts share in balanced plans alone
        kinds["imbrex, shared with the bits of apart"] = (True, False)
    return {name: functools.partial(way, name, *kind) for name, kind in kinds.items()}


def flashinfer_ways(problem: Problem) -> dict[str, Callable[[], Attend]]:
    import flashinfer

    cell = problem.cell
    ints = lambda values: torch.tensor(list(values), dtype=torch.int32, device="cuda")
    prompt, own = len(problem.prompt_pages), problem.own_pages.shape[1]
    last = ints([(cell.own - 1) % PAGE + 1] * cell.requests)
    heads = (cell.q_heads, cell.kv_heads, HEAD_DIM, PAGE)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "sm_scale": SCALE}
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    starts = ints(cell.query * i for i in range(cell.requests + 1))

    def apart(tensor_cores: bool) -> Attend:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
        page_starts = ints(i * (prompt + own) for i in range(cell.requests + 1))
        drafts = {"q_len_per_req": cell.query} if cell.query > 1 else {}
        wrapper.plan(page_starts, problem.table.flatten(), last, *heads, **types, **drafts)
        return lambda cache: wrapper.run(problem.q, cache)

    def cascade(backends: tuple[str, str] | None, by_hand: bool = False) -> Attend:
        """backends: of the prompt and of own keys, where the wrapper is not to choose itself. by_hand: what its run() does, without filling
        the outputs with zeros first."""
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
        levels = wrapper._batch_prefill_wrappers
        for level, backend in zip(levels, backends or ()):
            level._backend = backend
        wrapper.plan([ints([0, cell.tokens]), starts], [ints([0, prompt]), ints(i * own for i in range(cell.requests + 1))],
                     [problem.prompt_pages, problem.own_pages.flatten()], [ints([PAGE]), last], *heads, causal=cell.query > 1, **types)  # fmt: skip
        if not by_hand:
            return lambda cache: wrapper.run(problem.q, cache)
        outs = [torch.empty_like(problem.q) for _ in levels]
        lses = [torch.empty(cell.tokens, cell.q_heads, dtype=torch.float32, device="cuda") for _ in levels]

        def attend(cache: torch.Tensor) -> torch.Tensor:
            for level, out, lse in reversed(list(zip(levels, outs, lses))):
                level.run(problem.q, cache, out=out, lse=lse, return_lse=True)
            flashinfer.cascade.merge_state_in_place(outs[1], lses[1], outs[0], lses[0])
            return outs[1]

        return attend

    ways = {"FlashInfer, cascade": lambda: cascade(None), "FlashInfer, cascade, fa2": lambda: cascade(("fa2", "fa2"))}
    ways["FlashInfer, cascade by hand, fa2"] = lambda: cascade(("fa2", "fa2"), True)
    ways["FlashInfer, cascade by hand, fa3, fa2"] = lambda: cascade(("fa3", "fa2"), True)
    ways["FlashInfer, apart"] = lambda: apart(True)
    if cell.query == 1:  # its other kernel of decode takes one token of a request
        ways["FlashInfer, apart, no tensor cores"] = lambda: apart(False)
    return ways


class Captured:
    """A way in a graph of at least `calls` calls, which take turns at the caches."""

    def __init__(self, attend: Attend, caches: list[torch.Tensor], calls: int):
        def call_of(cache: torch.Tensor) -> protocols.Call:
            def call() -> None:
                self.out = attend(cache)

            return call

        self.attend = attend  # with the memory that the graph reads
        self.graph = protocols.Graph([call_of(cache) for cache in caches], count=-(-calls // len(caches)) * len(caches))
        self.out.fill_(float("nan"))
        self.graph.graph.replay()
        torch.cuda.synchronize()  # `out` now is that of the last cache, from the graph


@dataclass
class Row:
    way: str
    us: list[float]  # of a call, in each replay
    error: float = float("nan")
    plan: str = ""  # what imbrex says of its plan
    refused: str = ""


def measure(native: Native, cell: Cell, caches: int, *, flashinfer: bool, calls: int, rounds: int, ms: float, longest: int, seed: int) -> list[Row]:
    problem, plans = Problem(cell, caches, seed), {}
    ways = imbrex_ways(native, problem, longest, plans)
    if flashinfer:
        ways |= flashinfer_ways(problem)
    rows, captured = {name: Row(name, []) for name in ways}, {}
    for name, make in ways.items():
        try:
            captured[name] = Captured(make(), problem.caches, calls)
            rows[name].error = problem.worst_error(captured[name].out, problem.caches[-1])
        except Exception as refusal:  # every library has errors of its own
            rows[name].refused = (str(refusal).strip() or repr(refusal)).splitlines()[-1]
            captured.pop(name, None)
            torch.cuda.synchronize()
    for _ in range(rounds):
        for name, way in captured.items():
            rows[name].us += [1e3 * each for each in way.graph.replays(ms)]
    captured.clear()
    for name, plan in plans.items():
        rows[name].plan = str(plan)
        plan.close()
    return list(rows.values())


def table(cell: Cell, caches: int, rows: list[Row], tolerance: float) -> str:
    ours, lines = statistics.median(rows[0].us) if rows[0].us else float("nan"), []
    for row in rows:
        head = f"{str(cell):22} {caches:3}  {row.way:38}"
        if row.refused:
            lines.append(f"{head} refused: {row.refused[:120]}")
            continue
        median = statistics.median(row.us)
        wrong = "" if row.error <= tolerance else "  WRONG"
        lines.append(f"{head} {min(row.us):8.1f} {median:8.1f} {median / ours:7.2f}x  {row.error:.2e}{wrong}")
    return "\n".join(lines)
