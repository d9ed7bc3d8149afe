import importlib
from typing import Any, NamedTuple, Optional

import vllm.config
import vllm.platforms
from vllm.v1.attention.backend import AttentionType


class AttentionSelectorConfig(NamedTuple):
    head_size: int
    dtype: Any
    kv_cache_dtype: Optional[str]
    block_size: Optional[int]
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    use_mm_prefix: bool = False
    use_per_head_quant_scales: bool = False
    attn_type: str = AttentionType.DECODER
    has_sliding_window: bool = False
    use_non_causal: bool = False
    use_batch_invariant: bool = False
    use_kv_connector: bool = False
    use_pcp: bool = False
    use_adaptive_verification: bool = False
    use_dcp: bool = False
    use_rswa: bool = False


def get_attn_backend(head_size, dtype, kv_cache_dtype, has_sink=False, attn_type=None, has_sliding_window=False):
    config = vllm.config.get_current_vllm_config()
    cache = config.cache_config
    wanted = AttentionSelectorConfig(
        head_size,
        dtype,
        kv_cache_dtype,
        cache.block_size if cache.user_specified_block_size else None,
        has_sink=has_sink,
        attn_type=attn_type or AttentionType.DECODER,
        has_sliding_window=has_sliding_window,
        use_non_causal=config.attention_config.use_non_causal,
        use_kv_connector=config.kv_transfer_config is not None,
        use_dcp=config.parallel_config.decode_context_parallel_size > 1,
    )
    path = vllm.platforms.current_platform.get_attn_backend_cls(config.attention_config.backend, wanted)
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)
