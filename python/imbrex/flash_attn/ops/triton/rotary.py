"""flash_attn.ops.triton.rotary's apply_rotary in PyTorch's operations: for every device, and differentiable."""
from typing import Optional, Union

import torch

from imbrex.flash_attn._rotary import check_angles, positions_of, rotate


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: Union[int, torch.Tensor] = 0,
    cu_seqlens: Optional[torch.Tensor] = None,
    max_seqlen: Optional[int] = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> torch.Tensor:
    """x [batch, seqlen, heads, d], or [total, heads, d] with cu_seqlens, with its first rotary_dim dims turned; backwards with conjugate.

    cos and sin [positions, rotary_dim / 2]; a request's first token is at seqlen_offsets, int or [batch]. inplace: into x. max_seqlen changes
    nothing.
    """
    check_angles(cos, sin, x.shape[-1])
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise ValueError(f"imbrex.flash_attn: x: expected [batch, seqlen, heads, d], or [total, heads, d] with cu_seqlens, got {list(x.shape)}")
    if cu_seqlens is None and isinstance(seqlen_offsets, int) and seqlen_offsets + x.shape[1] > cos.shape[0]:
        raise ValueError(f"imbrex.flash_attn: cos and sin: expected {seqlen_offsets + x.shape[1]} positions, got {cos.shape[0]}")
    return rotate(x, cos, sin, positions_of(x, seqlen_offsets, cu_seqlens), interleaved, conjugate, inplace)
