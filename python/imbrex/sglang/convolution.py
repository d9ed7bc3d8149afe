"""Convolutions in front of SGLang's recurrences, over its pool of their states: [slots, dim, width - 1], whose channels have to lie together in memory."""

from typing import Any, Callable, Dict, Optional

import torch

from .. import _core
from .. import _engine_states as states
from .._frameworks import stream_address
from ..engines import type_name
from ..short_conv import ShortConvPlan
from .drafts import DraftStep, parents_of, replays
from .plans import Plans

Tensor = torch.Tensor

NAMES = ("causal_conv1d_fn", "causal_conv1d_update")
NAMES_OF_MIXER = (*NAMES, "causal_conv1d_fn_triton", "causal_conv1d_update_triton")


def lay_out(runner: Any) -> bool:
    """Lays the pool's states [layers, slots, dim, width - 1] out with their channels together, in the same shape, if nothing else reads their memory by address.
    Says whether imbrex can read them then."""
    pool = runner.req_to_token_pool.mamba_pool
    if replays(pool):  # it commits states by a function of its own
        return False
    arguments = getattr(runner, "server_args", None)
    if getattr(arguments, "disaggregation_mode", "null") != "null" or getattr(arguments, "enable_hierarchical_cache", False):
        return False
    conv = pool.mamba_cache.conv
    if conv[0].stride(-2) == 1:
        return True
    if not conv[0].is_contiguous():  # a part of a buffer that is shared with other caches
        return False
    conv[0] = conv[0].transpose(-1, -2).contiguous().transpose(-1, -2)
    return True


class Convolution:
    """Has a function for each of SGLang's."""

    def __init__(self, plans: Plans, verifies: bool) -> None:
        self._plans, self._verifies = plans, verifies

    @property
    def own(self) -> Dict[str, Callable]:
        prompts, tokens = self.prompts, self.tokens
        return dict(causal_conv1d_fn=prompts, causal_conv1d_fn_triton=prompts, causal_conv1d_update=tokens, causal_conv1d_update_triton=tokens)

    def prompts(
        self,
        original: Optional[Callable],
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        *,
        conv_states: Tensor,
        query_start_loc: Tensor,
        cache_indices: Tensor,
        has_initial_state: Optional[Tensor] = None,
        activation: Optional[str] = "silu",
        seq_lens_cpu: Any = None,
        **options: Any,
    ) -> Tensor:
        """Outputs [dim, tokens] of x [dim, tokens]."""
        if any(value is not None for value in options.values()):
            raise NotImplementedError(f"imbrex: expected a convolution without {', '.join(sorted(options))}")
        earlier = torch.zeros_like(cache_indices) if has_initial_state is None else has_initial_state
        return self._run(x.transpose(0, 1), weight, bias, activation, conv_states, cache_indices, query_start_loc, earlier).transpose(0, 1)

    def tokens(
        self,
        original: Optional[Callable],
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Optional[Tensor] = None,
        activation: Optional[str] = None,
        *,
        conv_state_indices: Tensor,
        **options: Any,
    ) -> Tensor:
        """Outputs of a token of each request, x [requests, dim], or of drafts, which have a dimension more."""
        if x.dim() == 2:
            starts = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)
            return self._run(x, weight, bias, activation, conv_state, conv_state_indices, starts, None)
        if not self._verifies:
            return original(x, conv_state, weight, bias, activation, conv_state_indices=conv_state_indices, **options)
        return self._drafts(x, conv_state, weight, bias, activation, conv_state_indices, **options)

    def _drafts(
        self,
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        activation: Optional[str],
        slots: Tensor,
        *,
        intermediate_conv_window: Tensor,
        intermediate_state_indices: Tensor,
        retrieve_next_token: Optional[Tensor] = None,
        retrieve_next_sibling: Optional[Tensor] = None,
        retrieve_parent_token: Optional[Tensor] = None,
    ) -> Tensor:
        """Outputs [requests, dim, tokens] of x [requests, dim, tokens]. The rows behind each token go to intermediate_conv_window [rows, tokens, dim, width - 1],
        whose rows behind neighbouring tokens of a chain may share memory, and the parents of trees to retrieve_parent_token: SGLang's recurrence reads them there.
        """
        (count, dim, tokens), width = x.shape, weight.shape[1]
        if retrieve_next_token is not None:
            retrieve_parent_token.copy_(parents_of(retrieve_next_token, retrieve_next_sibling))
        starts = torch.arange(0, count * tokens + 1, tokens, dtype=torch.int32, device=x.device)
        chain, own = retrieve_parent_token is None, torch.arange(count, dtype=slots.dtype, device=x.device)
        kept = x.new_zeros((count, width - 2 + tokens if chain else tokens * (width - 1), dim))
        kept[:, : width - 1] = conv_state[slots.clamp(min=0).long(), :, : width - 1].transpose(-1, -2)
        y = x.transpose(1, 2).reshape(count * tokens, dim)
        step = DraftStep(tokens, retrieve_parent_token)
        y = self._run(y, weight, bias, activation, kept.transpose(-1, -2), torch.where(slots < 0, slots, own), starts, None, step)
        windows = kept.unfold(1, width - 1, 1) if chain else kept.unflatten(1, (tokens, -1)).transpose(-1, -2)
        intermediate_conv_window[intermediate_state_indices[:count].long(), :tokens] = windows
        return y.view(count, tokens, dim).transpose(1, 2)

    def _run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        activation: Optional[str],
        conv_states: Tensor,
        slots: Tensor,
        starts: Tensor,
        earlier: Optional[Tensor],
        drafts: Optional[DraftStep] = None,
    ) -> Tensor:
        """Rows of conv_states [slots, dim, rows] are width - 1, or those behind each draft."""
        if activation not in (None, "silu", "swish"):
            raise NotImplementedError(f"imbrex: activation: expected None, 'silu' or 'swish', got {activation!r}")
        if conv_states.stride(-2) != 1 or conv_states.dtype != x.dtype:
            expected, got = f"{x.dtype} with channels together", f"{conv_states.dtype} with strides {conv_states.stride()}"
            raise NotImplementedError(f"imbrex: states of convolutions: expected {expected}, got {got}")
        x, (dim, width) = states.tight(x), weight.shape
        fields = states.conv_fields(dim, width, bias is not None, type_name(x.dtype), activation="silu" if activation else "none")
        plan = self._plans.updated(ShortConvPlan, _core.ShortConvSpec, fields, starts, slots, len(x), stream_address(None, x), earlier, drafts)
        out = torch.zeros_like(x, memory_format=torch.contiguous_format)  # requests of padding have no output
        rows = (conv_states if drafts is not None else conv_states[..., : width - 1]).transpose(-1, -2)
        return plan.run(x, states.matrix(weight, x.dtype), rows, bias=None if bias is None else bias.detach().to(x.dtype), out=out)
