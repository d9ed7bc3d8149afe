"""Cells for every layer of zoo.json: each shape with some of the steps, page sizes and cache types that engines run, so that all of
these meet all kinds of shapes. Needs no PyTorch."""
from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import cells
from cells import Cell

TABLE = Path(__file__).with_name("zoo.json")
PAGES = (16, 1, 64, 128)
# Requests, query tokens, keys, and what else a cell has.
DECODE = ((1, 1, 4096), (16, 1, 4096), (64, 1, 4096), (16, 1, 16384), (128, 1, 1024), (4, 1, 32768), (256, 1, 2048), (1, 1, 1024), (2, 1, 65536))
PREFILL = ((1, 4096, 4096), (4, 1024, 1024), (1, 1500, 1500), (2, 8192, 8192), (8, 300, 300))
OTHERS = (
    (2, 512, 8192, "chunk"),
    (32, 4, 4096, "verify"),
    (32, 1, 4096, "mixed"),
    (64, 1, 0, "ragged"),
    (4, 16, 6000, "extend"),
    (8, 8, 16384, "verify"),
)
MIXED_QUERIES = 512


@functools.cache
def uniform64_tokens() -> int:
    return next(cell.tokens for cell in cells.load() if cell.lengths == "uniform64")


def shapes() -> list[dict]:
    return json.loads(TABLE.read_text())["shapes"]


def load() -> list[Cell]:
    """Three cells of each shape: decode, prefill, and one of the others, drawn by the shape's own name, so that a new shape changes no other.
    A third of them have an e4m3 cache under bf16 queries."""
    made: dict[str, Cell] = {}
    for shape in shapes():
        draw = random.Random(json.dumps({**shape, "models": []}))
        for kind, steps in (("decode", DECODE), ("prefill", PREFILL), (None, OTHERS)):
            row = draw.choice(steps)
            cell = cell_of(shape, kind or row[3], row[:3], draw.choice(PAGES), draw.random() < 1 / 3)
            made.setdefault(cell.name, cell)
    return list(made.values())


def cell_of(shape: dict, kind: str, row: tuple[int, int, int], page: int, in_bytes: bool) -> Cell:
    batch, query, context = row
    heads, kv = tuple(shape["heads"]), "fp8_e4m3" if in_bytes else "bf16"
    extras = {name: shape[name] for name in ("window", "soft_cap", "sinks") if name in shape}
    of_layer = f"{heads[0]}-{heads[1]}/d{shape['head_dim']}" + "".join(f"/{name}{value:g}" for name, value in extras.items())
    step = f"{batch}x{query}of{context}" if kind != "ragged" else "uniform64"
    compute = kind in ("prefill", "chunk")
    return Cell(
        group=kind,
        name=f"{kind}/{of_layer}/{kv}/p{page}/{step}",
        protocol="sustained" if compute else "graph",
        unit="TFLOP/s" if compute else "TB/s",
        head_dim=shape["head_dim"],
        heads=heads,
        batch=batch,
        query=query,
        context=context,
        page=page,
        kv=kv,
        causal=True,
        tokens=batch * context or uniform64_tokens(),
        lengths="uniform64" if kind == "ragged" else None,
        mixed=MIXED_QUERIES if kind == "mixed" else 0,
        **extras,
    )
