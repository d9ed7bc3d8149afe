#!/usr/bin/env python3
"""Times a step of requests that begin with the same pages, beside FlashInfer's cascade in one process and in turn, calls in CUDA graphs, and
compares rows of the outputs with float64.

A cell is q heads/kv heads:requests x common keys + own keys, with q and a number for query tokens of each request (drafts, the last of its
keys): "32/8:64x8192+100", "96/8:64x8192+100q5". Keys are bf16, heads of 128 dims, pages of 16, in the layout [pages, 2, 16, heads, 128]; all
libraries are given the same pages in the same order. With several caches the calls of a graph take turns at them, as layers of a model do, so
that keys come from DRAM.

FlashInfer's cascade is timed as its wrapper chooses (FA3 on Hopper) and with FA2 on both levels; "by hand" are the wrapper's kernels without the
fills in front of them, with FA2 or with FA3 for the prompt and FA2 for the rest. "apart" reads the prompt once for every request.
"""
from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from cascade_cells import Cell  # noqa: E402
from native import OBJECT, Native  # noqa: E402

CELLS = [f"{heads}:64x8192+100{drafts}" for drafts in ("", "q5") for heads in ("32/8", "32/2", "96/8")]


def cell_of(text: str) -> Cell:
    try:
        return Cell.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", type=cell_of, default=[Cell.parse(text) for text in CELLS])
    parser.add_argument("--library", type=Path, default=ROOT / "build" / OBJECT, help="the object to load (default: %(default)s)")
    parser.add_argument("--flashinfer", nargs="?", const="", metavar="FOLDER", help="with FlashInfer, from this folder if it is not installed")
    parser.add_argument("--caches", type=int, nargs="+", default=[1, 8], help="numbers of caches, one after the other (default: 1 8)")
    parser.add_argument("--calls", type=int, default=20, help="calls of a graph (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (default: %(default)s)")
    parser.add_argument("--ms", type=float, default=20, help="milliseconds of a turn (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=131072, help="tokens of a request that plans are made for (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="greatest error of a right output (default: %(default)s)")
    parser.add_argument("--plans", action="store_true", help="print what imbrex says of its plans")
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    if not args.library.exists():
        parser.error(f"{args.library} is not there: build the target imbrex_bench")
    return args


def main() -> int:
    args = arguments()
    import torch

    import cascade

    home = Path(torch.__file__).parents[1] / "nvidia/cu13"  # PyTorch brings NVRTC along, in a folder where nobody looks for it
    if "CUDA_HOME" not in os.environ and home.is_dir():
        os.environ["CUDA_HOME"] = str(home)
    if args.flashinfer:
        sys.path.insert(0, args.flashinfer)
    native, wrong = Native(args.library), False
    print(f"{torch.cuda.get_device_name()}\n{'cell':22} {'caches':6} {'way':35} {'best us':>8} {'median':>8} {'':8}  error", flush=True)
    for cell in args.cells:
        for caches in args.caches:
            rows = cascade.measure(native, cell, caches, flashinfer=args.flashinfer is not None, calls=args.calls, rounds=args.rounds,
                                   ms=args.ms, longest=args.longest, seed=args.seed)  # fmt: skip
            wrong |= any(not row.refused and not row.error <= args.tolerance for row in rows)
            print(cascade.table(cell, caches, rows, args.tolerance), flush=True)
            for row in rows if args.plans else ():
                if row.plan:
                    print(f"{row.way}: {row.plan}", flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
