"""The meaning of arguments: layouts, element types, position encodings, backends, and refusals of those that imbrex does not have."""
import functools
import math
from typing import Any, Dict, Optional, Union

import torch

from .. import _core
from .._frameworks import dtype_name

DTypeLike = Union[str, torch.dtype]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def refuse(what: str, instead: str) -> None:
    raise NotImplementedError(f"imbrex.flashinfer: {what} is not there: {instead}")


def refuse_given(instead: str, **arguments: Any) -> None:
    """Refuses the first argument that is neither None, False nor 0."""
    for name, value in arguments.items():
        if torch.is_tensor(value) or value:
            refuse(f"{name}=", instead)


def refuse_vendor_arguments(**arguments: Any) -> None:
    refuse_given("it belongs to kernels of NVIDIA's libraries; leave it out", **arguments)


def refuse_jit(jit_args: Any, jit_kwargs: Any = None) -> None:
    refuse_given(
        "attention variants are no CUDA text here; sinks, soft cap, ALiBi, windows and custom masks are arguments",
        jit_args=jit_args is not None,
        jit_kwargs=jit_kwargs is not None,
    )


def refuse_nvfp4(kv_cache_sf: Any, *caches: torch.Tensor) -> None:
    if kv_cache_sf is not None or any(c.dtype == torch.uint8 for c in caches):
        refuse("a KV cache in NVFP4", "fp8 caches (torch.float8_e4m3fn, with k_scale and v_scale) are as small as it gets")


def refuse_multi_item(prefix_len_ptr: Any, token_pos_in_items_ptr: Any, token_pos_in_items_len: int, max_item_len_ptr: Any) -> None:
    refuse_given(
        "for multi-item scoring give plan() a custom_mask",
        prefix_len_ptr=prefix_len_ptr,
        token_pos_in_items_ptr=token_pos_in_items_ptr,
        token_pos_in_items_len=token_pos_in_items_len,
        max_item_len_ptr=max_item_len_ptr,
    )


def torch_dtype(dtype: DTypeLike) -> torch.dtype:
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def spec_dtype(dtype: torch.dtype) -> str:
    """imbrex's name of an element type."""
    return dtype_name(torch.empty(0, dtype=dtype, device="cpu"))


def check_supported(q_type: torch.dtype, kv_type: torch.dtype, *head_dims: int) -> None:
    """Refuses types and dimensions that no spec has."""
    numbers = (torch.float32, torch.float16, torch.bfloat16)
    if q_type not in (*numbers, torch.float8_e4m3fn):
        refuse(f"q_data_type={q_type}", "queries are float32, float16, bfloat16 or float8_e4m3fn")
    if kv_type == torch.uint8:
        refuse_nvfp4(True)
    if kv_type not in (*numbers, *FP8):
        refuse(f"kv_data_type={kv_type}", "caches are float32, float16, bfloat16, float8_e4m3fn or float8_e5m2")
    if q_type in FP8 and kv_type != q_type:
        refuse(f"q_data_type={q_type} with kv_data_type={kv_type}", "fp8 queries go with keys of their own type")
    for head_dim in head_dims:
        if not 0 < head_dim <= 576 or head_dim % 8:
            refuse(f"head_dim {head_dim}", "pad q, k and v with zeros to a multiple of 8, at most 576, and give sm_scale")


def check_layout(kv_layout: str) -> str:
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"kv_layout: expected NHD or HND, got {kv_layout!r}")
    return kv_layout


def backend_name(backend: str) -> str:
    """The backend for imbrex.Plan: a name of FlashInfer's kernels leaves the choice to imbrex, a name of imbrex forces that backend."""
    if backend in ("auto", "fa2", "fa3"):
        return ""
    names = [name for name, _ in _core.backends()]
    if backend not in names:
        refuse(f"backend={backend!r}", "auto, fa2 and fa3 take what imbrex selects; its own names are " + ", ".join(names))
    return backend


def has_alibi(pos_encoding_mode: str) -> bool:
    if pos_encoding_mode == "ROPE_LLAMA":
        refuse("pos_encoding_mode='ROPE_LLAMA'", "rotate q, and k before it is appended")
    if pos_encoding_mode not in ("NONE", "ALIBI"):
        raise ValueError(f"pos_encoding_mode: expected NONE, ALIBI or ROPE_LLAMA, got {pos_encoding_mode!r}")
    return pos_encoding_mode == "ALIBI"


@functools.lru_cache(maxsize=None)
def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """float32 [num_heads]: 2^(-8 i / n) of the largest power of two n, then every other one of 2n."""
    n = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / n) for i in range(1, n + 1)]
    slopes += [2.0 ** (-4.0 * i / n) for i in range(1, 2 * (num_heads - n) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def window(window_left: int) -> int:
    return max(int(window_left), -1)


def soft_cap(logits_soft_cap: Optional[float]) -> float:
    return max(float(logits_soft_cap or 0.0), 0.0)


def scale(sm_scale: Optional[float]) -> float:
    """As AttentionSpec takes it: 0 is 1 / sqrt(head_dim_qk)."""
    if sm_scale is None:
        return 0.0
    if not math.isfinite(sm_scale) or sm_scale == 0:
        raise ValueError(f"sm_scale: expected a finite number other than 0, got {sm_scale}")
    return float(sm_scale)


def score_fields(
    pos_encoding_mode: str, window_left: int, logits_soft_cap: Optional[float], sm_scale: Optional[float]
) -> Dict[str, Union[bool, int, float]]:
    """Fields of AttentionSpec of arguments that plan() and the deprecated forward() share."""
    return dict(
        alibi=has_alibi(pos_encoding_mode),
        window_left=window(window_left),
        soft_cap=soft_cap(logits_soft_cap),
        scale=scale(sm_scale),
    )
