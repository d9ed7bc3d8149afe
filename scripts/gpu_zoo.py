#!/usr/bin/env python3
"""Looks for cliffs: the layers of published models, whole and shared out over GPUs (bench/zoo.json), each in a few steps, page sizes and
cache types, beside FlashAttention-3 in the same process where its library is given. Every output is compared with float64.

The slowest ten come last: by the ratio to the peer, and by the share of what the memory or the matrix unit gives, against cells of the same
kind. Exit code 1 when an output is wrong, something failed, or a cell is below the floor.
"""
from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import zoo  # noqa: E402
from native import OBJECT, Native, NativeError  # noqa: E402

FLOOR = 0.97  # of the peer's speed
NEIGHBOURS = 0.5  # of the median share of cells of its kind


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--object", type=Path, default=ROOT / "build" / OBJECT, help="the object to load (default: %(default)s)")
    parser.add_argument("--fa3", type=Path, metavar="LIBRARY", help="_vllm_fa3_C.abi3.so of a wheel of vLLM")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose names this matches somewhere; see --list")
    parser.add_argument("--backend", default="auto", help="cuda_sm80, cuda_sm90, or auto: what select() says (default)")
    parser.add_argument("--seconds", type=float, default=480, help="cells that are not begun by then are not run (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for everything that was measured")
    parser.add_argument("--draw", type=int, metavar="N", help="so many cells drawn at random, of the same layers, instead of the table's")
    parser.add_argument("--seed", type=int, default=0, help="of --draw: the same cells for the same seed (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the cells and leave")
    return parser.parse_args()


def row_of(result: dict) -> str:
    if result["status"] != "ok":
        return f"{result['cell']:62} {result['status']}: {result['why']}"
    peer = f"{result['peer_us']:9.1f} {result['ratio']:6.2f}" if "ratio" in result else f"{'-':>9} {'-':>6}"
    return f"{result['cell']:62} {result['us']:9.1f} {peer} {result['rate']:7.2f} {result['unit']:7} {result['beside']:5.2f}"


def measure(runner, cell, peers) -> dict:
    begin = {"cell": cell.name, "group": cell.group, "unit": cell.unit}
    try:
        found = runner.beside(cell, peers)
    except (NativeError, RuntimeError, ValueError) as error:
        return {**begin, "status": "failed", "why": str(error).splitlines()[0][:200]}
    if found["check"]["failure"]:
        return {**begin, "status": "wrong", "why": found["check"]["failure"], "plan": found["plan"]}
    result = {**begin, "status": "ok", "us": found["us"], "rate": cell.rate(found["us"]), "plan": found["plan"], "peers": found["live"]}
    if found["live"]:
        result["peer_us"] = min(found["live"].values())
        result["ratio"] = result["peer_us"] / found["us"]
    return result


def judge(results: list[dict]) -> list[dict]:
    """Cells below a floor. Adds to each its rate relative to the median of its group."""
    done = [r for r in results if r["status"] == "ok"]
    medians = {group: statistics.median(r["rate"] for r in done if r["group"] == group) for group in {r["group"] for r in done}}
    for result in done:
        result["beside"] = result["rate"] / medians[result["group"]]
    return [r for r in done if r.get("ratio", 1.0) < FLOOR or ("ratio" not in r and r["beside"] < NEIGHBOURS)]


def summary(results: list[dict]) -> str:
    lines = []
    for group in dict.fromkeys(r["group"] for r in results):
        ratios = sorted(r["ratio"] for r in results if r["group"] == group and "ratio" in r)
        if ratios:
            below = sum(ratio < FLOOR for ratio in ratios)
            lines.append(f"{group:10} {len(ratios):4} cells, median {statistics.median(ratios):.3f}, worst {ratios[0]:.3f}, {below} below {FLOOR}")
    return "\n".join(lines)


def main() -> int:
    args = arguments()
    every = zoo.load() if args.draw is None else zoo.drawn(args.draw, args.seed)
    cells = [cell for cell in every if re.search(args.only, cell.name)]
    if args.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    import gpu_bench

    gpu_bench.find_compiler()
    native = Native(args.object)
    begin = time.monotonic()
    native.compile_specs("cuda:0", args.backend, gpu_bench.specs_of(cells))
    print(f"{len(cells)} cells, kernels ready after {time.monotonic() - begin:.0f} s", flush=True)
    import fa3
    from runner import Runner

    peers = lambda *_: {}
    if args.fa3:
        fa3.load(args.fa3)
        peers = fa3.peers
    runner = Runner(native, args.backend, quick=True)
    results = []
    for cell in cells:
        if time.monotonic() - begin > args.seconds:
            results.append({"cell": cell.name, "group": cell.group, "unit": cell.unit, "status": "not run", "why": "no time"})
        else:
            results.append(measure(runner, cell, peers))
            last = results[-1]
            print(f"{last['cell']}: {last['status']} {last.get('us', 0):.1f} {last.get('ratio', 0):.2f}", file=sys.stderr, flush=True)
    cliffs = judge(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    print(f"{'cell':62} {'us':>9} {'peer us':>9} {'ratio':>6} {'rate':>7} {'':7} beside")
    print("\n".join(row_of(r) for r in results))
    worst = sorted((r for r in results if "ratio" in r), key=lambda r: r["ratio"])[:10]
    print("\nworst ten:\n" + "\n".join(row_of(r) for r in worst or sorted(cliffs, key=lambda r: r["beside"])[:10]))
    print("\n" + summary(results))
    bad = [r for r in results if r["status"] in ("wrong", "failed")]
    print(f"{len(cliffs)} cliffs, {len(bad)} wrong or failed, {sum(r['status'] == 'not run' for r in results)} not run")
    return 1 if cliffs or bad or not results else 0


if __name__ == "__main__":
    sys.exit(main())
