"""Requests with random keys, and what each step's outputs are held to: attention in float64 over the request's own keys."""

import numpy as np
import torch
from reference import attention

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def rounded(x, kv_dtype, scale=1.0):
    """What a cache of this type gives back of x."""
    if kv_dtype not in FP8:
        return x
    kind = FP8[kv_dtype]
    most = torch.finfo(kind).max
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device).reshape(-1, 1)
    return (x.float() / scale).clamp(-most, most).to(kind).float() * scale


class Request:
    """A request of `length` tokens, of which `computed` are in the cache. keys and values: a tensor [length, heads, dim] for each layer."""

    def __init__(self, name, length, shapes, dtype, device):
        self.name, self.length, self.computed = name, length, 0
        self.keys = [torch.randn(length, heads, d, device=device).to(dtype) for heads, d, _ in shapes]
        self.values = [torch.randn(length, heads, d, device=device).to(dtype) for heads, _, d in shapes]


def check(out, q, k, v, dtype, what, **options):
    """out and q [tokens, heads, dim], k and v [keys, heads, dim]."""
    expected, _ = attention(*(x.float().cpu().numpy() for x in (q, k, v)), **options)
    error = np.abs(out.float().cpu().numpy() - expected).max() if out.numel() else 0.0
    assert error < TOLERANCE[dtype], f"{what}: off by {error}"
