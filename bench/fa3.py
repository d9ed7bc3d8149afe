"""FlashAttention-3 as vLLM's wheels have it (_vllm_fa3_C.abi3.so), as a peer in this process: the same queries over the same pages."""
from __future__ import annotations

from pathlib import Path

import torch

import protocols
from cells import Cell
from inputs import DTYPES, Problem

SPLITS = (0, 1)  # its own choice, for which it plans ahead, and none


def load(library: Path) -> None:
    torch.ops.load_library(str(library))


def calls(problem: Problem, keys: list[tuple[torch.Tensor, torch.Tensor]], splits: int) -> list[protocols.Call]:
    """One for each of `keys`: pages of keys and values, of 16 bits or as narrow as the queries."""
    cell, device = problem.cell, problem.q.device
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
    starts, lens, longest = ints(problem.query_start), ints(problem.seq_lens), max(problem.seq_lens)
    most = max(cell.query_lens)
    window = (cell.window - 1, 0) if cell.window else (-1, -1)
    sinks = None if problem.sinks is None else problem.sinks.bfloat16()
    out = torch.empty_like(problem.out)
    q = problem.q if problem.q.dtype == keys[0][0].dtype else problem.q.bfloat16()
    plan = None
    if splits == 0:
        plan = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            cell.batch, most, longest, *cell.heads, cell.head_dim, cell.head_dim, q.dtype, lens, starts,
            None, None, None, None, cell.page, 0, cell.causal, *window, cell.soft_cap > 0, splits, None, 0)  # fmt: skip

    def call_of(k: torch.Tensor, v: torch.Tensor) -> protocols.Call:
        return lambda: torch.ops._vllm_fa3_C.fwd(
            q, k, v, None, None, None, out, starts, None, None, None, lens, most, longest, problem.table, None, None,
            None, None, None, None, None, None, cell.head_dim**-0.5, cell.causal, *window, cell.soft_cap,
            True, plan, splits, None, 0, sinks, 1, 0, None)  # fmt: skip

    return [call_of(k, v) for k, v in keys]


def peers(cell: Cell, problem: Problem, pools) -> dict[str, list[protocols.Call]]:
    """Calls by number of splits; they have a cache of 16 bits also where the cell's is narrower than its queries."""
    if cell.kv == cell.q:
        keys = [problem.keys(i) for i in range(problem.sets)]
    else:
        wide = pools.get(cell, "bf16")
        keys = [tuple(side.view(-1, cell.page, *side.shape[1:])[i :: problem.sets] for side in wide) for i in range(problem.sets)]
    made = {f"FA3 splits {splits}": calls(problem, keys, splits) for splits in SPLITS}
    for name, rotating in list(made.items()):
        try:
            rotating[0]()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"  {name} does not run {cell.name}: {str(error).splitlines()[0]}", flush=True)
            del made[name]
    return made
