"""A step of vLLM's scheduler, planned once for the layers of a group."""

from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Dict, List, Optional, Tuple

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from .. import _amx_packed, _core
from ..engines import CheckedLayer, announce, as_bytes, check_pages, make_plan
from ..plan import Plan, select
from . import masks
from .builders import BuilderSetup
from .impl import Impl

logger = init_logger("vllm.imbrex")  # below "vllm", whose handlers and level it has


# The arguments of the spec under a mask that steps ask for, of those that a layer has otherwise.
_MASKS: Dict[str, Callable[[Dict[str, Any]], Dict[str, Any]]] = {
    "images": masks.with_images,
    "not causal": masks.not_causal,
    "by request": masks.causal_by_request,
}


def _of_rows(given: torch.Tensor, num_reqs: int, dtype: torch.dtype) -> torch.Tensor:
    """A number for each request on the host, and 0 for those that pad a step."""
    made = torch.zeros(num_reqs, dtype=dtype)
    made[: given.shape[0]] = given[:num_reqs].to("cpu", dtype)
    return made


@dataclass
class Metadata(AttentionMetadata):
    """The step as Impl reads it. Tensors are vLLM's own; num_actual_tokens counts padding too."""

    plans: Dict[Tuple, Plan]
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    arrays: Dict[str, Any] = field(default_factory=dict)  # that the plans' masks want besides those of every step
    image_plans: Optional[Dict[Tuple, Plan]] = None  # of a step with images
    mm_prefix_query_range_tensor: Optional[torch.Tensor] = None  # vLLM's Gemma 4 takes it away where layers see images as they see text

    @property
    def plans_of_queries(self) -> Dict[Tuple, Plan]:
        """Those that queries are computed with; new keys are written with `plans`."""
        return self.plans if self.image_plans is None or self.mm_prefix_query_range_tensor is None else self.image_plans


class Builder(BuilderSetup, AttentionMetadataBuilder[Metadata]):
    """A plan for each kind of layer in the group; vLLM calls build() once a step and, where it replays a graph, before that."""

    caches: ClassVar[Tuple[str, ...]] = (  # others have pages of their own
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "EncoderOnlyAttentionSpec",
        "ChunkedLocalAttentionSpec",
        "CrossAttentionSpec",
        "RSWASpec",
    )
    overlaps: ClassVar[bool] = True
    refused: ClassVar[Dict[str, str]] = {"dcp_local_seq_lens": "decode context parallelism"}  # fields of CommonAttentionMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS  # a captured graph replays every batch within the limits

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        self._set_up(kv_cache_spec, layer_names, vllm_config, device)
        speculative = vllm_config.speculative_config
        # Sampling decides lengths on the GPU then, and the host's are upper bounds.
        inexact = self.device_text != "cpu" and speculative is not None
        if inexact and self.settings.on_device == "never":
            raise ValueError('imbrex: expected on_device "auto" or "always" with speculative decoding on a GPU, got "never"')
        self.on_device = inexact or (self.settings.on_device == "always" and self.device_text != "cpu")
        self.supports_draft_decode_metadata_update = self.on_device or self.device_text == "cpu"
        self.rswa_window: Optional[int] = getattr(vllm_config.model_config, "rswa_window", None)
        has_images = getattr(vllm_config.model_config, "is_mm_prefix_lm", False)
        for name, asked in (("R-SWA", self.rswa_window is not None), ("multimodal prefixes", has_images)):
            if asked and self.on_device:
                raise NotImplementedError(f'imbrex: expected no drafts and no on_device "always" with {name} on a GPU, whose masks the host makes')
        self._limits_of_plans = self._limits(self._ahead())
        self._has_images = has_images
        self._plan_layers()

    def _plan_layers(self) -> None:
        self.plans: Dict[Tuple, Plan] = {}
        self.decode_plans = {} if self._decode_has_graphs() else self.plans  # of steps with one token a request
        self._masked_plans: Dict[str, Dict[Tuple, Plan]] = {}  # by the mask that steps ask for
        for layer in self.layers.values():
            if not isinstance(layer.impl, Impl):
                raise NotImplementedError(f"imbrex: expected layers of its own in its group, got {type(layer.impl).__name__}")
        limits, packed = self._limits_of_plans, self._takes_packed_pages()
        for layer in self.layers.values():
            layer.impl.kv_format = _amx_packed.FORMAT if packed else "strided"
            fields = self._fields_of(layer)
            layer.impl.plan_key = tuple(fields.items())
            if layer.impl.plan_key not in self.plans:
                spec = _core.AttentionSpec(**fields)
                self.plans[layer.impl.plan_key] = self._make_plan(spec, limits)
                if self.decode_plans is not self.plans:
                    self.decode_plans[layer.impl.plan_key] = self._make_plan(spec, dict(self._decode_limits(limits), max_query_len=1))
        if self._has_images:
            self._plans_masked("images")  # before the first request with one waits for it
        self._checked = not self.settings.self_check
        if self._checked:
            self._announce("self check left out")

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """A graph launches the kernels of one plan, so that there is none of steps that may have images, or may not be causal."""
        if getattr(vllm_config.attention_config, "use_non_causal", False):
            return AttentionCGSupport.NEVER
        if getattr(vllm_config.model_config, "is_mm_prefix_lm", False):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def _fields_of(self, layer: Any) -> Dict[str, Any]:
        """The arguments of imbrex.AttentionSpec for a layer of the group."""
        fields = layer.impl.spec_fields(self.kv_cache_spec, self.vllm_config.model_config.dtype)
        if self.rswa_window is not None and fields["kind"] == "decoder":
            return masks.retained_prompts(fields, self.rswa_window)
        return fields

    def _plans_masked(self, mask: str) -> Dict[Tuple, Plan]:
        """A plan for each kind of layer under a mask that steps ask for."""
        if mask not in self._masked_plans:
            made: Dict[Tuple, Plan] = {}
            for layer in self.layers.values():
                if layer.impl.plan_key not in made:
                    fields = _MASKS[mask](layer.impl.spec_fields(self.kv_cache_spec, self.vllm_config.model_config.dtype))
                    made[layer.impl.plan_key] = self._make_plan(_core.AttentionSpec(**fields), self._limits_of_plans)
            self._masked_plans[mask] = made
        return self._masked_plans[mask]

    def _limits(self, ahead: int = 0) -> Dict[str, int]:
        limits, scheduler = super()._limits(ahead), self.vllm_config.scheduler_config
        chunk = getattr(self.kv_cache_spec, "attention_chunk_size", None)
        if chunk:  # vLLM makes a request of each chunk of a request
            limits["max_num_reqs"] = 2 * limits["max_num_reqs"] + limits["max_num_tokens"] // chunk
        if self.crosses:
            limits["max_seq_len"] = max(limits["max_seq_len"], scheduler.max_num_encoder_input_tokens)
        return limits

    def _make_plan(self, spec: _core.AttentionSpec, limits: Dict[str, int]) -> Plan:
        return make_plan(spec, self.device_text, self.settings, on_device=self.on_device, workspace=self.workspace, **limits)

    def _ahead(self) -> int:
        """Lengths of a step with drafts may be so many tokens ahead."""
        speculative = self.vllm_config.speculative_config
        return 2 * (speculative.num_speculative_tokens or 0) if speculative is not None else 0

    def _takes_packed_pages(self) -> bool:
        """Whether all layers of the group are run by a backend that reads amx_packed, in the memory that vLLM's layout gives a head's block."""
        layout = getattr(self.vllm_config.cache_config, "kv_cache_layout", None)
        if self.device_text != "cpu" or layout is None or not layout.endswith("NC"):
            return False

        def same_backend(layer: Any) -> bool:
            fields = layer.impl.spec_fields(self.kv_cache_spec, self.vllm_config.model_config.dtype)
            if not _amx_packed.fits(fields):
                return False
            strided, packed = (_core.AttentionSpec(**{**fields, "kv_format": name}) for name in ("strided", _amx_packed.FORMAT))
            chosen = select(strided, "cpu", forced=self.settings.backend).backend
            return chosen != "reference" and any(name == chosen and not reasons for name, reasons in select(packed, "cpu").candidates)

        return all(same_backend(layer) for layer in self.layers.values())

    def _refuse_configuration(self) -> None:
        super()._refuse_configuration()
        spec, config = self.kv_cache_spec, self.vllm_config
        kind = type(spec).__name__
        if kind not in self.caches:
            raise NotImplementedError(f"imbrex: expected a KV cache of kind {', '.join(self.caches)}, got {kind}")
        for name, plain in (
            ("num_head_slots", None),
            ("state_content_bytes", None),
            ("tokens_per_state", 1),
        ):
            value = getattr(spec, name, plain)
            if value != plain:
                raise NotImplementedError(f"imbrex: expected a KV cache with {name} {plain}, got {value}")
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            size = getattr(config.parallel_config, name)
            if size > 1:
                raise NotImplementedError(f"imbrex: expected {name} 1, got {size}")
        if self.device_text == "cpu" and config.kv_transfer_config is not None:
            raise NotImplementedError("imbrex: expected no KV connector on a CPU, got one")

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> Metadata:
        cam = common_attn_metadata
        self._check_step(common_prefix_len, cam)
        self._plan_added_layers()
        if not self._checked:
            self._self_check()
        plans, arrays = self._plans_of_step(cam)
        metadata = Metadata(**self._step_of(cam), plans=plans, causal=self.decodes and cam.causal is True, arrays=arrays)
        if self.on_device:
            self._update_on_device(metadata)
        else:
            self._update(metadata, *self._on_host(cam))
            self._add_images(metadata, cam)
        return metadata

    @property
    def crosses(self) -> bool:
        """Whether keys are an encoder's, and queries a decoder's."""
        return type(self.kv_cache_spec).__name__ == "CrossAttentionSpec"

    @property
    def decodes(self) -> bool:
        """Whether layers of the group are those of a decoder, with keys of its own."""
        return next(iter(self.layers.values())).impl.kind == "decoder"

    def _plans_of_step(self, cam: CommonAttentionMetadata) -> Tuple[Dict[Tuple, Plan], Dict[str, Any]]:
        """The plans whose mask is that of a step, with the arrays that they want besides those of every step."""
        plans = self.decode_plans if cam.max_query_len == 1 else self.plans
        if not self.decodes:
            return plans, {}
        by_request = isinstance(cam.causal, torch.Tensor)
        if self.on_device and by_request:
            raise NotImplementedError("imbrex: expected lengths that the host knows where some requests are not causal, got those of the GPU")
        if by_request:
            return self._plans_masked("by request"), {"mask_tensors": {"causal": _of_rows(cam.causal, cam.num_reqs, torch.uint8)}}
        if not cam.causal:
            return self._plans_masked("not causal"), {}
        if self.rswa_window is not None:
            return plans, {"mask_tensors": {"prefix": _of_rows(cam.rswa_prefix_lens, cam.num_reqs, torch.int32)}}
        return plans, {}

    def _add_images(self, metadata: Metadata, cam: CommonAttentionMetadata) -> None:
        """Plans of the step's queries where some of them see an image in both directions."""
        if not cam.mm_req_doc_ranges or not self.decodes or cam.causal is not True:
            return
        starts, lengths = self._on_host(cam)
        arrays = masks.image_arrays(cam.mm_req_doc_ranges, starts, lengths)
        if arrays is None:
            return
        longest = max(last - first + 1 for images in cam.mm_req_doc_ranges.values() for first, last in images)
        if longest > self._longest_image():
            raise NotImplementedError(f"imbrex: expected images of at most a window's {self._longest_image()} tokens, got one of {longest}")
        metadata.image_plans = self._plans_masked("images")
        metadata.mm_prefix_query_range_tensor = arrays["last"]
        for plan in metadata.image_plans.values():
            plan.update(starts, lengths, block_table=metadata.block_table, **masks.update_with_images(plan.spec, arrays))

    def _longest_image(self) -> float:
        """Tokens of an image that layers whose window does not end it see whole; vLLM gives longer ones to the others alone."""
        unclamped = [layer for layer in self.layers.values() if not getattr(layer, "mm_prefix_clamp_sliding_window", False)]
        return min((layer.impl.sliding_window or float("inf") for layer in unclamped), default=float("inf"))

    def _check_step(self, common_prefix_len: int, cam: CommonAttentionMetadata) -> None:
        if common_prefix_len:
            raise NotImplementedError(f"imbrex: expected common_prefix_len 0, got {common_prefix_len}")
        for name, what in self.refused.items():
            if getattr(cam, name, None) is not None:
                raise NotImplementedError(f"imbrex does not have {what} in vLLM, but {name} is given")

    @staticmethod
    def _step_of(cam: CommonAttentionMetadata) -> Dict[str, Any]:
        """The fields of Metadata that are vLLM's own."""
        return dict(
            num_actual_tokens=cam.num_actual_tokens,
            max_query_len=cam.max_query_len,
            max_seq_len=cam.max_seq_len,
            query_start_loc=cam.query_start_loc[: cam.num_reqs + 1],
            seq_lens=cam.seq_lens[: cam.num_reqs],
            block_table=cam.block_table_tensor,
            slot_mapping=cam.slot_mapping,
        )

    def _on_host(self, cam: CommonAttentionMetadata) -> Tuple[torch.Tensor, torch.Tensor]:
        return cam.query_start_loc_cpu[: cam.num_reqs + 1], self._lengths(cam)

    def _lengths(self, cam: CommonAttentionMetadata) -> torch.Tensor:
        """Keys of each request, as the host knows them."""
        lengths = cam.seq_lens if self.device_text == "cpu" else cam.seq_lens_cpu_upper_bound
        if lengths is None:
            raise ValueError('imbrex: expected seq_lens_cpu_upper_bound, got none; the setting on_device "always" does without')
        return lengths[: cam.num_reqs]

    def _update(self, metadata: Metadata, starts: torch.Tensor, lengths: torch.Tensor) -> None:
        """starts and lengths are on the host."""
        for plan in metadata.plans.values():
            if plan.spec.block_size == 0:
                plan.update(starts, starts.diff(), kv_start_loc=metadata.query_start_loc)
            else:
                plan.update(starts, lengths, block_table=metadata.block_table, **self._slots(metadata), **metadata.arrays)

    def _slots(self, metadata: Metadata) -> Dict[str, torch.Tensor]:
        """Where the plans write new keys; those of an encoder are not in the plans' step."""
        return {} if self.crosses else {"slot_mapping": metadata.slot_mapping}

    def _update_on_device(self, metadata: Metadata) -> None:
        starts, tokens = metadata.query_start_loc, metadata.num_actual_tokens
        for plan in metadata.plans.values():
            if plan.spec.block_size == 0:
                plan.update_on_device(starts, starts.diff(), max_num_tokens=tokens, kv_start_loc=starts)
            else:
                plan.update_on_device(
                    starts,
                    metadata.seq_lens,
                    max_num_tokens=tokens,
                    block_table=metadata.block_table,
                    **self._slots(metadata),
                )

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Plans a step of drafts again with the lengths and slots that its tensors have by now. On a GPU a graph may hold it; a CPU has no graphs."""
        if self.on_device:
            return self._update_on_device(metadata)
        if self.device_text != "cpu":
            raise NotImplementedError('imbrex: expected the setting on_device "always" to plan within a graph, got plans of the host')
        self._update(metadata, metadata.query_start_loc, metadata.seq_lens)

    def _self_check(self) -> None:
        """Checks every layer that has pages of its own, once the engine has bound them."""
        owners = {n: x for n, x in self.layers.items() if not x.impl.ragged and x.impl.kv_sharing_target_layer_name is None}
        if any(x.kv_cache.numel() == 0 for x in owners.values()):
            return  # not bound yet
        check_pages([self._checked_layer(name, layer) for name, layer in owners.items()], self.device_text, self.settings)
        self._checked = True
        self._announce("self check passed")

    def _announce(self, self_check: str) -> None:
        """A line for each kind of layer. On a CPU vLLM says "Cannot use AttentionBackendEnum.CUSTOM" also where imbrex is in use."""
        role = "in place of CPU_ATTN" if self.device_text == "cpu" else "as CUSTOM"
        for key, plan in self.plans.items():
            names = [name for name, layer in self.layers.items() if layer.impl.plan_key == key]
            kind = "1 layer" if len(names) == 1 else f"{len(names)} layers"
            announce(logger, plan, f"{kind} from {names[0]} on, {role}", "no pages to check" if plan.spec.block_size == 0 else self_check)

    def _checked_layer(self, name: str, layer: Any) -> CheckedLayer:
        cache, impl = layer.kv_cache, layer.impl
        spec = _core.AttentionSpec(**impl.spec_fields(self.kv_cache_spec, self.vllm_config.model_config.dtype))
        expected = [spec.num_kv_heads, spec.block_size, spec.head_dim_qk + spec.head_dim_v]
        if cache.dim() != 4 or list(cache.shape[1:]) != expected:
            raise NotImplementedError(f"imbrex: expected pages [num_blocks, {', '.join(map(str, expected))}] of {name}, got {list(cache.shape)}")
        pages = impl.kv_of(layer, cache)

        def packed_rows(slots: torch.Tensor) -> Tuple[torch.Tensor, ...]:
            k, v = _amx_packed.halves(cache, spec.head_dim_qk)
            sides = (("k", k, spec.head_dim_qk), ("v", v, spec.head_dim_v))
            return tuple(_amx_packed.read_rows(side, x, as_bytes(cache).dtype, spec.block_size, dim, slots) for side, x, dim in sides)

        def rows(slots: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
            found = cache[slots // spec.block_size, :, slots % spec.block_size]
            return found[..., : spec.head_dim_qk], found[..., spec.head_dim_qk :]

        def write(plan: Plan, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
            impl.write_pages(plan, layer, k, v, cache)

        find = packed_rows if impl.kv_format == _amx_packed.FORMAT else rows
        return CheckedLayer(name, spec, pages, write, find, impl.extras(cache.device), impl.score_fields())
