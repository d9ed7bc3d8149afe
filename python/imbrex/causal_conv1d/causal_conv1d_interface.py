"""The functions of causal_conv1d.causal_conv1d_interface. Modules of this package import each other by absolute names: see the package's text."""
from typing import Any, Optional, Tuple, Union

import torch

from imbrex import _state_calls
from imbrex._frameworks import no_gradient

Tensor = torch.Tensor

_surface = _state_calls.Surface("imbrex.causal_conv1d")

_MOST_DRAFTS = 64  # of ShortConvSpec


def _is_silu(activation: Optional[str]) -> bool:
    if activation not in (None, "silu", "swish"):
        _surface.refuse("activation", 'None, "silu" or "swish"', repr(activation), "there are no others")
    return activation is not None


def _check_weight(dim: int, weight: Tensor, bias: Optional[Tensor]) -> None:
    if weight.dim() != 2 or weight.shape[0] != dim:
        raise _surface.wrong("weight", f"[{dim}, width]", list(weight.shape))
    _surface.check_shape("bias", bias, [dim])


def _to_type(dtype: torch.dtype, *tensors: Optional[Tensor]) -> Any:
    return tuple(None if x is None else x.to(dtype).contiguous() for x in tensors)


def _runs_of(seq_idx: Tensor, width: int) -> Tuple[Tuple[int, ...], Tensor]:
    """Where sequences of [batch, seqlen] begin and end, over all rows, and whether each begins a row."""
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    run = begins.cumsum(1)
    for apart in range(2, min(width, seq_idx.shape[1])):
        again = (seq_idx[:, apart:] == seq_idx[:, :-apart]) & (run[:, apart:] != run[:, :-apart])
        if again.any():
            _surface.refuse(
                "seq_idx", "the tokens of a sequence together", f"others between them, fewer than {width} tokens apart", "states are per run"
            )
    at = begins.flatten().nonzero().flatten()
    return (*at.tolist(), seq_idx.numel()), at % seq_idx.shape[1] == 0


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    return_final_states: bool = False,
    final_states_out: Optional[Tensor] = None,
    activation: Optional[str] = None,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """The convolution of x [batch, dim, seqlen] by weight [dim, width], and the last width - 1 inputs [batch, dim, width - 1] if they are asked for.

    initial_states [batch, dim, width - 1]: inputs in front of x. seq_idx [batch, seqlen]: the sequence of each token; tokens see those of their own, and
    the outputs of negative ones are 0. The first sequence of a row goes on from its initial states.
    """
    silu = _is_silu(activation)
    no_gradient(x, weight, bias, initial_states)
    if x.dim() != 3:
        raise _surface.wrong("x", "[batch, dim, seqlen]", list(x.shape))
    batch, dim, length = x.shape
    _check_weight(dim, weight, bias)
    width = weight.shape[1]
    _surface.check_shape("initial_states", initial_states, [batch, dim, width - 1])
    _surface.check_shape("final_states_out", final_states_out, [batch, dim, width - 1])
    _surface.check_shape("seq_idx", seq_idx, [batch, length])
    if seq_idx is not None and return_final_states:
        _surface.refuse("return_final_states", "False with seq_idx", True, "causal_conv1d has no final states of packed sequences either")
    dtype = _state_calls.compute_type(x, weight, bias)
    weight, bias = _to_type(dtype, weight, bias)
    tokens = _state_calls.rows(x.to(dtype).transpose(1, 2))
    given = initial_states is not None
    if seq_idx is None or not length:
        requests = _state_calls.equal_requests(batch, length, given)
        state = x.new_zeros((batch, width - 1, dim), dtype=dtype)
        if given:
            state.copy_(initial_states.transpose(1, 2))
    else:
        starts, first = _runs_of(seq_idx, width)
        state = x.new_zeros((len(starts) - 1, width - 1, dim), dtype=dtype)
        if given:
            state[first] = initial_states.transpose(1, 2).to(dtype)
        requests = _state_calls.Requests(starts, tuple((first & given).tolist()))
    out = _state_calls.short_conv(tokens, weight, bias, state, requests, silu)
    out = out.view(batch, length, dim)
    if seq_idx is not None:
        out.masked_fill_((seq_idx < 0).unsqueeze(-1), 0)
    out = out.transpose(1, 2).to(x.dtype)
    if not return_final_states:
        return out
    final_states = state.transpose(1, 2).to(x.dtype)
    if final_states_out is None:
        return out, final_states
    return out, final_states_out.copy_(final_states)


def _update(x: Tensor, conv_state: Tensor, weight: Tensor, bias: Optional[Tensor], silu: bool, cache_seqlens: Optional[Tensor]) -> Tensor:
    """causal_conv1d_update() of x [batch, dim, seqlen], where each request has its own row of conv_state."""
    batch, dim, length = x.shape
    kept, held = weight.shape[1] - 1, conv_state.shape[2]
    dtype = _state_calls.compute_type(x, weight, bias, conv_state)
    weight, bias = _to_type(dtype, weight, bias)
    tokens = _state_calls.rows(x.to(dtype).transpose(1, 2))
    if cache_seqlens is not None:
        if length > held:
            raise _surface.wrong("x", f"at most {held} tokens, which the circular conv_state has room for", length)
        at = (torch.arange(-kept, length, device=x.device) + cache_seqlens.unsqueeze(1)).remainder(held).unsqueeze(1).expand(-1, dim, -1)
        state = conv_state.gather(2, at[:, :, :kept]).transpose(1, 2).to(dtype).contiguous()
        out = _state_calls.short_conv(tokens, weight, bias, state, _state_calls.equal_requests(batch, length, True), silu)
        conv_state.scatter_(2, at[:, :, kept:], x.to(conv_state.dtype))
    elif held - kept <= min(length, _MOST_DRAFTS):
        # A state of more than width - 1 tokens is one behind drafts that were all kept, and is left as one of drafts.
        by_token = conv_state.transpose(1, 2)
        state = by_token if by_token.dtype == dtype and by_token.stride(2) == 1 else by_token.to(dtype).contiguous()
        out = _state_calls.short_conv(tokens, weight, bias, state, _state_calls.equal_requests(batch, length, True, held - kept), silu)
        if state is not by_token:
            conv_state.copy_(state.transpose(1, 2))
    else:
        state = conv_state[:, :, held - kept :].transpose(1, 2).to(dtype).clone(memory_format=torch.contiguous_format)
        out = _state_calls.short_conv(tokens, weight, bias, state, _state_calls.equal_requests(batch, length, True), silu)
        conv_state.copy_(torch.cat((conv_state, x.to(conv_state.dtype)), 2)[:, :, -held:])
    return out.view(batch, length, dim).transpose(1, 2).to(x.dtype)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    cache_seqlens: Optional[Tensor] = None,
    conv_state_indices: Optional[Tensor] = None,
) -> Tensor:
    """The convolution of new tokens x [batch, dim] or [batch, dim, seqlen] behind those of conv_state [.., dim, state_len >= width - 1], which takes them in.

    cache_seqlens [batch]: conv_state is a circular buffer, in which the next token goes to this place, modulo state_len. conv_state_indices [batch]: the
    row of conv_state of each request; one with a negative number gets zeros.
    """
    silu = _is_silu(activation)
    no_gradient(x, conv_state, weight, bias)
    if x.dim() not in (2, 3):
        raise _surface.wrong("x", "[batch, dim] or [batch, dim, seqlen]", list(x.shape))
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    batch, dim, _ = tokens.shape
    _check_weight(dim, weight, bias)
    least = weight.shape[1] - 1
    if conv_state.dim() != 3 or conv_state.shape[1] != dim or conv_state.shape[2] < least:
        raise _surface.wrong("conv_state", f"[.., {dim}, {least} or more]", list(conv_state.shape))
    for name, numbers in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        _surface.check_shape(name, numbers, [batch])
    if conv_state_indices is None:
        _surface.check_shape("conv_state", conv_state, [batch, *conv_state.shape[1:]])
        out = _update(tokens, conv_state, weight, bias, silu, cache_seqlens)
    else:
        real = (conv_state_indices >= 0).nonzero().flatten()
        slots = conv_state_indices[real].long()
        if len(slots.unique()) != len(slots):
            raise _surface.wrong("conv_state_indices", "a row of its own for each request", conv_state_indices.tolist())
        own = conv_state[slots]
        out = torch.zeros_like(tokens)
        out[real] = _update(tokens[real], own, weight, bias, silu, None if cache_seqlens is None else cache_seqlens[real])
        conv_state[slots] = own
    return out.squeeze(-1) if x.dim() == 2 else out
