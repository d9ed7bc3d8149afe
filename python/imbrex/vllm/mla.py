"""Latent attention (MLA): the backend CUSTOM of such models, and one that stands in for CPU_MLA. A step's tokens all take one way through vLLM, as
those of a prompt do, and the plan chooses for each request whether it is computed in latent space or with expanded keys."""

import inspect
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Dict, List, Optional, Tuple

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from .. import _core
from ..engines import all_cores, announce, as_bytes, settings, type_name
from ..mla import MlaPlan
from ..plan import KvLayer, select
from .backend import described_device, refusals_of
from .impl import kv_type
from .metadata import Builder, Metadata, logger


@dataclass
class MlaMetadata(Metadata):
    """The step as MLAAttention reads it: every token is one of a prompt. Where requests of decode have lengths that the GPU alone knows, they are a part of
    their own, and so are those behind them; `plans` are those of the first part then."""

    num_reqs: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0
    prefill: Optional[Any] = None
    decode: Optional[Any] = None
    parts: List[Tuple[Dict[Tuple, MlaPlan], slice]] = field(default_factory=list)  # plans, and the tokens that they compute


class MlaImpl(CPUMLAImpl):
    """One layer. The MlaBuilder of its group plans for it, under `plan_key`."""

    layer_name = ""
    plan_key: Tuple = ()
    _kv_b: Optional[torch.Tensor] = None

    def spec_fields(self, kv_cache_spec: Any, model_dtype: Any) -> Dict[str, Any]:
        """The arguments of imbrex.MlaSpec."""
        if self.indexer is not None:
            raise NotImplementedError(f"imbrex: expected latent attention without an indexer, got {self.indexer}")
        return dict(
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_dim=self.qk_nope_head_dim,
            qk_rope_dim=self.qk_rope_head_dim,
            v_dim=self.v_head_dim,
            dtype=type_name(model_dtype),
            kv_dtype=kv_type(self.kv_cache_dtype, model_dtype),
            block_size=kv_cache_spec.block_size,
            scale=self.scale,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        weight = get_and_maybe_dequant_weights(self.kv_b_proj, out_dtype=act_dtype)
        self._kv_b = weight.detach().contiguous().view(self.num_heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)

    def _pages(self, kv_cache: torch.Tensor, k_scale: Optional[torch.Tensor]) -> KvLayer:
        """Pages of vLLM's [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]."""
        if self.kv_cache_dtype.startswith("fp8"):
            return KvLayer(as_bytes(kv_cache)[:, :, None], k_scale=k_scale.reshape(-1))
        return KvLayer(kv_cache[:, :, None])

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
        skip_scale: bool = False,
    ) -> None:
        """Writes new latents [tokens, kv_lora_rank] and k_pe [tokens, 1, qk_rope_head_dim] to slot_mapping's slots; slot -1 is skipped. With
        skip_scale, which vLLM 0.33 passes, k_scale is 1; it is read all the same."""
        if not kv_cache.numel():
            return
        metadata = self._metadata()
        if metadata is None or metadata.slot_mapping.data_ptr() != slot_mapping.data_ptr():  # a draft model's own slots
            if not kv_cache.is_cuda:
                return super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)
            from vllm import _custom_ops

            return _custom_ops.concat_and_cache_mla(kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten(), kv_cache_dtype, k_scale)
        rope = k_pe.squeeze(1) if self.qk_rope_head_dim else None
        for plans, tokens in metadata.parts:
            plans[self.plan_key].write_kv(self._pages(kv_cache, k_scale), kv_c_normed[tokens], None if rope is None else rope[tokens])

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
        for plans, tokens in attn_metadata.parts:
            plans[self.plan_key].run(q[tokens], self._kv_b, self._pages(kv_c_and_k_pe_cache, k_scale), out[tokens])

    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("imbrex: expected a step of MlaBuilder, which has no tokens with absorbed queries")


class MlaBuilder(Builder):
    """A plan for each kind of layer in the group; vLLM calls build() once a step.

    On a GPU steps with one token a request, or as many as drafts are verified, have plans of their own: these keep every request in latent space, so that
    graphs may hold them. With drafts their lengths are on the GPU alone. A step that has prompts too is planned in two parts, since which way a prompt takes
    is the host's affair; vLLM puts requests of few tokens first.
    """

    caches = ("MLAAttentionSpec",)
    overlaps: ClassVar[bool] = False
    refused: ClassVar[Dict[str, str]] = {
        **Builder.refused,
        "mm_req_doc_ranges": "multimodal tokens that see each other in both directions with latent attention",
        "rswa_prefix_lens": "sliding windows with a visible prefix (R-SWA) with latent attention",
        "encoder_seq_lens": "cross attention with latents",
        "logits_indices_padded": "fast prefill with a shared cache of latents",
    }
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return cls._cudagraph_support if vllm_config.speculative_config is None else AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        self._set_up(kv_cache_spec, layer_names, vllm_config, device)
        gpu, speculative = self.device_text != "cpu", vllm_config.speculative_config
        drafts = gpu and speculative is not None
        if drafts and self.settings.on_device == "never":
            raise ValueError('imbrex: expected on_device "auto" or "always" with speculative decoding on a GPU, got "never"')
        self.most_decoded = 1 + (speculative.num_speculative_tokens or 0) if drafts else 1  # query tokens of a request of decode
        if drafts:
            self.reorder_batch_threshold = self.most_decoded
        self.on_device = gpu and (drafts or self.settings.on_device == "always")  # steps of decode
        self.supports_draft_decode_metadata_update = drafts or not gpu
        self._plan_layers()

    def _plan_layers(self) -> None:
        gpu, limits = self.device_text != "cpu", self._limits(self._ahead())
        self.plans: Dict[Tuple, MlaPlan] = {}
        self.decode_plans: Dict[Tuple, MlaPlan] = {} if gpu else self.plans
        alone = dict(self._decode_limits(limits), max_query_len=self.most_decoded, on_device=self.on_device)
        alone["max_num_tokens"] = max(alone["max_num_tokens"], limits["max_num_reqs"] * self.most_decoded)
        for name, layer in self.layers.items():
            if not isinstance(layer.impl, MlaImpl):
                raise NotImplementedError(f"imbrex: expected layers of its own in its group, got {type(layer.impl).__name__}")
            fields = layer.impl.spec_fields(self.kv_cache_spec, self.vllm_config.model_config.dtype)
            layer.impl.layer_name, layer.impl.plan_key = name, tuple(fields.items())
            if layer.impl.plan_key not in self.plans:
                spec = _core.MlaSpec(**fields)
                self.plans[layer.impl.plan_key] = self._make_mla_plan(spec, limits)
                if gpu:
                    self.decode_plans[layer.impl.plan_key] = self._make_mla_plan(spec, alone)
        for key, plan in self.plans.items():
            names = [name for name, layer in self.layers.items() if layer.impl.plan_key == key]
            role = "as CUSTOM" if gpu else "in place of CPU_MLA"
            announce(logger, plan, f"{len(names)} layers from {names[0]} on, {role}", "pages of latents are not checked")

    def _make_mla_plan(self, spec: _core.MlaSpec, limits: Dict[str, Any]) -> MlaPlan:
        chosen = self.settings
        options = dict(num_threads=chosen.num_threads, validate=chosen.validate, out_dtype=spec.dtype, workspace=self.workspace)
        with all_cores():
            return MlaPlan(spec, self.device_text, backend=chosen.backend, **options, **limits)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> MlaMetadata:
        cam = common_attn_metadata
        self._check_step(common_prefix_len, cam)
        self._plan_added_layers()
        if cam.causal is not True:
            raise NotImplementedError(f"imbrex: expected causal decoder layers, got causal={cam.causal}")
        metadata = MlaMetadata(**self._step_of(cam), plans=self.plans, num_reqs=cam.num_reqs, num_prefills=cam.num_reqs)
        decodes = self._decodes(cam)
        if decodes == cam.num_reqs:
            metadata.plans = self.decode_plans
        elif decodes > 0 and self.on_device:
            return self._in_parts(metadata, cam, decodes)
        metadata.parts = [(metadata.plans, slice(None))]
        if self.on_device and decodes == cam.num_reqs:
            self._update_on_device(metadata)
        else:
            self._update(metadata, *self._on_host(cam))
        return metadata

    def _decodes(self, cam: CommonAttentionMetadata) -> int:
        """How many requests at the front have no more tokens than one of decode."""
        if cam.max_query_len <= self.most_decoded:
            return int(cam.num_reqs)
        more = cam.query_start_loc_cpu[: cam.num_reqs + 1].diff() > self.most_decoded
        return int(more.int().argmax())

    def _in_parts(self, metadata: MlaMetadata, cam: CommonAttentionMetadata, decodes: int) -> MlaMetadata:
        """Requests of decode by lengths on the GPU, those behind them by the host's, which are exact for a prompt."""
        starts, lengths = self._on_host(cam)
        tokens = int(starts[decodes])
        first = replace(
            metadata,
            num_actual_tokens=tokens,
            query_start_loc=metadata.query_start_loc[: decodes + 1],
            seq_lens=metadata.seq_lens[:decodes],
            block_table=metadata.block_table[:decodes],
            slot_mapping=metadata.slot_mapping[:tokens],
            plans=self.decode_plans,
        )
        rest = replace(metadata, block_table=metadata.block_table[decodes:], slot_mapping=metadata.slot_mapping[tokens:])
        self._update_on_device(first)
        self._update(rest, starts[decodes:] - tokens, lengths[decodes:])
        metadata.parts = [(self.decode_plans, slice(0, tokens)), (self.plans, slice(tokens, metadata.num_actual_tokens))]
        return metadata


class _AnyLatent(CPUMLABackend):
    """Latents of any size, in pages of any size."""

    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

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


class CpuMlaBackend(_AnyLatent):
    """The backend under the name CPU_MLA, which vLLM takes for latent attention on CPUs without AMX."""


class MlaBackend(_AnyLatent):
    """The backend under the name CUSTOM, for models with latent attention."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return 64  # fastest in decode

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> List[str]:
        """vLLM's own reasons against this backend, then those of imbrex.select()."""
        reasons = super().validate_configuration(*args, **kwargs)
        given = inspect.signature(super().validate_configuration).bind(*args, **kwargs).arguments
        return reasons + ([] if reasons else reasons_against(given))


def _spec_fields(given: Dict[str, Any]) -> Dict[str, Any]:
    """The properties of a layer that are known before it is made: those of the model, where a configuration is current, else DeepSeek V3's."""
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    text = getattr(model, "hf_text_config", None)
    rope, rank = getattr(text, "qk_rope_head_dim", 64), getattr(text, "kv_lora_rank", None)
    return dict(
        num_heads=128 if model is None else model.get_num_attention_heads(config.parallel_config),
        kv_lora_rank=given["head_size"] - rope if rank is None else rank,
        qk_nope_dim=getattr(text, "qk_nope_head_dim", 128),
        qk_rope_dim=rope,
        v_dim=getattr(text, "v_head_dim", 128),
        dtype=type_name(given["dtype"]),
        kv_dtype=kv_type(given["kv_cache_dtype"] or "auto", given["dtype"]),
        block_size=given["block_size"] or 64,
    )


def reasons_against(given: Dict[str, Any]) -> List[str]:
    """Why no backend of imbrex runs latent attention of this configuration; empty when one does."""
    device = _core.Device(described_device(given["device_capability"]))
    try:
        chosen = select(_core.MlaSpec(**_spec_fields(given)), device, forced=settings().backend)
    except _core.Error as error:
        return [f"imbrex: {error.code}: {error}"]
    except NotImplementedError as error:
        return [str(error)]
    return refusals_of(chosen)
