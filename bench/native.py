"""The library as Python sees it: plans, steps and launches over raw addresses, through the object that bridge.cpp becomes."""
from __future__ import annotations

import ctypes
import json
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

OBJECT = "libimbrex_bench.so"


class NativeError(RuntimeError):
    """An Error of the library; `code` is listed in docs/errors.md."""

    @property
    def code(self) -> str:
        return str(self).partition(":")[0]


class Native:
    def __init__(self, path: Path | str):
        self.lib = ctypes.CDLL(str(path))
        for name, result, arguments in (
            ("error", c_char_p, []),
            ("plan", c_void_p, [c_char_p]),
            ("free", None, [c_void_p]),
            ("describe", c_char_p, [c_void_p]),
            ("update", c_int, [c_void_p, c_int, POINTER(c_int32), POINTER(c_int32), c_void_p, c_int64, c_void_p]),
            ("run", c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
            ("sinks", None, [c_void_p, c_void_p]),
            ("custom_mask", None, [c_void_p, c_void_p, c_int64]),
            ("tensor", c_int, [c_void_p, c_int, c_char_p, c_void_p, c_char_p, c_int, POINTER(c_int64)]),
            ("host_us", c_double, [c_void_p, c_int, c_int, c_void_p]),
            ("compile", c_int, [c_char_p]),
        ):
            function = getattr(self.lib, f"imbrex_bench_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def checked(self, result):
        if result is None or result == -1:
            raise NativeError(self.error().decode())
        return result

    def compile_specs(self, device: str, backend: str, specs: list[dict], folder: str = "") -> int:
        """Fills a folder ("": IMBREX_CUDA_CACHE or its default) with the kernels that plans of the backend ("auto": what select() says) usually run;
        how many were not there yet."""
        return self.checked(self.compile(json.dumps({"device": device, "backend": backend, "specs": specs, "folder": folder}).encode()))


class Plan:
    """limits: requests, tokens, seq_len, query_len, and where wanted min_query_len, shared_prompts. Addresses are integers; the caller keeps what
    they name alive."""

    def __init__(self, native: Native, device: str, backend: str, spec: dict, limits: dict, balanced: bool = False, host_table: bool = False):
        self.native, self.handle = native, None
        request = {"device": device, "backend": backend, "spec": spec, "limits": limits, "balanced": balanced, "host_table": host_table}
        self.handle = native.checked(native.plan(json.dumps(request).encode()))

    def update(self, query_start: list[int], seq_lens: list[int], keys: int, columns: int = 0, stream: int = 0) -> None:
        """keys: a block table [requests, columns] in the device's memory, or with host_table on the host, or starts of ragged keys on the host."""
        starts, lens = (c_int32 * len(query_start))(*query_start), (c_int32 * len(seq_lens))(*seq_lens)
        self.native.checked(self.native.update(self.handle, len(seq_lens), starts, lens, keys, columns, stream))

    def run(self, q: int, k: int, v: int, count: int, stride: int, out: int, stream: int = 0) -> None:
        """k, v: `count` pages (rows where there are none), `stride` elements apart. Where values are a part of the keys, v is 0."""
        if self.native.run(self.handle, q, k, v, count, stride, out, stream) != 0:
            raise NativeError(self.native.error().decode())

    def set_sinks(self, sinks: int) -> None:
        self.native.sinks(self.handle, sinks)

    def set_custom_mask(self, mask: int, count: int) -> None:
        """Sets the custom mask of the updates that follow: so many bytes."""
        self.native.custom_mask(self.handle, mask, count)

    def add_tensor(self, of_mask: bool, name: str, data: int, dtype: str, sizes: tuple[int, ...]) -> None:
        """A contiguous tensor that the mask_mod reads, which lies on the host, or the score_mod, on the plan's device."""
        self.native.checked(self.native.tensor(self.handle, int(of_mask), name.encode(), data, dtype.encode(), len(sizes), (c_int64 * len(sizes))(*sizes)))

    def host_us(self, of_update: bool, calls: int, stream: int = 0) -> float:
        return self.native.checked(self.native.host_us(self.handle, int(of_update), calls, stream))

    def __str__(self) -> str:
        return self.native.checked(self.native.describe(self.handle)).decode()

    def close(self) -> None:
        self.native.free(self.handle)
        self.handle = None

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_) -> None:
        self.close()
