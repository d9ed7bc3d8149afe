"""Measures one cell: imbrex and PyTorch's attention in turn, on the same data, and the rows of imbrex's output against float64."""
from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import protocols
from cells import Cell
from inputs import DTYPES, HEAD_DIM, KV_HEADS, Pools, Problem, check_rows, rotation
from native import Native, Plan

SDPA = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
MAX_DENSE = 1 << 32  # elements of keys that the peers were run with
MAX_SEQ_LEN = 131072  # of decode plans: what an engine would promise


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def limits_of(cell: Cell, seq_lens: list[int]) -> dict:
    longest = max(seq_lens) if cell.unit == "TFLOP/s" else max(MAX_SEQ_LEN, max(seq_lens))
    limits = {"requests": cell.batch, "tokens": sum(cell.query_lens), "seq_len": longest, "query_len": max(cell.query_lens)}
    return {**limits, "min_query_len": cell.query} if cell.group == "verify" else limits


def update(plan: Plan, problem: Problem) -> None:
    keys = problem.starts if problem.table is None else problem.table
    if problem.mask is not None:
        plan.set_custom_mask(problem.mask.data_ptr(), problem.mask.numel())
    plan.update(problem.query_start, problem.seq_lens, keys.data_ptr(), keys.shape[-1], stream())


def imbrex_calls(plan: Plan, problem: Problem) -> list[protocols.Call]:
    """One for each set of keys."""
    if problem.sinks is not None:
        plan.set_sinks(problem.sinks.data_ptr())

    def call_for(index: int) -> protocols.Call:
        k, v = problem.keys(index)
        fixed = (problem.q.data_ptr(), k.data_ptr(), v.data_ptr(), k.shape[0], k.stride(0), problem.out.data_ptr())
        return lambda: plan.run(*fixed, stream())

    return [call_for(index) for index in range(problem.sets)]


def sdpa_call(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None) -> protocols.Call:
    """q, k, v: [batch, heads, tokens, dim]; mask: [batch, 1, queries, keys], instead of `causal`."""
    grouped = q.shape[1] != k.shape[1]

    def call():
        with sdpa_kernel([backend]):
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    return call


def dense_keys(cell: Cell, problem: Problem, pools: Pools) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [tokens, heads, dim] of each call: the problem's own, or parts of the pool."""
    if problem.table is None:
        return [(problem.k, problem.v)]
    sides = pools.get(cell)
    count = rotation(cell, sides[0].shape[0] // cell.tokens)
    return [tuple(side[i * cell.tokens : (i + 1) * cell.tokens] for side in sides) for i in range(count)]


def laid_out(side: torch.Tensor, layout: str, cell: Cell) -> torch.Tensor:
    """Keys or values as [batch, heads, context, dim]. They are random, so the same memory is read as either layout."""
    heads = side.shape[1]
    if layout == "bhsd":
        return side.view(cell.batch, heads, cell.context, cell.head_dim)
    return side.view(cell.batch, cell.context, heads, cell.head_dim).transpose(1, 2)


def sdpa_calls(cell: Cell, problem: Problem, pools: Pools) -> dict[str, list[protocols.Call]]:
    """PyTorch's kernels in both layouts: [batch, tokens, heads, dim] seen transposed, and [batch, heads, tokens, dim]."""
    if not cell.sdpa or cell.tokens * KV_HEADS * HEAD_DIM > MAX_DENSE:
        return {}
    causal = cell.causal and cell.query > 1 and not cell.mask
    mask = problem.mask.bool().unsqueeze(1) if cell.mask else None
    q = problem.q.view(cell.batch, cell.query, *problem.q.shape[1:]).transpose(1, 2)
    calls: dict[str, list[protocols.Call]] = {}
    for name, backend in SDPA.items():
        for layout in ("bshd", "bhsd"):
            queries = q.contiguous() if layout == "bhsd" else q
            sides = [[laid_out(side, layout, cell) for side in pair] for pair in dense_keys(cell, problem, pools)]
            made = [sdpa_call(backend, queries, k, v, causal, mask) for k, v in sides]
            try:
                made[0]()
            except RuntimeError as error:
                print(f"  {name} {layout} does not run {cell.name}: {str(error).splitlines()[0]}", flush=True)
                continue
            calls[f"{name} {layout}"] = made
    return calls


def best_layouts(times: dict[str, float]) -> dict[str, float]:
    """The better of a peer's two, under its name: cuDNN of "cuDNN bshd" and "cuDNN bhsd"."""
    best: dict[str, float] = {}
    for name, us in times.items():
        peer = name.split()[0]
        best[peer] = min(us, best.get(peer, us))
    return best


class Runner:
    def __init__(self, native: Native, backend: str, quick: bool):
        self.native, self.backend, self.quick = native, backend, quick
        self.pools = Pools("cuda")

    def plan(self, cell: Cell, seq_lens: list[int]) -> Plan:
        return Plan(self.native, "cuda:0", self.backend, cell.spec(), limits_of(cell, seq_lens), cell.balanced)

    def measure(self, cell: Cell) -> dict:
        """As beside() has it, with PyTorch's kernels; of prefill in a graph also "eager_us": a graph holds every shape of the kernel, an eager
        call only those that the batch has work for."""

        def eagerly(ours: list[protocols.Call]) -> dict:
            if cell.unit != "TFLOP/s" or cell.protocol != "graph":
                return {}
            return {"eager_us": protocols.sustained({"imbrex": ours[0]}, 30 if self.quick else 120, 1)["imbrex"]}

        return self.beside(cell, sdpa_calls, 8 if self.quick else 24, eagerly)

    def beside(self, cell: Cell, peers, samples: int = 6, also=lambda ours: {}) -> dict:
        """{"us", "live": {peer: us}, "check", "plan"} of a cell, with what `peers` has beside it and what `also` finds out."""
        problem = Problem(cell, self.pools)
        with self.plan(cell, problem.seq_lens) as plan:
            update(plan, problem)
            ours = imbrex_calls(plan, problem)
            times = self.times(problem, {"imbrex": ours, **peers(cell, problem, self.pools)})
            torch.cuda.synchronize()
            check = check_rows(problem, len(ours) - 1, samples)  # what the last of the timed calls has left
            return {"us": times.pop("imbrex"), "live": best_layouts(times), "check": check, "plan": str(plan), **also(ours)}

    def times(self, problem: Problem, calls: dict[str, list[protocols.Call]]) -> dict[str, float]:
        protocol, rounds = problem.cell.protocol, 1 if self.quick else 2
        if protocol == "sustained":
            tried = {name: protocols.estimate(calls[name][0]) for name in calls for _ in range(2)}
            kept = {min((n for n in tried if n.startswith(peer)), key=tried.get) for peer in best_layouts(tried)}
            return protocols.sustained({name: calls[name][0] for name in calls if name in kept}, 30 if self.quick else 120, rounds)
        before = {"imbrex": problem.poison}
        if protocol == "replay":
            return protocols.replayed(calls, before)
        return protocols.in_graph(calls, 20 if self.quick else 80, rounds, before)

    def host_costs(self, cell: Cell) -> dict:
        """Microseconds of the host: the best of five rounds, so that the machine's other work does not count."""
        problem = Problem(cell, self.pools)
        with self.plan(cell, problem.seq_lens) as plan:
            update(plan, problem)
            imbrex_calls(plan, problem)[0]()
            costs = {}
            for name, of_update, calls in (("update_us", True, 3), ("run_us", False, 20)):
                best = float("inf")
                for _ in range(5):
                    torch.cuda.synchronize()
                    best = min(best, plan.host_us(of_update, calls, stream()))
                costs[name] = best
            torch.cuda.synchronize()
            return costs
