"""Custom masks: bits packed as FlashInfer packs them, and the arrays of a plan that they become."""
from typing import Dict, Optional, Sequence, Tuple

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


def mask_arrays(
    custom_mask: Optional[torch.Tensor],
    packed_custom_mask: Optional[torch.Tensor],
    counts: Sequence[int],
    device: torch.device,
    room: Optional[torch.Tensor] = None,
) -> Optional[Dict[str, torch.Tensor]]:
    """What Plan.update() takes, on `device`; None without a mask. counts: q_len * seq_len of each request.

    packed_mask where bits are given, which stay bits, or where there is `room`: a graph reads bits from there, whatever was given. Else
    custom_mask, a byte for each truth value.
    """
    if custom_mask is None and packed_custom_mask is None:
        return None
    if packed_custom_mask is not None:
        size = sum(-(-n // 8) for n in counts)
        if packed_custom_mask.dtype != torch.uint8 or packed_custom_mask.numel() != size:
            raise ValueError(
                f"packed_custom_mask: expected uint8 [{size}], each request's bits from a byte of its own (segment_packbits), got "
                f"{packed_custom_mask.dtype} {list(packed_custom_mask.shape)}"
            )
        bits = packed_custom_mask.detach().to(device).contiguous().view(-1)
    else:
        mask = custom_mask.detach().to(device).to(torch.bool).contiguous().view(-1)
        if mask.numel() != sum(counts):
            raise ValueError(f"custom_mask: expected {sum(counts)} entries (q_len * kv_len of all requests), got {mask.numel()}")
        if room is None:
            return dict(custom_mask=mask.view(torch.uint8))
        starts = torch.nn.functional.pad(torch.cumsum(torch.tensor(counts, dtype=torch.int64, device="cpu"), 0), (1, 0))
        bits, _ = segment_packbits(mask, starts, "little")
    if room is None:
        return dict(packed_mask=bits)
    if bits.numel() > room.numel():
        raise ValueError(f"custom mask: expected at most {room.numel()} bytes of bits, for which custom_mask_buf has room, got {bits.numel()}")
    return dict(packed_mask=room[: bits.numel()].copy_(bits))
