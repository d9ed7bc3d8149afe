from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, Generic, Optional, TypeVar

import torch


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend(ABC):
    supported_dtypes: ClassVar[list] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True
    supports_kv_cache_update_bypass = False

    def __init_subclass__(cls, **kwargs):
        """Backends are never instantiated, so what is missing would only show when it is called."""
        super().__init_subclass__(**kwargs)
        missing = [n for n in ("get_name", "get_impl_cls", "get_builder_cls") if getattr(getattr(cls, n), "__isabstractmethod__", False)]
        if missing:
            raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}")

    @staticmethod
    @abstractmethod
    def get_name():
        ...

    @staticmethod
    @abstractmethod
    def get_impl_cls():
        ...

    @staticmethod
    @abstractmethod
    def get_builder_cls():
        ...

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def full_cls_name(cls):
        return (cls.__module__, cls.__qualname__)

    @classmethod
    def get_supported_head_sizes(cls):
        return []

    @classmethod
    def supports_head_size(cls, head_size):
        return not cls.get_supported_head_sizes() or head_size in cls.get_supported_head_sizes()

    @classmethod
    def supports_dtype(cls, dtype):
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size):
        sizes = [getattr(s, "base", s) for s in cls.get_supported_kernel_block_sizes()]
        return block_size is None or any(block_size % s == 0 for s in sizes)

    @classmethod
    def customize_spec(cls, spec):
        return spec

    @classmethod
    def is_ssm(cls):
        return False

    @classmethod
    def is_mla(cls):
        return False

    @classmethod
    def is_sparse(cls):
        return False

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_alibi_sqrt(cls):
        return False

    @classmethod
    def supports_mm_prefix(cls):
        return False

    @classmethod
    def supports_per_head_quant_scales(cls):
        return False

    @classmethod
    def supports_sliding_window(cls):
        return False

    @classmethod
    def supports_rswa(cls):
        return False

    @classmethod
    def supports_non_causal(cls):
        return False

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_kv_connector(cls):
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls):
        return True

    @classmethod
    def supports_pcp(cls):
        return cls.get_impl_cls().supports_pcp

    @classmethod
    def supports_dcp(cls):
        return cls.get_impl_cls().supports_dcp

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability):
        return True

    @classmethod
    def supports_combination(cls, *args):
        return None

    @classmethod
    def validate_configuration(
        cls,
        head_size,
        dtype,
        kv_cache_dtype,
        block_size,
        use_mla,
        has_sink,
        use_sparse,
        use_mm_prefix,
        use_per_head_quant_scales,
        device_capability,
        attn_type,
        has_sliding_window=False,
        use_non_causal=False,
        use_batch_invariant=False,
        use_kv_connector=False,
        use_pcp=False,
        use_adaptive_verification=False,
        use_dcp=False,
        use_rswa=False,
    ):
        checks = [
            (cls.supports_head_size(head_size), "head_size"),
            (cls.supports_dtype(dtype), "dtype"),
            (cls.supports_kv_cache_dtype(kv_cache_dtype), "kv_cache_dtype"),
            (cls.supports_block_size(block_size), "block_size"),
            (not use_mm_prefix or cls.supports_mm_prefix(), "partial multimodal token full attention"),
            (use_mla == cls.is_mla(), "MLA" if use_mla else "non-MLA"),
            (not has_sink or cls.supports_sink(), "attention sinks"),
            (use_sparse == cls.is_sparse(), "sparse" if use_sparse else "non-sparse"),
            (not use_per_head_quant_scales or cls.supports_per_head_quant_scales(), "per-head quant scales"),
            (cls.supports_compute_capability(device_capability), "compute capability"),
            (cls.supports_attn_type(attn_type), f"attention type {attn_type}"),
            (not has_sliding_window or cls.supports_sliding_window(), "sliding window"),
            (not use_rswa or cls.supports_rswa(), "R-SWA"),
            (not use_non_causal or cls.supports_non_causal(), "non-causal attention"),
            (not use_batch_invariant or cls.supports_batch_invariance(), "batch invariance"),
            (not use_kv_connector or cls.supports_kv_connector(), "KV connector"),
            (not use_pcp or cls.supports_pcp(), "PCP"),
            (not use_dcp or cls.supports_dcp(), "DCP"),
            (not use_adaptive_verification or cls.supports_device_cpu_query_lens_mismatch(), "device-cpu query lens mismatch"),
        ]
        return [f"{what} not supported" for fine, what in checks if not fine]

    @classmethod
    def supported_kv_cache_layouts(cls):
        return None


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    logits_indices_padded: Optional[torch.Tensor] = None
    num_logits_indices: Optional[int] = None
    encoder_seq_lens: Optional[torch.Tensor] = None
    encoder_seq_lens_cpu: Any = None
    dcp_local_seq_lens: Optional[torch.Tensor] = None
    positions: Optional[torch.Tensor] = None
    is_prefilling: Optional[torch.Tensor] = None
    seq_lens_cpu_upper_bound: Optional[torch.Tensor] = None
    mm_req_doc_ranges: Optional[dict] = None
    rswa_prefix_lens: Optional[torch.Tensor] = None

    def replace(self, **changes):
        return replace(self, **changes)


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


M = TypeVar("M")


class AttentionMetadataBuilder(ABC, Generic[M]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold = None
    supports_update_block_table = False
    requires_block_table_width = False
    supports_draft_decode_metadata_update = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return cls._cudagraph_support

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata, fast_build=True)

    def update_draft_decode_metadata(self, metadata):
        raise NotImplementedError


T = TypeVar("T")


class AttentionImplBase(ABC, Generic[T]):
    can_return_lse_for_decode = False
    lse_base_on_e = True
    supports_pcp = False
    supports_dcp = False
    supports_quant_query_input = False

    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        self.dcp_world_size = self.pcp_world_size = 1
        self.need_to_return_lse_for_decode = self.dcp_world_size > 1 and self.can_return_lse_for_decode
        return self

    def process_weights_after_loading(self, act_dtype):
        pass


class AttentionImpl(AttentionImplBase[T], Generic[T]):
    kv_cache_dtype: str

    @abstractmethod
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ):
        ...

    @abstractmethod
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        ...


def subclass_attention_backend(name_prefix, attention_backend_cls, builder_cls):
    return type(name_prefix + attention_backend_cls.__name__, (attention_backend_cls,), {"get_builder_cls": lambda: builder_cls})
