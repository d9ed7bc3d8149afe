"""vLLM's layers with a state, computed by imbrex: register() puts them in the place of its own. Projections, norms and states are vLLM's."""

from typing import Any, Optional

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.short_conv import ShortConv

from .. import _engine_states as states
from .._state_calls import rates_of
from ..engines import type_name

Tensor = torch.Tensor


class _StateLayer:
    """What the layers have in common."""

    kind: states.Kind

    def _set_kind(self, conv: states.Fields, recurrence: Optional[states.Fields] = None) -> None:
        """The last thing that __init__ of a layer does."""
        if is_conv_state_dim_first():
            raise NotImplementedError("imbrex: expected states of convolutions with channels last (VLLM_SSM_CONV_STATE_LAYOUT=SD), got DS")
        model, conv_dtype = self._model_type(), type_name(self.get_state_dtype()[0])
        if conv_dtype != model:
            raise NotImplementedError(f"imbrex: expected states of convolutions of the model's type {model}, got {conv_dtype}")
        fields, num_drafts = dict(conv), get_current_vllm_config().num_speculative_tokens
        rows, needed = self.get_state_shape()[0][-2], fields["width"] - 1 + num_drafts
        if rows != needed:
            raise NotImplementedError(f"imbrex: {self.prefix}: expected {needed} rows of a convolution's state with {num_drafts} drafts, got {rows}")
        if num_drafts:
            conv = tuple(dict(fields, num_drafts=num_drafts).items())
        self.kind = states.Kind(conv, recurrence)

    def _model_type(self) -> str:
        return type_name(self.model_config.dtype)

    def _state_type(self) -> str:
        return type_name(self.get_state_dtype()[1])

    def get_attn_backend(self) -> type:
        from .states import StateBackend

        return StateBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """A block of the prefix cache has to end with a step, as vLLM has it where layers do not export states amid a prompt."""
        return MambaBase.get_kv_cache_spec(self, vllm_config)

    def get_prefill_checkpoint_alignment(self) -> None:
        return None  # as vLLM 0.33 asks for that

    def _plans(self) -> Optional[states.LayerPlans]:
        """Those of this step; None in a profile run and a warm-up."""
        metadata = get_forward_context().attn_metadata
        found = metadata.get(self.prefix) if isinstance(metadata, dict) else None
        return None if found is None else found.plans_of(self.kind)

    def _conv_weight(self, linear: Any) -> Tensor:
        """[dim, width]. On CPUs vLLM packs some for kernels of its own, and keeps them as they were beside that."""
        source = getattr(linear, "_cpu_unpacked_conv_weight", None)
        source = linear.weight if source is None else source
        return states.matrix(source, self.model_config.dtype)


class Qwen(_StateLayer, QwenGatedDeltaNetAttention):
    """Gated delta nets of Qwen3-Next and Qwen3.5."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forward_method = self.forward_cuda  # what calls _forward_core(), on any device
        self.enable_fused_gdn_spec_decode = False
        tp, model = self.tp_size, self._model_type()
        self._set_kind(
            states.conv_fields(self.conv_dim // tp, self.conv_kernel_size, False, model, activation=self.activation),
            states.delta_fields(self.num_k_heads // tp, self.num_v_heads // tp, self.head_k_dim, self.head_v_dim, model, self._state_type()),
        )

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        plans = self._plans()
        if plans is not None:
            rates, bias = states.f32(self.A_log), states.f32(self.dt_bias)
            states.delta(plans, mixed_qkv, self._conv_weight(self.conv1d), *self.kv_cache, a, b, rates, bias, core_attn_out)


class Kimi(_StateLayer, KimiGatedDeltaNetAttention):
    """Kimi delta attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = self._model_type()
        self._set_kind(
            states.conv_fields(3 * self.local_projection_size, self.conv_size, False, model),
            states.kda_fields(self.local_num_heads, self.head_dim, model, self._state_type(), self.gate_lower_bound),
        )

    def _forward(self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor) -> None:
        plans = self._plans()
        if plans is None:
            return
        rates, bias = states.f32(self.A_log).view(-1), states.f32(self.dt_bias).view(-1, self.head_dim)
        states.delta(plans, mixed_qkv, self._conv_weight(self.conv1d), *self.kv_cache, g1[0], beta[0], rates, bias, core_attn_out[0])
        core_attn_out.copy_(self.o_norm(core_attn_out, g2))


class Mixer2(_StateLayer, MambaMixer2):
    """Mamba2 of Nemotron-H, Granite-4-H, Falcon-H1, Bamba and Zamba2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.use_replayssm:
            raise NotImplementedError("imbrex: expected use_replayssm to be off, got on")
        tp, model = self.tp_size, self._model_type()
        self._set_kind(
            states.conv_fields(self.tped_conv_size, self.conv_kernel_size, self.conv1d.bias is not None, model, activation=self.activation),
            states.mamba_fields(self.n_groups // tp, self.num_heads // tp, self.ssm_state_size, self.head_dim, model, self._state_type()),
        )

    def conv_ssm_forward(self, projected_states: Tensor, output: Tensor) -> None:
        plans = self._plans()
        if plans is None:
            return
        _, xbc, dt = projected_states.split([self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size], -1)
        bias = None if self.conv1d.bias is None else self.conv1d.bias.detach()
        rates = rates_of(self.A.detach())
        steps = (dt, rates, states.f32(self.dt_bias), states.f32(self.D))
        out = output.unflatten(-1, (-1, self.head_dim))
        states.mamba2(plans, xbc, self._conv_weight(self.conv1d), bias, *self.kv_cache, *steps, out)


class Mixer1(_StateLayer, MambaMixer):
    """Mamba1 of Jamba and Falcon-Mamba."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model, (channels, d_state) = self._model_type(), self.A.shape
        self._set_kind(
            states.conv_fields(channels, self.conv_kernel_size, self.conv1d.bias is not None, model, activation=self.activation),
            states.mamba_fields(1, channels, d_state, 1, model, self._state_type(), channel_rates=True),
        )

    def forward_impl(self, hidden_states: Tensor, output: Tensor) -> None:
        plans = self._plans()
        x, gate = self.in_proj(hidden_states)[0].chunk(2, -1)
        if plans is None:
            return
        conv_state, state = self.kv_cache
        bias = None if self.conv1d.bias is None else self.conv1d.bias.detach()
        x = plans.conv.run(x, self._conv_weight(self.conv1d), conv_state, bias=bias)
        dt, B, C = self._ssm_transform(x)
        rates = rates_of(self.A.detach())
        time_bias = None if self.dt_proj.bias is None else states.f32(self.dt_proj.bias)
        keys, queries, values = states.tight(B).unsqueeze(1), states.tight(C).unsqueeze(1), x.unsqueeze(-1)
        steps = dict(gate=states.tight(dt.transpose(-2, -1)), rates=rates, gate_bias=time_bias, skip=states.f32(self.D))
        y = plans.recurrence.run(queries, keys, values, state[:, None, :, None], **steps).squeeze(-1)
        y = (y.float() * torch.nn.functional.silu(gate.float())).to(y.dtype)
        output[: len(y)] = self.out_proj(y)[0]


class Lfm2(_StateLayer, ShortConv):
    """The gated convolution of LFM2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_kind(states.conv_fields(len(self.conv.weight), self.L_cache, self.conv.bias is not None, self._model_type(), gated=True))

    def forward_native(self, hidden_states: Tensor, output: Tensor) -> None:
        plans = self._plans()
        rows, _ = self.in_proj(hidden_states)
        if plans is None:
            return
        bias = None if self.conv.bias is None else self.conv.bias.detach()
        y = plans.conv.run(rows, self._conv_weight(self.conv), self.kv_cache[0], bias=bias)
        output[: len(y)] = self.out_proj(y)[0]

    forward_cuda = forward_native


LAYERS = {
    QwenGatedDeltaNetAttention: Qwen,
    KimiGatedDeltaNetAttention: Kimi,
    MambaMixer2: Mixer2,
    MambaMixer: Mixer1,
    ShortConv: Lfm2,
}


def register() -> None:
    """Puts imbrex in the place of vLLM's layers; any number of times."""
    for own, ours in LAYERS.items():
        if op_registry_oot.get(own.__name__) is not ours:
            PluggableLayer.register_oot(ours, name=own.__name__)
