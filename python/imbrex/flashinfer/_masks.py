"""Custom masks: bits packed as FlashInfer packs them, and the bytes that imbrex reads."""
from typing import Optional, Sequence, Tuple

import torch


def _weights(bitorder: str, device: torch.device) -> torch.Tensor:
    if bitorder not in ("big", "little"):
        raise ValueError(f"bitorder: expected big or little, got {bitorder!r}")
    weights = [1, 2, 4, 8, 16, 32, 64, 128]
    return torch.tensor(weights[::-1] if bitorder == "big" else weights, dtype=torch.uint8, device=device)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """1-D uint8 of zeros and ones."""
    if x.ndim != 1:
        raise ValueError(f"x: expected 1 dimension, got {list(x.shape)}")
    return x.to(torch.bool).view(torch.uint8)


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Truth values, 8 in a byte, as numpy.packbits does it: uint8 [ceil(n / 8)]. Masks of attention are "little"."""
    bits = torch.nn.functional.pad(_flat(x), (0, -x.shape[0] % 8))
    return (bits.view(-1, 8) * _weights(bitorder, x.device)).sum(-1, dtype=torch.uint8)


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> Tuple[torch.Tensor, torch.Tensor]:
    """packbits() of each x[indptr[i] : indptr[i + 1]], which begins a byte of its own. Returns the bytes and where each segment's begin."""
    starts = indptr.detach().to("cpu", torch.int64)
    counts = starts[1:] - starts[:-1]
    packed_starts = torch.nn.functional.pad(torch.cumsum((counts + 7) // 8, 0), (1, 0))
    bits = torch.zeros(8 * int(packed_starts[-1]), dtype=torch.uint8, device=x.device)
    moved = torch.repeat_interleave(8 * packed_starts[:-1] - starts[:-1], counts).to(x.device)
    first, last = int(starts[0]), int(starts[-1])
    bits[torch.arange(first, last, device=x.device) + moved] = _flat(x)[first:last]
    return packbits(bits, bitorder), packed_starts.to(indptr.device, torch.int32)


def _unpacked(packed: torch.Tensor, counts: Sequence[int], out: Optional[torch.Tensor]) -> torch.Tensor:
    """A byte for each of counts[i] bits that begin at a byte of their own each."""
    sizes = [-(-n // 8) for n in counts]
    if packed.dtype != torch.uint8 or packed.numel() != sum(sizes):
        raise ValueError(
            f"packed_custom_mask: expected uint8 [{sum(sizes)}], each request's bits from a byte of its own (segment_packbits), got "
            f"{packed.dtype} {list(packed.shape)}"
        )
    bits = (packed.view(-1, 1) & _weights("little", packed.device)).ne(0).view(torch.uint8).view(-1)
    parts, at = [], 0
    for n, size in zip(counts, sizes):
        parts.append(bits[at : at + n])
        at += 8 * size
    return torch.cat(parts, out=out) if parts else bits[:0]


def mask_bytes(
    custom_mask: Optional[torch.Tensor],
    packed_custom_mask: Optional[torch.Tensor],
    counts: Sequence[int],
    device: torch.device,
    room: Optional[torch.Tensor] = None,
) -> Optional[torch.Tensor]:
    """uint8 [sum of counts] on `device`, in `room` if that is given; None without a mask. counts: q_len * seq_len of each request."""
    total = sum(counts)
    if custom_mask is None and packed_custom_mask is None:
        return None
    if room is not None:
        if total > room.numel():
            raise ValueError(f"custom mask: expected at most {room.numel()} bits, for which custom_mask_buf has room, got {total}")
        room = room[:total]
    if packed_custom_mask is not None:
        return _unpacked(packed_custom_mask.detach().to(device).contiguous().view(-1), counts, room)
    mask = custom_mask.detach().to(device).to(torch.bool).contiguous().view(-1).view(torch.uint8)
    if mask.numel() != total:
        raise ValueError(f"custom_mask: expected {total} entries (q_len * kv_len of all requests), got {mask.numel()}")
    return mask if room is None else room.copy_(mask)
