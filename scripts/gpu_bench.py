#!/usr/bin/env python3
"""Attention on one GPU against PyTorch's cuDNN and FA2 in the same process, and against peers measured elsewhere (bench/cells.json).

Needs PyTorch and the object `libimbrex_bench.so` of a build; no network. Every cell's output is compared with float64 on random inputs. The
tables come last: every cell, then a line for each group. Exit code 1 when an output is wrong, something failed, or nothing ran.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

import cells  # noqa: E402
import results  # noqa: E402
from native import OBJECT, Native, NativeError  # noqa: E402

REFUSALS = ("select.forced", "backend.unsupported")
HOST_CELL = "decode/p16/4096x256"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--object", type=Path, default=ROOT / "build" / OBJECT, help="the object to load (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="REGEX", help="cells whose names begin like this, such as decode/p64; see --list")
    parser.add_argument("--backend", default="auto", help="cuda_sm80, cuda_sm90, or auto: what select() says (default)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the repetitions, fewer rows compared")
    parser.add_argument("--seconds", type=float, default=480, help="cells that are not begun by then are not run (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="file for everything that was measured")
    parser.add_argument("--no-extras", action="store_true", help="leave out the times of start and of the host")
    parser.add_argument("--list", action="store_true", help="print the cells and leave")
    parser.add_argument("--compile", metavar="FOLDER", help="only fill a folder for IMBREX_CUDA_CACHE with the cells' kernels; no GPU needed")
    parser.add_argument("--device", default="h200", help="with --compile: for which GPU (default: %(default)s)")
    return parser.parse_args()


def specs_of(chosen: list[cells.Cell]) -> list[dict]:
    unique = {json.dumps(cell.spec()): cell.spec() for cell in chosen}
    return list(unique.values())


def find_compiler() -> None:
    """PyTorch brings NVRTC along, in a folder where nobody looks for it."""
    import torch

    home = Path(torch.__file__).parents[1] / "nvidia/cu13"
    if "CUDA_HOME" not in os.environ and home.is_dir():
        os.environ["CUDA_HOME"] = str(home)


def start_times(args: argparse.Namespace) -> dict:
    """Milliseconds until a model's plans are ready: with no compiled kernel on disk, then with all of them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "IMBREX_CUDA_CACHE": folder}
        command = [sys.executable, str(ROOT / "bench/start.py"), str(args.object), args.backend]
        run = lambda: float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout)
        return {"cold_ms": run(), "warm_ms": min(run() for _ in range(3))}


def extras_of(args: argparse.Namespace, runner, table: list[cells.Cell]) -> dict:
    host_cell = next(cell for cell in table if cell.name == HOST_CELL)
    extras: dict = {}
    for name, measure in (("start", lambda: start_times(args)), ("host", lambda: runner.host_costs(host_cell))):
        try:
            extras[name] = measure()
        except (NativeError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            extras[name] = {"failed": said[-1]}
        print(f"{name}: {extras[name]}", flush=True)
    return extras


def run_cell(runner, cell: cells.Cell, found: dict[str, dict]) -> dict:
    import torch

    try:
        measured = runner.measure(cell)
    except NativeError as error:
        return {"cell": cell.name, "status": "refused" if error.code in REFUSALS else "failed", "why": str(error)}
    except torch.OutOfMemoryError as error:
        return {"cell": cell.name, "status": "not run", "why": str(error)}
    except (RuntimeError, ValueError) as error:
        return {"cell": cell.name, "status": "failed", "why": str(error)}
    result = results.judge(cell, measured["us"], measured["live"], found.get(cell.base, {}).get("us"))
    result |= {key: measured[key] for key in ("check", "plan", "eager_us") if key in measured}
    if measured["check"]["failure"]:
        result |= {"status": "wrong", "why": measured["check"]["failure"]}
        result.pop("met", None)
    return result


def bench(args: argparse.Namespace, chosen: list[cells.Cell], table: list[cells.Cell]) -> int:
    import torch

    from runner import Runner

    began = time.monotonic()
    find_compiler()
    seed = int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(seed)
    native = Native(args.object)
    report: dict = {
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "seed": seed,
        "backend": args.backend,
        "quick": args.quick,
        "peers": cells.origin(),
    }
    print(f"{report['gpu']}, PyTorch {report['torch']}, cuDNN {report['cudnn']}, seed {seed}", flush=True)
    torch.cuda.init()
    try:
        compiled = f"{native.compile_specs('cuda:0', args.backend, specs_of(chosen))} kernels compiled"
    except NativeError as error:  # the cells that it concerns will say so too
        compiled = str(error)
    print(f"{time.monotonic() - began:5.0f} s  {compiled}", flush=True)

    runner = Runner(native, args.backend, args.quick)
    found: dict[str, dict] = {}
    broken = ""
    for cell in chosen:
        elapsed = time.monotonic() - began
        if broken or elapsed > args.seconds:
            found[cell.name] = {"cell": cell.name, "status": "not run", "why": broken or f"{args.seconds:.0f} s were over"}
            continue
        found[cell.name] = run_cell(runner, cell, found)
        print(f"{elapsed:5.0f} s  " + "  ".join(filter(None, results.row(found[cell.name]))), flush=True)
        if found[cell.name]["status"] == "failed":
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                broken = f"{cell.name} has left the GPU unusable: {error}"
        report |= {"cells": list(found.values()), "seconds": time.monotonic() - began}
        save(args, report)
    if not args.no_extras and not broken:
        report["extras"] = extras_of(args, runner, table)
    report |= {"cells": list(found.values()), "seconds": time.monotonic() - began}
    save(args, report)
    print("\n" + results.table(report["cells"]))
    for name, values in report.get("extras", {}).items():
        print(f"{name}: " + ", ".join(f"{key} {value if isinstance(value, str) else round(value, 1)}" for key, value in values.items()))
    print(*filter(None, [results.drifts(report["cells"]), strangeness(report)]), sep="\n")
    print(f"\n{results.short_table(report['cells'])}\n{report['seconds']:.0f} s")
    states = [result["status"] for result in report["cells"]]
    states += ["failed" for extra in report.get("extras", {}).values() if "failed" in extra]
    return 0 if "ok" in states and not {"wrong", "failed"} & set(states) else 1


def strangeness(report: dict) -> str:
    recorded = report["peers"]["device"].partition(",")[0]
    return "" if report["gpu"] == recorded else f"the recorded peers ran on another GPU ({recorded}): what is below a floor says little"


def save(args: argparse.Namespace, report: dict) -> None:
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    args = arguments()
    table = cells.load()
    chosen = cells.chosen(table, args.only)
    if not chosen:
        print(f"gpu_bench: no cell's name begins with {args.only}", file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(cell.name for cell in chosen))
        return 0
    if not args.object.is_file():
        print(f"gpu_bench: {args.object} is missing: build the target imbrex_bench", file=sys.stderr)
        return 2
    if args.compile:
        compiled = Native(args.object).compile_specs(args.device, args.backend, specs_of(chosen), args.compile)
        print(f"{compiled} kernels compiled into {args.compile}")
        return 0
    return bench(args, chosen, table)


if __name__ == "__main__":
    sys.exit(main())
