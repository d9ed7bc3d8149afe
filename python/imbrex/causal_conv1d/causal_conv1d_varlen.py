"""The function of causal_conv1d.causal_conv1d_varlen."""
import torch

from imbrex import _state_calls

_surface = _state_calls.Surface("imbrex.causal_conv1d")


def causal_conv1d_varlen_states(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    """The last state_len tokens of each sequence of x [total_tokens, dim], behind zeros where it has fewer: [num_sequences, dim, state_len]."""
    if x.dim() != 2:
        raise _surface.wrong("x", "[total_tokens, dim]", list(x.shape))
    starts = _surface.starts("cu_seqlens", cu_seqlens, len(x))
    states = x.new_zeros((len(starts) - 1, state_len, x.shape[1]))
    for state, begin, end in zip(states, starts, starts[1:]):
        length = min(state_len, end - begin)
        state[state_len - length :] = x[end - length : end]
    return states.transpose(1, 2)
