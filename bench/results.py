"""The table of a measurement: each cell beside its best peer and its floor. Needs no PyTorch."""
from __future__ import annotations

import statistics

from cells import Cell

COUNTS = (("status", "ok"), ("met", True), ("met", False))
COLUMNS = ("cell", "us", "rate", "", "best peer", "us", "ratio", "floor", "", "keys without pages", "ratio")


def best(peers: dict[str, float]) -> tuple[str, float] | None:
    return min(peers.items(), key=lambda peer: peer[1]) if peers else None


def judge(cell: Cell, us: float, live: dict[str, float], base_us: float | None = None) -> dict:
    """Times in us, of peers measured elsewhere and of those in this process, which replace their own older figures. A ratio above 1 says
    that we are faster."""
    peers = {**cell.peers, **(live if cell.sdpa == "peers" else {})}
    dense = {**cell.dense, **(live if cell.sdpa == "dense" else {})}
    result: dict = {"cell": cell.name, "status": "ok", "us": us, "rate": cell.rate(us), "unit": cell.unit, "peers": peers, "dense": dense}
    older = {**cell.peers, **cell.dense}
    result["drift"] = {name: us_here / older[name] for name, us_here in live.items() if name in older}
    yardstick = (cell.base, base_us) if cell.base and base_us else best(peers)
    if yardstick:
        result["best"], result["ratio"] = yardstick, yardstick[1] / us
    if dense:
        result["best_dense"], result["dense_ratio"] = best(dense), best(dense)[1] / us
    if cell.floor:
        kind, bound = next(iter(cell.floor.items()))
        result["floor"] = f"<= {bound} us" if kind == "us" else f">= {bound}"
        if kind == "us":
            result["met"] = us <= bound
        elif "ratio" in result:
            result["met"] = result["ratio"] >= bound
    return result


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def row(result: dict) -> tuple[str, ...]:
    if "us" not in result:
        return (result["cell"], f"{result['status']}: {result.get('why', '')}".splitlines()[0][:110]) + ("",) * (len(COLUMNS) - 2)
    name, peer_us = result.get("best", ("", None))
    dense, _ = result.get("best_dense", ("", None))
    met = {True: "met", False: "BELOW", None: ""}[result.get("met")]
    return (
        result["cell"] + ("" if result["status"] == "ok" else f" {result['status'].upper()}"),
        number(result["us"]),
        number(result["rate"], 2 if result["unit"] == "TB/s" else 0),
        result["unit"],
        name,
        number(peer_us),
        number(result.get("ratio"), 3),
        result.get("floor", ""),
        met,
        dense,
        number(result.get("dense_ratio"), 3),
    )


def aligned(rows: list[tuple[str, ...]], left: set[int]) -> str:
    """Columns side by side; a row with nothing behind its second cell may be as long as it is."""
    full = [r for r in rows if any(r[2:])]
    widths = [max(len(r[i]) for r in full) for i in range(len(rows[0]))]
    lines = []
    for r in rows:
        cells = r if r in full else r[:2]
        lines.append("  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths))).rstrip())
    return "\n".join(lines)


def table(results: list[dict]) -> str:
    return aligned([COLUMNS, *map(row, results)], {0, 3, 4, 7, 8, 9})


def short_table(results: list[dict]) -> str:
    """A line for each group of cells: how many reached their floor, and the ratios to the best peer."""
    rows: list[tuple[str, ...]] = [("group", "cells", "ok", "met", "below", "lowest", "median", "highest ratio")]
    groups: dict[str, list[dict]] = {}
    for result in results:
        groups.setdefault(result["cell"].partition("/")[0], []).append(result)
    for name, members in [*groups.items(), ("all", results)]:
        ratios = [r["ratio"] for r in members if "ratio" in r and r["status"] == "ok"]
        spread = [min(ratios), statistics.median(ratios), max(ratios)] if ratios else [None] * 3
        counts = [len(members), *(sum(r.get(key) == value for r in members) for key, value in COUNTS)]
        rows.append((name, *map(str, counts), *(number(ratio, 3) for ratio in spread)))
    return aligned(rows, {0})


def drifts(results: list[dict]) -> str:
    """How the times of this machine's PyTorch compare with the recorded ones, which tells how far other recorded peers can be compared."""
    found: dict[str, list[float]] = {}
    for result in results:
        for name, drift in result.get("drift", {}).items():
            found.setdefault(name, []).append(drift)
    said = [f"{name} {statistics.median(d):.3f} ({min(d):.3f} to {max(d):.3f}, {len(d)} cells)" for name, d in sorted(found.items())]
    return "time here / recorded time: " + ", ".join(said) if said else ""
