"""flash_attn.bert_padding: batches [batch, seqlen, ..] as tokens one request after the other, and back. Gradients are PyTorch's own."""
from typing import Optional, Tuple

import torch

Tensor = torch.Tensor


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices]."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ..] with `values` at indices."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> Tuple[Tensor, Tensor]:
    """x[indices], and x."""
    return index_first_axis(x, indices), x.detach()


def _starts(lens: Tensor) -> Tensor:
    return torch.nn.functional.pad(torch.cumsum(lens, 0, dtype=torch.int32), (1, 0))


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, unused_mask: Optional[Tensor] = None) -> Tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of hidden_states [batch, seqlen, ..] that attention_mask or unused_mask [batch, seqlen] have.

    Returns them [total, ..], their places in [batch * seqlen], where each request begins (int32 [batch + 1]), the longest request, and how many
    tokens of attention_mask each has (int32 [batch]). Waits for the device, to know how many they are.
    """
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lens = taken.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    longest = int(lens.max()) if len(lens) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _starts(lens), longest, attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor) -> Tuple[Tensor, Tensor, Tensor, int]:
    """As unpad_input, where each row of the batch holds several requests one after the other: [batch, seqlen] has their lengths, then zeros."""
    rows = attention_mask_in_length.sum(-1)
    tokens = torch.arange(attention_mask_in_length.shape[-1], device=rows.device)
    indices = (tokens < rows[:, None]).flatten().nonzero().flatten()
    lens = attention_mask_in_length.flatten()
    lens = lens[lens.nonzero().flatten()]
    longest = int(lens.max()) if len(lens) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _starts(lens), longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Tokens [total, ..] at their places of zeros [batch, seqlen, ..]."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
