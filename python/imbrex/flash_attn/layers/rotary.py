"""flash_attn.layers.rotary in PyTorch's operations: for every device; gradients are PyTorch's own."""
from typing import Optional, Tuple, Union

import torch

from imbrex.flash_attn.ops.triton.rotary import apply_rotary

Tensor = torch.Tensor


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair (a, b) of the last dimension as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [batch, seqlen, heads, d], cos and sin [seqlen, rotary_dim / 2] or [batch, seqlen, rotary_dim / 2], in x's type."""
    dim = 2 * cos.shape[-1]
    if dim > x.shape[-1]:
        raise ValueError(f"imbrex.flash_attn: cos and sin: expected at most {x.shape[-1] // 2} columns, got {cos.shape[-1]}")
    c, s = ((t.repeat_interleave(2, -1) if interleaved else torch.cat((t, t), -1))[..., None, :] for t in (cos, sin))
    return torch.cat((x[..., :dim] * c + rotate_half(x[..., :dim], interleaved) * s, x[..., dim:]), -1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Union[int, Tensor] = 0,
    cu_seqlens: Optional[Tensor] = None,
    max_seqlen: Optional[int] = None,
) -> Tensor:
    """x [batch, seqlen, heads, d], or [total, heads, d] with cu_seqlens, with its first rotary_dim dims turned by cos and sin.

    cos and sin [positions, rotary_dim / 2]; a request's first token is at seqlen_offsets, int or [batch].
    """
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Optional[Tensor] = None,
    sin_k: Optional[Tensor] = None,
    interleaved: bool = False,
    seqlen_offsets: Union[int, Tensor] = 0,
    num_heads_q: Optional[int] = None,
) -> Tensor:
    """q and k of qkv [batch, seqlen, 3, heads, d] or, with num_heads_q, [batch, seqlen, num_heads_q + 2 * num_heads_k, d], in place."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        q, k, _ = qkv.split((num_heads_q, (qkv.shape[2] - num_heads_q) // 2, (qkv.shape[2] - num_heads_q) // 2), 2)
    else:
        raise ValueError(
            "imbrex.flash_attn: qkv: expected [batch, seqlen, 3, heads, d], or [batch, seqlen, num_heads_q + 2 * num_heads_k, d] with "
            f"num_heads_q, got {list(qkv.shape)} with num_heads_q {num_heads_q}"
        )
    apply_rotary(q, cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True)
    apply_rotary(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, seqlen_offsets, interleaved=interleaved, inplace=True)
    return qkv


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Union[int, Tensor] = 0) -> Tensor:
    """k of kv [batch, seqlen, 2, heads, d] in place."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"imbrex.flash_attn: kv: expected [batch, seqlen, 2, heads, d], got {list(kv.shape)}")
    apply_rotary(kv[:, :, 0], cos, sin, seqlen_offsets, interleaved=interleaved, inplace=True)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Turns q and k by angles position * base^(-2 i / dim); with scale_base they shrink and grow with the position too (xPos)."""

    def __init__(
        self, dim: int, base: float = 10000.0, interleaved: bool = False, scale_base: Optional[float] = None, device: Optional[torch.device] = None
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        even = torch.arange(0, dim, 2, dtype=torch.float32, device=device)
        self.register_buffer("inv_freq", self.base ** (-even / dim), persistent=False)
        self.register_buffer("scale", None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim), persistent=False)
        self._tables: Tuple[Tensor, ...] = ()  # cos and sin of q, cos and sin of k

    def _angles(self, count: int, like: Tensor) -> Tuple[Tensor, ...]:
        """Makes the tables for at least `count` positions, in the type and on the device of q. Angles are float32 also where the module has another type."""
        tables = self._tables
        if tables and len(tables[0]) >= count and tables[0].device == like.device and tables[0].dtype == like.dtype:
            return tables
        position = torch.arange(count, dtype=torch.float32, device=like.device)
        even = torch.arange(0, self.dim, 2, dtype=torch.float32, device=like.device)
        angles = torch.outer(position, self.base ** (-even / self.dim))
        grow = torch.ones_like(angles)
        if self.scale is not None:
            grow = self.scale.to(like.device, torch.float32) ** ((position - count // 2) / self.scale_base)[:, None]
        self._tables = tuple(t.to(like.dtype) for t in (angles.cos() * grow, angles.sin() * grow, angles.cos() / grow, angles.sin() / grow))
        return self._tables

    def forward(
        self,
        qkv: Tensor,
        kv: Optional[Tensor] = None,
        seqlen_offset: Union[int, Tensor] = 0,
        max_seqlen: Optional[int] = None,
        num_heads_q: Optional[int] = None,
    ) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        """In place: qkv as apply_rotary_emb_qkv_ has it, or q [batch, seqlen, heads, d] with kv [batch, seqlen, 2, heads_k, d].

        With seqlen_offset in a tensor, max_seqlen says how many positions there may be. Returns what was given.
        """
        if max_seqlen is None and torch.is_tensor(seqlen_offset) and not self._tables:
            raise ValueError("imbrex.flash_attn: max_seqlen: expected a number with seqlen_offset in a tensor, got None")
        count = max_seqlen or (0 if torch.is_tensor(seqlen_offset) else qkv.shape[1] + seqlen_offset)
        cos, sin, cos_k, sin_k = self._angles(count or len(self._tables[0]), qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        apply_rotary(qkv, cos, sin, seqlen_offset, interleaved=self.interleaved, inplace=True)
        return qkv, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)
