"""Mamba2 in SGLang: the functions that its mixer calls. Projections, norms and the pool of states are SGLang's."""

from typing import Any, Callable, Dict, Optional, Tuple

import torch

from .. import _core
from .. import _engine_states as states
from .._frameworks import stream_address
from .._state_calls import rates_of
from ..engines import type_name
from ..recurrent import RecurrentPlan
from .plans import Plans

Tensor = torch.Tensor


class Scan:
    """Has a function for each of SGLang's."""

    def __init__(self, plans: Plans) -> None:
        self._plans = plans

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
        """A token of each request, x [requests, heads, dim], whose numbers of a head come expanded. Drafts, which have a dimension more, are SGLang's."""
        if x.dim() != 3 or z is not None or not dt_softplus:
            return original(
                state, x, dt, A, B, C, D, z, dt_bias=dt_bias, dt_softplus=dt_softplus, state_batch_indices=state_batch_indices, out=out, **options
            )
        out = torch.empty_like(x) if out is None else out
        starts = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)
        slots = starts[:-1] if state_batch_indices is None else state_batch_indices
        skip, bias = (None if y is None else y[..., 0] for y in (D, dt_bias))
        self._run(x, dt[..., 0], A[:, 0, 0], B, C, skip, bias, state, slots, starts, out)
        return out

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
    ) -> None:
        heads, dim = x.shape[1:]
        fields = dict(states.mamba_fields(B.shape[1], heads, B.shape[2], dim, type_name(x.dtype), type_name(state.dtype)), skip=D is not None)
        plan = self._plans.updated(RecurrentPlan, _core.RecurrentSpec, tuple(fields.items()), starts, slots, len(x), stream_address(None, x))
        inputs = dict(gate=states.tight(dt), rates=rates_of(A.detach()), gate_bias=None if dt_bias is None else states.f32(dt_bias))
        plan.run(*map(states.tight, (C, B, x)), state.unsqueeze(1), skip=None if D is None else states.f32(D), out=out, **inputs)
