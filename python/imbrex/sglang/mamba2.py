"""Mamba2 in SGLang: the functions that its mixer calls. Projections, norms and the pool of states are SGLang's."""

from typing import Any, Callable, Dict, Optional, Tuple

import torch

from .. import _core
from .. import _engine_states as states
from .._frameworks import stream_address
from .._state_calls import rates_of
from ..engines import type_name
from ..recurrent import RecurrentPlan
from .drafts import DraftStep, begin
from .plans import Plans

Tensor = torch.Tensor


class Scan:
    """Has a function for each of SGLang's."""

    def __init__(self, plans: Plans, verifies: bool) -> None:
        self._plans, self._verifies = plans, verifies

    @property
    def own(self) -> Dict[str, Callable]:
        return dict(mamba_chunk_scan_combined=self.prompts, selective_state_update=self.tokens)

    def prompts(
        self,
        original: Optional[Callable],
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        *,
        cu_seqlens: Tensor,
        out: Tensor,
        D: Optional[Tensor] = None,
        z: Optional[Tensor] = None,
        dt_bias: Optional[Tensor] = None,
        initial_states: Optional[Tensor] = None,
        dt_softplus: bool = False,
        dt_limit: Tuple[float, float] = (0.0, float("inf")),
        state_dtype: Optional[torch.dtype] = None,
        track_seq_idx: Optional[Tensor] = None,
        **options: Any,
    ) -> Tuple[None, Tensor, None]:
        """Into out [1, tokens, heads, dim]; returns no states between, the states behind each request [requests, heads, dim, d_state], and none that are tracked."""
        if track_seq_idx is not None:
            raise NotImplementedError(
                "imbrex: expected no states that are kept amid a prompt, got some: --mamba-radix-cache-strategy no_buffer does without"
            )
        if z is not None or not dt_softplus or tuple(dt_limit) != (0.0, float("inf")):
            raise NotImplementedError(f"imbrex: expected no z, dt_softplus and no limits, got {z is not None}, {dt_softplus} and {dt_limit}")
        heads, dim, d_state = x.shape[2], x.shape[3], B.shape[3]
        count, dtype = len(cu_seqlens) - 1, x.dtype if state_dtype is None else state_dtype
        if initial_states is None:
            state = torch.zeros((count, heads, dim, d_state), dtype=dtype, device=x.device)
        else:
            state = initial_states.to(dtype, copy=True).contiguous()
        slots = torch.arange(count, dtype=torch.int32, device=x.device)
        self._run(x[0], dt[0], A, B[0], C[0], D, dt_bias, state, slots, cu_seqlens, out[0])
        return None, state, None

    def tokens(
        self,
        original: Optional[Callable],
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Optional[Tensor] = None,
        z: Optional[Tensor] = None,
        dt_bias: Optional[Tensor] = None,
        dt_softplus: bool = False,
        state_batch_indices: Optional[Tensor] = None,
        out: Optional[Tensor] = None,
        **options: Any,
    ) -> Tensor:
        """A token of each request, x [requests, heads, dim], whose numbers of a head come expanded, or with a dimension more several: drafts behind the first."""
        if (x.dim() != 3 and not self._verifies) or z is not None or not dt_softplus:
            return original(
                state, x, dt, A, B, C, D, z, dt_bias=dt_bias, dt_softplus=dt_softplus, state_batch_indices=state_batch_indices, out=out, **options
            )
        out = torch.empty_like(x) if out is None else out
        skip, bias = (None if y is None else y[..., 0] for y in (D, dt_bias))
        if x.dim() == 3:
            starts = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)
            slots = starts[:-1] if state_batch_indices is None else state_batch_indices
            self._run(x, dt[..., 0], A[:, 0, 0], B, C, skip, bias, state, slots, starts, out)
        else:
            self._drafts(x, dt[..., 0], A[:, 0, 0], B, C, skip, bias, state, state_batch_indices, out, **options)
        return out

    def _drafts(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Optional[Tensor],
        dt_bias: Optional[Tensor],
        state: Tensor,
        slots: Tensor,
        out: Tensor,
        *,
        disable_state_update: bool,
        intermediate_states_buffer: Tensor,
        intermediate_state_indices: Tensor,
        retrieve_parent_token: Optional[Tensor] = None,
        cache_steps: int,
    ) -> None:
        """Of x [requests, tokens, heads, dim]; the states behind each token go to intermediate_states_buffer [rows, tokens, heads, dim, d_state]."""
        if not disable_state_update:
            raise NotImplementedError("imbrex: expected the pool's states to stay when drafts are verified, got disable_state_update=False")
        count, tokens = x.shape[:2]
        rows = begin(intermediate_states_buffer, intermediate_state_indices, state, slots)
        starts = torch.arange(0, count * tokens + 1, tokens, dtype=torch.int32, device=x.device)
        step = DraftStep(intermediate_states_buffer.shape[1], retrieve_parent_token)
        x, dt, B, C = (y.flatten(0, 1) for y in (x, dt, B, C))
        self._run(x, dt, A, B, C, D, dt_bias, intermediate_states_buffer, rows, starts, out.view(x.shape), step)

    def _run(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Optional[Tensor],
        dt_bias: Optional[Tensor],
        state: Tensor,
        slots: Tensor,
        starts: Tensor,
        out: Tensor,
        drafts: Optional[DraftStep] = None,
    ) -> None:
        heads, dim = x.shape[1:]
        fields = dict(states.mamba_fields(B.shape[1], heads, B.shape[2], dim, type_name(x.dtype), type_name(state.dtype)), skip=D is not None)
        stream = stream_address(None, x)
        plan = self._plans.updated(RecurrentPlan, _core.RecurrentSpec, tuple(fields.items()), starts, slots, len(x), stream, drafts=drafts)
        inputs = dict(gate=states.tight(dt), rates=rates_of(A.detach()), gate_bias=None if dt_bias is None else states.f32(dt_bias))
        state = state.unsqueeze(1) if drafts is None else state
        plan.run(*map(states.tight, (C, B, x)), state, skip=None if D is None else states.f32(D), out=out, **inputs)
