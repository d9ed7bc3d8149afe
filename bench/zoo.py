"""Cells for every layer of zoo.json, as cells.py has them. Needs no PyTorch."""
from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

from cells import Cell

TABLE = Path(__file__).with_name("zoo.json")
ITEM = re.compile(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?")
LAUNCHED = ("prefill", "chunk", "mixed")  # one by one, as engines do, where a cell does not say otherwise
PROTOCOLS = {"eager": "sustained", "graph": "graph"}
MOST_KEYS, MOST_FLOPS = 1 << 32, 5e12  # of a cell that is drawn: elements of its keys, and what a GPU does in some 10 ms


def shapes() -> list[dict]:
    return json.loads(TABLE.read_text())["shapes"]


def ragged() -> list[int]:
    return json.loads(TABLE.read_text())["ragged"]


def load() -> list[Cell]:
    return [cell_of(shape, text) for shape in shapes() for text in shape["cells"]]


def step_of(kind: str, between: Callable[[int, int], int]) -> str:
    """A batch of a kind, as `imbrex bench` takes it. between(a, b): a random number of which each power of two is as likely."""
    keys = between(256, 32768)
    if kind == "decode":
        return f"{between(1, 256)}q1s{keys}"
    if kind == "verify":
        return f"{between(1, 64)}q{between(2, 16)}s{keys}"
    if kind == "extend":
        return f"{between(1, 16)}q{between(17, 256)}s{keys + 256}"
    if kind == "chunk":
        return f"{between(1, 4)}q{between(256, 4096)}s{keys + 4096}"
    if kind == "mixed":
        return f"q{between(64, 2048)}s{keys + 2048},{between(1, 128)}q1s{keys + 2048}"
    return f"{between(1, 32)}q{between(32, 16384)}"


def drawn(count: int, seed: int) -> list[Cell]:
    """Cells beside the table: its layers in random steps, pages and types, the same for the same seed."""
    rng = random.Random(seed)
    between = lambda a, b: round(2 ** rng.uniform(math.log2(a), math.log2(b)))
    cells: dict[str, Cell] = {}
    while len(cells) < count:
        kind = rng.choice(("decode", "verify", "extend", "chunk", "mixed", "prefill"))
        kv = rng.choice(("bf16", "bf16", "fp8_e4m3", "fp8_e4m3 fp8_e4m3_queries"))
        launch = rng.choice(("", "", " graph" if kind in LAUNCHED else " eager"))
        cell = cell_of(rng.choice(shapes()), f"{kind} {step_of(kind, between)} p{rng.choice((1, 16, 32, 64, 128))} {kv}{launch}")
        if cell.tokens * cell.heads[1] * cell.head_dim <= MOST_KEYS and cell.flops <= MOST_FLOPS:
            cells[cell.name] = cell
    return list(cells.values())


def batch_of(text: str) -> list[tuple[int, int, int]]:
    """Requests, query tokens and keys of each item of `imbrex bench`'s notation."""
    items = []
    for item in text.split(","):
        count, queries, queries_k, keys, keys_k = ITEM.fullmatch(item).groups()
        query = int(queries) << (10 if queries_k else 0)
        items.append((int(count or 1), query, int(keys) << (10 if keys_k else 0) if keys else query))
    return items


def cell_of(shape: dict, text: str) -> Cell:
    kind, batch, page, kv, *more = text.split()
    items = [(len(ragged()), 1, 0)] if batch == "ragged" else batch_of(batch)
    (count, query, context), mixed = items[-1], items[0][1] if len(items) > 1 else 0
    requests = count + bool(mixed)
    launch = next((word for word in more if word in PROTOCOLS), "eager" if kind in LAUNCHED else "graph")
    extras = {name: shape[name] for name in ("window", "soft_cap", "sinks") if name in shape}
    of_layer = f"{shape['heads'][0]}-{shape['heads'][1]}/d{shape['head_dim']}" + "".join(
        f"/{name}" + ("" if value is True else f"{value:g}") for name, value in extras.items()
    )
    step = batch if context else f"{requests}ragged"
    return Cell(
        group=kind,
        name="/".join([kind, of_layer, kv, page, step, *more]),
        protocol=PROTOCOLS[launch],
        unit="TFLOP/s" if kind in ("prefill", "chunk") else "TB/s",
        head_dim=shape["head_dim"],
        heads=tuple(shape["heads"]),
        batch=requests,
        query=query,
        context=context,
        page=int(page.removeprefix("p")),
        kv=kv,
        q="fp8_e4m3" if "fp8_e4m3_queries" in more else "bf16",
        causal=True,
        tokens=requests * context or sum(ragged()),
        lengths=None if context else "uniform64",
        mixed=mixed,
        **extras,
    )
