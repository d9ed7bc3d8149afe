"""The backend class that vLLM asks before layers exist: its name, its classes, what it can run. Importing this checks vLLM's version."""

import inspect
from typing import Any, Dict, List, Optional, Tuple

import torch
import vllm
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from .. import _core
from ..engines import check_version, settings, type_name
from ..plan import select
from . import WRITTEN_FOR, masks
from .impl import Impl, kind_of, kv_type
from .metadata import Builder

check_version("vLLM", vllm.__version__, WRITTEN_FOR, least_patch=False)

# GPUs that imbrex can describe, by compute capability: selection then does not need a CUDA context.
_DESCRIBED = {(8, 0): "a100", (8, 9): "l40s", (9, 0): "h200", (10, 0): "b200", (12, 0): "rtx5090"}


class Backend(AttentionBackend):
    """imbrex for all layers of a model with keys and values of their own. Models with latents (MLA) have mla.MlaBackend."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"]
    forward_includes_kv_cache_update = False  # Impl.do_kv_cache_update
    supports_kv_cache_update_bypass = True  # Impl.forward reads the cache alone

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return Impl

    @staticmethod
    def get_builder_cls() -> type:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> List[MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> Tuple[KVCacheLayout, ...]:
        """All layouts, since pages are read by their strides. The one that is fastest in decode comes first."""
        first = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
        return first + tuple(layout for layout in KVCacheLayout if layout not in first)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> List[str]:
        """vLLM's own reasons against this backend, then those of imbrex.select()."""
        reasons = super().validate_configuration(*args, **kwargs)
        given = inspect.signature(super().validate_configuration).bind(*args, **kwargs).arguments
        return reasons + ([] if reasons else reasons_against(given))


class CpuBackend(Backend):
    """The backend under the name CPU_ATTN, which vLLM expects on CPUs."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # vLLM's connectors know the order of CPU_ATTN's own blocks


def described_device(capability: Optional[Any]) -> str:
    """The device that layers will be on: a name, where no GPU's context is there yet."""
    if current_platform.is_cpu():
        return "cpu"
    described = None if capability is None or torch.cuda.is_initialized() else _DESCRIBED.get((capability.major, capability.minor))
    return described or f"cuda:{torch.cuda.current_device()}"


def _spec_fields(given: Dict[str, Any]) -> Dict[str, Any]:
    """The properties of a layer that are known before it is made. Heads are those of the model, where a configuration is current."""
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    q_dtype = type_name(given["dtype"])
    kind = kind_of(given["attn_type"])
    encoder = kind == "encoder_only"
    return dict(
        num_q_heads=1 if model is None else model.get_num_attention_heads(config.parallel_config),
        num_kv_heads=1 if model is None else model.get_num_kv_heads(config.parallel_config),
        head_dim_qk=given["head_size"],
        kind=kind,
        q_dtype=q_dtype,
        kv_dtype=q_dtype if encoder else kv_type(given["kv_cache_dtype"] or "auto", given["dtype"]),
        block_size=0 if encoder else given["block_size"] or 16,
        causal=kind == "decoder",
        window_left=127 if given.get("has_sliding_window") else -1,
        sinks=bool(given["has_sink"]),
        alibi=False,
    )


def _all_fields(given: Dict[str, Any]) -> List[Dict[str, Any]]:
    """Of the plans that such a layer has: one for text, and those whose masks steps may ask for."""
    fields = _spec_fields(given)
    if fields["kind"] != "decoder":
        return [fields]
    if given.get("use_rswa"):
        return [masks.retained_prompts(fields, 128)]
    wanted = [fields]
    if given["use_mm_prefix"]:
        wanted.append(masks.with_images(fields))
    if given.get("use_non_causal"):
        wanted.append(masks.not_causal(fields))
    return wanted


def reasons_against(given: Dict[str, Any]) -> List[str]:
    """Why no backend of imbrex runs a layer of this configuration, a text for each that is for this kind of device; empty when one does."""
    device = _core.Device(described_device(given["device_capability"]))
    try:
        found = [refusals_of(select(_core.AttentionSpec(**fields), device, forced=settings().backend)) for fields in _all_fields(given)]
    except _core.Error as error:
        return [f"imbrex: {error.code}: {error}"]
    except NotImplementedError as error:
        return [str(error)]
    return list(dict.fromkeys(text for texts in found for text in texts))


def refusals_of(chosen: Any) -> List[str]:
    """A text for each reason of a selection that found nothing; empty where it did."""
    if chosen.backend is not None:
        return []
    texts = {name: [str(r) for r in reasons] for name, reasons in chosen.candidates if not any(r.code == "device.type" for r in reasons)}
    return [f"imbrex {name}: {text}" for name, found in texts.items() for text in found]
