"""Latent attention (MLA) on CPUs: a backend that stands in for CPU_MLA. A step's tokens all take one way through vLLM, as those of a prompt do, and
the plan chooses for each request whether it is computed in latent space or with expanded keys."""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from .. import _core
from ..engines import all_cores, announce, device_text, settings, type_name
from ..mla import MlaPlan
from .metadata import Builder, Metadata, logger


@dataclass
class MlaMetadata(Metadata):
    """The step as MLAAttention reads it: every token is one of a prompt."""

    num_reqs: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
    prefill: Optional[Any] = None
    decode: Optional[Any] = None


class MlaImpl(CPUMLAImpl):
    """One layer. The MlaBuilder of its group plans for it, under `plan_key`."""

    layer_name = ""
    plan_key: Tuple = ()
    _kv_b: Optional[torch.Tensor] = None

    def spec_fields(self, kv_cache_spec: Any, model_dtype: Any) -> Dict[str, Any]:
        """The arguments of imbrex.MlaSpec."""
        if self.kv_cache_dtype != "auto" or self.indexer is not None:
            raise NotImplementedError(
                f"imbrex: expected latents in the model's type and no indexer, got kv_cache_dtype {self.kv_cache_dtype} and {self.indexer}"
            )
        dtype = type_name(model_dtype)
        return dict(
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_dim=self.qk_nope_head_dim,
            qk_rope_dim=self.qk_rope_head_dim,
            v_dim=self.v_head_dim,
            dtype=dtype,
            kv_dtype=dtype,
            block_size=kv_cache_spec.block_size,
            scale=self.scale,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        weight = get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=act_dtype)
        self._kv_b = weight.detach().contiguous().view(self.num_heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)

    def _metadata(self) -> Optional[MlaMetadata]:
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, list):
            metadata = metadata[0]
        return metadata.get(self.layer_name) if isinstance(metadata, dict) else metadata

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Writes new latents [tokens, kv_lora_rank] and k_pe [tokens, 1, qk_rope_head_dim] to slot_mapping's slots; slot -1 is skipped."""
        if not kv_cache.numel():
            return
        metadata = self._metadata()
        if metadata is None or metadata.slot_mapping.data_ptr() != slot_mapping.data_ptr():  # a draft model's own slots
            return super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
        rope = k_pe.squeeze(1) if self.qk_rope_head_dim else None
        metadata.plans[self.plan_key].write_kv((kv_cache[:, :, None],), kv_c_normed, rope)

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MlaMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: Optional[torch.Tensor] = None,
    ) -> None:
        """Attention of q [tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim] over the pages, which hold this step's latents too."""
        if output_scale is not None:
            raise NotImplementedError("imbrex: expected no output_scale: outputs are not quantised")
        out = output.view(-1, self.num_heads, self.v_head_dim)
        attn_metadata.plans[self.plan_key].run(q, self._kv_b, (kv_c_and_k_pe_cache[:, :, None],), out)

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("imbrex: expected a step of MlaBuilder, which has no tokens with absorbed queries")


class MlaBuilder(Builder):
    """A plan for each kind of layer in the group; vLLM calls build() once a step."""

    caches = ("MLAAttentionSpec",)

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        given = vllm_config.additional_config
        self.settings = settings(given.get("imbrex") if isinstance(given, dict) else None)
        self.device_text, self.on_device = device_text(device), False
        self._refuse_configuration()
        self.layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, layer_names)
        self.plans: Dict[Tuple, MlaPlan] = {}
        limits = self._limits()
        for name, layer in self.layers.items():
            if not isinstance(layer.impl, MlaImpl):
                raise NotImplementedError(f"imbrex: expected layers of its own in its group, got {type(layer.impl).__name__}")
            fields = layer.impl.spec_fields(kv_cache_spec, vllm_config.model_config.dtype)
            layer.impl.layer_name, layer.impl.plan_key = name, tuple(fields.items())
            if layer.impl.plan_key not in self.plans:
                self.plans[layer.impl.plan_key] = self._make_mla_plan(_core.MlaSpec(**fields), limits)
        self.decode_plans = self.plans
        for key, plan in self.plans.items():
            names = [name for name, layer in self.layers.items() if layer.impl.plan_key == key]
            announce(logger, plan, f"{len(names)} layers from {names[0]} on, in place of CPU_MLA", "pages of latents are not checked")

    def _make_mla_plan(self, spec: _core.MlaSpec, limits: Dict[str, int]) -> MlaPlan:
        chosen = self.settings
        with all_cores():
            return MlaPlan(spec, self.device_text, backend=chosen.backend, num_threads=chosen.num_threads, validate=chosen.validate, **limits)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> MlaMetadata:
        cam = common_attn_metadata
        self._check_step(common_prefix_len, cam)
        if cam.causal is not True:
            raise NotImplementedError(f"imbrex: expected causal decoder layers, got causal={cam.causal}")
        metadata = MlaMetadata(**self._step_of(cam), plans=self.plans, num_reqs=cam.num_reqs, num_prefills=cam.num_reqs)
        self._update(metadata, cam)
        return metadata


class CpuMlaBackend(CPUMLABackend):
    """The backend under the name CPU_MLA, which vLLM takes for latent attention on CPUs without AMX."""

    @classmethod
    def get_supported_head_sizes(cls) -> List[int]:
        return []  # any

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> List[MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: Optional[int]) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type:
        return MlaImpl

    @staticmethod
    def get_builder_cls() -> type:
        return MlaBuilder
