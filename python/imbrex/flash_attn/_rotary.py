"""Rotary positions: pairs of numbers of a head turned by angles that grow with the position."""
from typing import Optional, Tuple, Union

import torch

Tensor = torch.Tensor


def check_angles(cos: Tensor, sin: Tensor, head_dim: int) -> None:
    """cos and sin [positions, rotary_dim / 2]."""
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"imbrex.flash_attn: rotary cos and sin: expected [positions, rotary_dim / 2] each with rotary_dim <= {head_dim}, got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )


def pair(x: Tensor, half: int, interleaved: bool) -> Tuple[Tensor, Tensor]:
    """Views of the two numbers of each pair in the first 2 * half dims."""
    part = x[..., : 2 * half]
    return (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, conjugate: bool = False, inplace: bool = False) -> Tensor:
    """x [.., heads, d] with its first 2 * cos.shape[1] dims turned by the angles at positions [..]; backwards with conjugate.

    Positions outside of the tables take their ends: on a GPU nobody can see them in time to say more.
    """
    at = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = (a[at][..., None, :].float() for a in (cos, sin))
    s = -s if conjugate else s
    out = x if inplace else x.clone()
    a, b = (part.float() for part in pair(x, cos.shape[1], interleaved))
    turned = a * c - b * s, a * s + b * c
    for into, values in zip(pair(out, cos.shape[1], interleaved), turned):
        into.copy_(values)
    return out


def positions_of(x: Tensor, offsets: Union[int, Tensor], cu_seqlens: Optional[Tensor]) -> Tensor:
    """The positions of the tokens of x [batch, seqlen, ..], or with cu_seqlens [total, ..]; offsets: positions of the first tokens, int or [batch]."""
    if cu_seqlens is None:
        tokens = torch.arange(x.shape[1], device=x.device)
        return tokens.expand(x.shape[:2]) + (offsets.to(x.device)[:, None] if torch.is_tensor(offsets) else offsets)
    tokens = torch.arange(x.shape[0], device=x.device)
    starts = cu_seqlens.to(x.device)
    request = torch.searchsorted(starts[1:].contiguous(), tokens, right=True).clamp(max=len(starts) - 2)
    return tokens - starts[request] + (offsets.to(x.device)[request] if torch.is_tensor(offsets) else offsets)
