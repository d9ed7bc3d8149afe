"""Recurrences of SGLang's gated delta nets (GDN) and Kimi delta attention (KDA). SGLang's backends keep convolutions, states and projections; kernels are replaced."""

import contextlib
import logging
from typing import Any, Dict, Iterator, Optional, Tuple

import torch
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase

from .. import _core
from .. import _engine_states as states
from .._frameworks import stream_address
from .._plan_cache import SMALLEST, Kept, Limits, PlanCache
from ..engines import device_text, settings, type_name
from ..recurrent import RecurrentPlan

Tensor = torch.Tensor

logger = logging.getLogger("imbrex.sglang")

_plans = PlanCache()
_announced = set()


class _Kernel(LinearAttnKernelBase):
    """What both have in common. Tensors are SGLang's: q, k and v [1, tokens, heads, dim], states [slots, value heads, v_dim, k_dim]; a request's own is read and written."""

    supports_packed_decode = False
    supports_track_state_snapshot = True  # so that SGLang says when it wants one, which is refused

    def __init__(self, device: Any) -> None:
        self._device, self._settings = device_text(device), settings()
        self._of_decode: Dict[Tuple[states.Fields, Limits], Kept] = {}

    def _run(
        self, fields: states.Fields, q: Tensor, k: Tensor, v: Tensor, state: Tensor, slots: Tensor, starts: Tensor, **inputs: Optional[Tensor]
    ) -> Tensor:
        num_reqs = len(starts) - 1
        plan = self._updated(fields, starts.to(torch.int32), slots[:num_reqs].to(torch.int32).contiguous(), q.shape[1], stream_address(None, q))
        out = torch.zeros(v.shape[1:], dtype=q.dtype, device=q.device)  # requests of padding have no output
        inputs = {name: None if x is None else states.tight(x) for name, x in inputs.items()}
        plan.run(*(states.tight(x[0]) for x in (q, k, v)), state.unsqueeze(1), out=out, **inputs)
        return out.unsqueeze(0)

    def _updated(self, fields: states.Fields, starts: Tensor, slots: Tensor, num_tokens: int, stream: int) -> RecurrentPlan:
        kept = self._find(fields, Limits(len(slots), num_tokens, num_tokens + 1), starts.device.type != "cpu", stream)
        lengths = starts.diff() + 1  # every request has an earlier token: SGLang clears the states of those that have none
        if starts.device.type != "cpu":
            kept.plan.update_on_device(starts, lengths, slots, max_num_tokens=num_tokens, stream=stream)
            return kept.plan
        batch = (*starts.tolist(), *slots.tolist())
        if kept.batch != batch:
            kept.batch = None
            kept.plan.update(starts, lengths, slots)
            kept.batch = batch
        return kept.plan

    def _find(self, fields: states.Fields, needed: Limits, on_device: bool, stream: int) -> Kept:
        """Plans of steps with a token a request are kept for good, since graphs hold them: an update is a part of each graph."""

        def make(limits: Limits) -> RecurrentPlan:
            arguments = limits.arguments()
            del arguments["max_query_len"]
            return self._make(fields, on_device=on_device, **arguments)

        if needed.num_reqs != needed.num_tokens:
            if stream and _core.capture_of(stream):
                raise NotImplementedError("imbrex: expected CUDA graphs of decoding alone, got one of prompts")
            return _plans.find((fields, self._device, self._settings, stream), needed, make, stream)
        limits = SMALLEST.grown(needed)
        kept = self._of_decode.get((fields, limits))
        if kept is None:
            kept = self._of_decode[fields, limits] = Kept(make(limits), limits)
        return kept

    def _make(self, fields: states.Fields, **options: Any) -> RecurrentPlan:
        plan = states.make_plan(RecurrentPlan, _core.RecurrentSpec, fields, self._device, self._settings, **options)
        if fields not in _announced:
            _announced.add(fields)
            states.announce(logger, states.LayerPlans(None, plan), "linear attention")
        return plan

    @staticmethod
    def _refuse_snapshots(options: Dict[str, Any]) -> None:
        if options.get("track_state") is not None:
            raise NotImplementedError(
                "imbrex: expected no states that are kept amid a prompt, got some: --mamba-radix-cache-strategy no_buffer does without"
            )


def _sizes(k: Tensor, v: Tensor, state: Tensor) -> Tuple[int, int, int, int, str, str]:
    return k.shape[2], v.shape[2], k.shape[3], v.shape[3], type_name(k.dtype), type_name(state.dtype)


class GdnKernel(_Kernel):
    """A gated delta net."""

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, **options) -> Tensor:
        heads = v.shape[2]
        fields = states.delta_fields(*_sizes(k, v, ssm_states))
        inputs = dict(
            gate=a.reshape(-1, heads), beta=b.reshape(-1, heads), rates=states.f32(A_log).view(heads), gate_bias=states.f32(dt_bias).view(heads)
        )
        return self._run(fields, q, k, v, ssm_states, cache_indices, query_start_loc, **inputs)

    def extend(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **options) -> Tuple[Tensor, None, None]:
        """g is a logarithm, and beta what the sigmoid gave."""
        self._refuse_snapshots(options)
        if not options.get("inplace_update", True):
            raise NotImplementedError("imbrex: expected states to be updated, got inplace_update=False (multi-item scoring)")
        fields = dict(states.delta_fields(*_sizes(k, v, ssm_states)), gate="log", sigmoid_beta=False)
        out = self._run(tuple(fields.items()), q, k, v, ssm_states, cache_indices, query_start_loc, gate=g[0], beta=beta[0])
        return out, None, None


class KdaKernel(_Kernel):
    """Kimi delta attention."""

    supports_safe_gate = True

    def _attend(self, q, k, v, gate, beta, A_log, dt_bias, lower_bound, beta_is_raw, ssm_states, cache_indices, query_start_loc) -> Tensor:
        heads, dim = k.shape[2:]
        if k.shape != v.shape:
            raise NotImplementedError(f"imbrex: expected keys and values of one shape in KDA, got {list(k.shape)} and {list(v.shape)}")
        _, _, _, _, dtype, state_dtype = _sizes(k, v, ssm_states)
        fields = dict(states.kda_fields(heads, dim, dtype, state_dtype, lower_bound), sigmoid_beta=beta_is_raw)
        inputs = dict(
            gate=gate.reshape(-1, heads, dim),
            beta=beta.reshape(-1, heads),
            rates=states.f32(A_log).view(heads),
            gate_bias=states.f32(dt_bias).view(heads, dim),
        )
        return self._run(tuple(fields.items()), q, k, v, ssm_states, cache_indices, query_start_loc, **inputs)

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, lower_bound=None, **options) -> Tensor:
        return self._attend(q, k, v, a, b, A_log, dt_bias, lower_bound, True, ssm_states, cache_indices, query_start_loc)

    def extend(
        self,
        q,
        k,
        v,
        g,
        beta,
        *,
        ssm_states,
        cache_indices,
        query_start_loc,
        A_log=None,
        dt_bias=None,
        lower_bound=None,
        beta_is_raw=False,
        return_intermediate_states=False,
        **options,
    ) -> Any:
        self._refuse_snapshots(options)
        if A_log is None or dt_bias is None:
            raise NotImplementedError("imbrex: expected A_log and dt_bias with KDA's gates, got none")
        out = self._attend(q, k, v, g, beta, A_log, dt_bias, lower_bound, beta_is_raw, ssm_states, cache_indices, query_start_loc)
        return (out, None) if return_intermediate_states else out


def _with_kernel(base: type, kernel: type) -> type:
    """SGLang's backend with imbrex's kernel in the phases that ask for one that SGLang does not have."""

    class Backend(base):
        def __init__(self, runner: Any) -> None:
            asked = runner.linear_attn_backends
            ours = [phase for phase in ("decode", "prefill") if getattr(asked, phase).is_custom()]
            plain = type(asked.verify)("triton")
            runner.linear_attn_backends = type(asked)(**{p: plain if p in ours else getattr(asked, p) for p in ("decode", "prefill", "verify")})
            try:
                super().__init__(runner)
            finally:
                runner.linear_attn_backends = asked
            made, dispatcher = kernel(runner.device), self.kernel_dispatcher
            if "decode" in ours:
                dispatcher.decode_kernel = made
                dispatcher.supports_packed_decode = dispatcher.supports_packed_decode_safe_gate = False
            if "prefill" in ours:
                dispatcher.extend_kernel = made

    Backend.__name__ = f"Imbrex{base.__name__}"
    return Backend


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """In this block SGLang makes backends with imbrex's kernels."""
    own = [(gdn_backend, "GDNAttnBackend", GdnKernel), (kda_backend, "KDAAttnBackend", KdaKernel)]
    bases = [getattr(module, name) for module, name, _ in own]
    for (module, name, kernel), base in zip(own, bases):
        setattr(module, name, _with_kernel(base, kernel))
    try:
        yield
    finally:
        for (module, name, _), base in zip(own, bases):
            setattr(module, name, base)
