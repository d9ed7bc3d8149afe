import enum
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, Optional

import torch


@dataclass
class ModelConfig:
    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    max_model_len: int = 512
    rswa_window: Optional[int] = None
    is_mm_prefix_lm: bool = False
    use_mla: bool = False
    hf_text_config: Any = None

    def get_num_attention_heads(self, parallel_config):
        return self.num_heads // parallel_config.tensor_parallel_size

    def get_num_kv_heads(self, parallel_config):
        return max(1, self.num_kv_heads // parallel_config.tensor_parallel_size)


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    use_ubatching: bool = False


@dataclass
class SchedulerConfig:
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 128
    max_num_encoder_input_tokens: int = 128


@dataclass
class CacheConfig:
    block_size: int = 16
    user_specified_block_size: bool = True
    cache_dtype: str = "auto"
    kv_sharing_fast_prefill: bool = False
    mamba_cache_mode: str = "none"
    mamba_block_size: int = 512
    kv_cache_layout: Optional[str] = None  # of the resolved layout, before builders are made


class CUDAGraphMode(enum.Enum):
    NONE = 0
    FULL = 2
    FULL_AND_PIECEWISE = (2, 1)

    def separate_routine(self):
        return isinstance(self.value, tuple)


@dataclass
class CompilationConfig:
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.NONE
    max_cudagraph_capture_size: Optional[int] = 32
    static_forward_context: Dict[str, Any] = field(default_factory=dict)


@dataclass
class SpeculativeConfig:
    num_speculative_tokens: Optional[int] = 2
    enable_adaptive_verification: bool = False


@dataclass
class AttentionConfig:
    backend: Any = None
    use_non_causal: bool = False


@dataclass
class VllmConfig:
    model_config: ModelConfig = field(default_factory=ModelConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    attention_config: AttentionConfig = field(default_factory=AttentionConfig)
    speculative_config: Optional[SpeculativeConfig] = None
    kv_transfer_config: Any = None
    additional_config: Any = field(default_factory=dict)

    @property
    def num_speculative_tokens(self):
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens or 0


_current = None


@contextmanager
def set_current_vllm_config(config):
    global _current
    before, _current = _current, config
    try:
        yield
    finally:
        _current = before


def get_current_vllm_config():
    assert _current is not None, "no current config"
    return _current


def get_current_vllm_config_or_none():
    return _current


def get_layers_from_vllm_config(vllm_config, layer_type, layer_names=None):
    known = vllm_config.compilation_config.static_forward_context
    names = known if layer_names is None else layer_names
    return {name: known[name] for name in names if isinstance(known.get(name), layer_type)}
