"""The format amx_packed in the pages of imbrex.vllm: where keys and values lie, and their rows by PyTorch alone. docs/kv-formats.md has the formulas."""

import functools
from typing import Any

FORMAT = "amx_packed"


@functools.lru_cache(maxsize=None)
def positions(side: str, block_size: int, head_dim: int, element_size: int) -> Any:
    """int64 [block_size, head_dim]: where an element of a token lies within one head's block of keys ("k") or values ("v"), in elements.

    block_size is a multiple of 16, head_dim one of 32.
    """
    import torch

    t = torch.arange(block_size, device="cpu")[:, None]
    d = torch.arange(head_dim, device="cpu")[None, :]
    if side == "k":
        e = ((t // 16 * (head_dim // 32) + d // 32) * 16 + d % 32 // 2) * 32 + t % 16 * 2 + d % 2
    else:
        group = t // 32 * 32
        rows = torch.where(group + 32 <= block_size, 16, 8)  # of a tile; the last 16 tokens of an odd number of 16s are half a group
        e = group * head_dim + (d // 16 * rows + (t - group) // 2) * 32 + d % 16 * 2 + t % 2
    if element_size == 1:
        e = e // 64 * 64 + e % 32 * 2 + e % 64 // 32
    return e


def fits(spec_fields: Any) -> bool:
    """Whether a layer's keys and values may be packed, in blocks of as many bytes as plain ones. spec_fields: arguments of AttentionSpec."""
    return (
        spec_fields["kv_dtype"] in ("bf16", "fp8_e4m3", "fp8_e5m2")
        and spec_fields["block_size"] > 0
        and spec_fields["block_size"] % 16 == 0
        and spec_fields["head_dim_qk"] % 32 == spec_fields["head_dim_v"] % 32 == 0
    )


def halves(pages: Any, k_dim: int) -> Any:
    """Keys and values, uint8 [num_blocks, heads, bytes], of pages [num_blocks, heads, tokens, k and v dims] whose head's block is one piece of
    memory: it begins with the keys."""
    import torch

    tokens, dims = pages.shape[2:]
    if pages.stride(3) != 1 or (tokens > 1 and pages.stride(2) != dims):
        raise NotImplementedError(
            f"imbrex: expected pages whose last two dimensions are one piece of memory for {FORMAT}, got {list(pages.shape)} with strides "
            f"{list(pages.stride())}"
        )
    flat, k_bytes = pages.view(torch.uint8).flatten(2), tokens * k_dim * pages.element_size()
    return flat[..., :k_bytes], flat[..., k_bytes:]


def _place(side: str, pages: Any, dtype: Any, block_size: int, head_dim: int, slots: Any) -> Any:
    """Returns the elements of `pages` as `dtype`, and the three indices of rows [n, heads, head_dim] in them."""
    import torch

    elements = pages.view(dtype)
    where = positions(side, block_size, head_dim, dtype.itemsize)
    heads = torch.arange(pages.shape[1], device="cpu")
    return elements, (slots[:, None, None] // block_size, heads[None, :, None], where[slots % block_size][:, None, :])


def read_rows(side: str, pages: Any, dtype: Any, block_size: int, head_dim: int, slots: Any) -> Any:
    """Reads the rows at slots [n]: [n, heads, head_dim]. dtype is that of an element: bfloat16, or uint8 for fp8."""
    elements, index = _place(side, pages, dtype, block_size, head_dim, slots)
    return elements[index]


def write_rows(side: str, pages: Any, rows: Any, block_size: int, slots: Any) -> None:
    """Writes rows [n, heads, head_dim], of the elements' type, to slots [n]."""
    elements, index = _place(side, pages, rows.dtype, block_size, rows.shape[-1], slots)
    elements[index] = rows
