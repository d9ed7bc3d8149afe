"""How long a model's plans take to be ready, in a process of its own: start.py OBJECT BACKEND. Prints milliseconds.

The layers of llama-3.1-8b are of one kind; an engine makes one plan for every step and one for graphs of decode. The context is made before
the clock starts: the framework around an engine has one.
"""
from __future__ import annotations

import ctypes
import sys
import time

from native import Native, Plan

LLAMA = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "kv": "bf16", "page": 16, "causal": True}
LIMITS = {"requests": 256, "tokens": 8192, "seq_len": 131072, "query_len": 0}
DECODE = {**LIMITS, "tokens": 256, "query_len": 1}


def make_context(index: int) -> None:
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    calls = (driver.cuInit(0), driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), index), driver.cuCtxSetCurrent(context))
    if any(calls):
        raise RuntimeError(f"no context on cuda:{index}: the driver answers {calls}")


def main() -> None:
    native = Native(sys.argv[1])
    make_context(0)
    begin = time.perf_counter()
    plans = [Plan(native, "cuda:0", sys.argv[2], LLAMA, limits) for limits in (LIMITS, DECODE)]
    print((time.perf_counter() - begin) * 1e3)
    for plan in plans:
        plan.close()


if __name__ == "__main__":
    main()
