"""SGLang's gated delta nets (GDN), Kimi delta attention (KDA) and Mamba2. Its backends keep pools of states and projections; kernels are replaced."""

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase
from sglang.srt.layers.attention.mamba import mamba
from sglang.srt.runtime_context import get_exec

from .. import _core
from .. import _engine_states as states
from .._frameworks import stream_address
from ..engines import type_name
from ..recurrent import RecurrentPlan
from .convolution import NAMES, NAMES_OF_MIXER, Convolution, lay_out
from .drafts import DraftStep, begin, commit, replays
from .mamba2 import Scan
from .named import put, put_always, running
from .plans import Plans

Tensor = torch.Tensor


class _Kernel(LinearAttnKernelBase):
    """What both have in common. Tensors are SGLang's: q, k and v [1, tokens, heads, dim], states [slots, value heads, v_dim, k_dim]; a request's own is read and written."""

    supports_packed_decode = False
    supports_track_state_snapshot = True  # so that SGLang says when it wants one, which is refused
    supports_strided_target_verify_qkv = True

    def __init__(self, plans: Plans) -> None:
        self._plans = plans

    def _run(
        self,
        fields: states.Fields,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        slots: Tensor,
        starts: Tensor,
        drafts: Optional[DraftStep] = None,
        **inputs: Optional[Tensor],
    ) -> Tensor:
        """Every request has an earlier token: SGLang clears the states of those that have none. With drafts the states are [slots, 1 + drafts, value heads, v_dim,
        k_dim]."""
        plan = self._plans.updated(RecurrentPlan, _core.RecurrentSpec, fields, starts, slots, q.shape[1], stream_address(None, q), drafts=drafts)
        out = torch.zeros(v.shape[1:], dtype=q.dtype, device=q.device)  # requests of padding have no output
        inputs = {name: None if x is None else states.tight(x) for name, x in inputs.items()}
        plan.run(*(states.tight(x[0]) for x in (q, k, v)), state.unsqueeze(1) if drafts is None else state, out=out, **inputs)
        return out.unsqueeze(0)

    def target_verify(
        self,
        A_log,
        dt_bias,
        q,
        k,
        v,
        a,
        b,
        *,
        ssm_states,
        cache_indices,
        query_start_loc,
        intermediate_states_buffer,
        intermediate_state_indices,
        retrieve_parent_token=None,
        **options,
    ) -> Tensor:
        """As decode(), with drafts behind each request's token, a chain or a tree. States of the pool are read, and those behind each token go to
        intermediate_states_buffer [rows, tokens, value heads, v_dim, k_dim]."""
        rows = begin(intermediate_states_buffer, intermediate_state_indices, ssm_states, cache_indices[: len(query_start_loc) - 1])
        place = dict(ssm_states=intermediate_states_buffer, cache_indices=rows, query_start_loc=query_start_loc)
        step = DraftStep(intermediate_states_buffer.shape[1], retrieve_parent_token)
        return self.decode(q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, drafts=step, **place, **options)

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

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, drafts=None, **options) -> Tensor:
        heads = v.shape[2]
        fields = states.delta_fields(*_sizes(k, v, ssm_states))
        inputs = dict(
            gate=a.reshape(-1, heads), beta=b.reshape(-1, heads), rates=states.f32(A_log).view(heads), gate_bias=states.f32(dt_bias).view(heads)
        )
        return self._run(fields, q, k, v, ssm_states, cache_indices, query_start_loc, drafts, **inputs)

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

    supports_safe_gate = supports_safe_gate_verify = True

    def _attend(
        self, q, k, v, gate, beta, A_log, dt_bias, lower_bound, beta_is_raw, ssm_states, cache_indices, query_start_loc, drafts=None
    ) -> Tensor:
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
        return self._run(tuple(fields.items()), q, k, v, ssm_states, cache_indices, query_start_loc, drafts, **inputs)

    def decode(
        self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, query_start_loc, lower_bound=None, drafts=None, **options
    ) -> Tensor:
        return self._attend(q, k, v, a, b, A_log, dt_bias, lower_bound, True, ssm_states, cache_indices, query_start_loc, drafts)

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


def _phases(runner: Any) -> List[str]:
    """Those for which a kernel is asked that SGLang does not have."""
    return [phase for phase in ("decode", "prefill") if getattr(runner.linear_attn_backends, phase).is_custom()]


def _verifies(runner: Any) -> bool:
    """Whether imbrex verifies drafts: where it computes the tokens that are no drafts, unless SGLang is told of another kernel."""
    asked = getattr(get_exec().mamba, "linear_attn_verify_backend", None)
    wanted = runner.linear_attn_backends.verify.is_custom() if asked is not None else "decode" in _phases(runner)
    return wanted and not replays(runner.req_to_token_pool.mamba_pool)


def _not_fused(original: Any, *args: Any, **kwargs: Any) -> Tuple[bool, str]:
    return False, "imbrex computes the convolution"


def _with_kernel(base: type, kernel: type) -> type:
    """SGLang's backend with imbrex's kernel in the phases that ask for one, and in front of both its convolution."""

    class Backend(base):
        def __init__(self, runner: Any) -> None:
            asked, ours, verifies = runner.linear_attn_backends, _phases(runner), _verifies(runner)
            replaced = [*ours, *(["verify"] if verifies else [])]
            plain = type(asked.verify)("triton")
            runner.linear_attn_backends = type(asked)(**{p: plain if p in replaced else getattr(asked, p) for p in ("decode", "prefill", "verify")})
            try:
                super().__init__(runner)
            finally:
                runner.linear_attn_backends = asked
            plans = Plans(runner.device)
            made, dispatcher = kernel(plans), self.kernel_dispatcher
            if "decode" in ours:
                dispatcher.decode_kernel = made
                dispatcher.supports_packed_decode = dispatcher.supports_packed_decode_safe_gate = False
            if "prefill" in ours:
                dispatcher.extend_kernel = made
            if verifies:
                dispatcher.verify_kernel = dispatcher.tree_verify_kernel = made
                self._fused_chain_verify_fn = None  # KDA's, which convolves too
            both = len(ours) == 2 and (kernel is KdaKernel or lay_out(runner))  # KDA's pool has its channels together
            if both:
                self.requires_contiguous_prefill_state = False  # GDN's, for which SGLang gives its kernels copies of states on GPUs
            self._own = dict(Convolution(plans, verifies).own, can_use_fused_qkvzba_causal_conv1d_update_contiguous=_not_fused) if both else {}

        def forward_decode(self, *args: Any, **kwargs: Any) -> Any:
            with running(self._own):
                return super().forward_decode(*args, **kwargs)

        def forward_extend(self, *args: Any, **kwargs: Any) -> Any:
            with running(self._own):
                return super().forward_extend(*args, **kwargs)

    Backend.__name__ = f"Imbrex{base.__name__}"
    return Backend


def _with_scan(base: type) -> type:
    """SGLang's backend of Mamba2, which has one mixer for prompts and tokens, with imbrex's functions where both phases ask for them."""

    class Backend(base):
        def __init__(self, runner: Any) -> None:
            super().__init__(runner)
            plans = Plans(runner.device)
            self._own = {}
            if len(_phases(runner)) == 2:
                verifies = _verifies(runner)
                self._own.update(Scan(plans, verifies).own)
                if lay_out(runner):
                    self._own.update(Convolution(plans, verifies).own)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with running(self._own):
                return super().forward(*args, **kwargs)

    Backend.__name__ = f"Imbrex{base.__name__}"
    return Backend


@contextlib.contextmanager
def in_place() -> Iterator[None]:
    """In this block SGLang makes backends with imbrex's kernels."""
    own = [
        (gdn_backend, "GDNAttnBackend", _with_kernel(gdn_backend.GDNAttnBackend, GdnKernel)),
        (kda_backend, "KDAAttnBackend", _with_kernel(kda_backend.KDAAttnBackend, KdaKernel)),
        (hybrid_linear_attn_backend, "Mamba2AttnBackend", _with_scan(hybrid_linear_attn_backend.Mamba2AttnBackend)),
    ]
    put(gdn_backend, *NAMES, "can_use_fused_qkvzba_causal_conv1d_update_contiguous")
    put(kda_backend, *NAMES)
    put(mamba, *NAMES_OF_MIXER, "mamba_chunk_scan_combined", "selective_state_update")
    put_always(hybrid_linear_attn_backend, "scatter_mamba_states_after_mtp_verify", commit)
    bases = [getattr(module, name) for module, name, _ in own]
    for module, name, made in own:
        setattr(module, name, made)
    try:
        yield
    finally:
        for (module, name, _), base in zip(own, bases):
            setattr(module, name, base)
