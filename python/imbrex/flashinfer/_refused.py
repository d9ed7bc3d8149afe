"""Names of FlashInfer's attention that raise NotImplementedError here, with what to use instead."""
from typing import Any, Dict

_PAGED = "BatchDecodeWithPagedKVCacheWrapper and BatchPrefillWithPagedKVCacheWrapper do this on every GPU and on CPUs"
_RAGGED = "BatchPrefillWithRaggedKVCacheWrapper does this on every GPU and on CPUs"
_MLA = "BatchMLAPagedAttentionWrapper, with ckv and kpe in one cache"
_NVFP4 = "fp8 caches: torch.float8_e4m3fn with k_scale and v_scale"
_MIXED = "put prefill and decode into one batch of BatchPrefillWithPagedKVCacheWrapper or BatchAttention: one plan runs it all"
_VARIANT = "sinks, soft cap, ALiBi, windows and custom masks are arguments of the other functions"

_FUNCTIONS = {
    "single_decode_with_kv_cache_with_jit_module": _VARIANT,
    "single_prefill_with_kv_cache_with_jit_module": _VARIANT,
    "trtllm_batch_decode_with_kv_cache": _PAGED,
    "trtllm_batch_context_with_kv_cache": _PAGED,
    "trtllm_ragged_attention_deepseek": _RAGGED,
    "trtllm_fmha_v2_prefill": _RAGGED,
    "trtllm_sage_attention_quantize": "fp8 queries and keys: torch.float8_e4m3fn with scales",
    "fmha_v2_prefill_deepseek": _RAGGED,
    "fmha_v2_prefill_sm120": _RAGGED,
    "fmha_varlen": _RAGGED,
    "fmha_varlen_plan": _RAGGED,
    "xqa": _PAGED,
    "xqa_batch_decode_with_kv_cache": _PAGED,
    "xqa_mla": _MLA,
    "xqa_batch_decode_with_kv_cache_mla": _MLA,
    "trtllm_batch_decode_with_kv_cache_mla": _MLA,
    "trtllm_batch_decode_sparse_mla_dsv4": _MLA + "; sparse MLA is not there",
    "cudnn_batch_decode_with_kv_cache": _PAGED,
    "cudnn_batch_prefill_with_kv_cache": _PAGED,
    "nvfp4_quantize_append_paged_kv_cache": _NVFP4,
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": _NVFP4,
    "nvfp4_kv_quantize": _NVFP4,
    "nvfp4_kv_dequantize": _NVFP4,
    "nvfp4_kv_dequantize_paged": _NVFP4,
    "nvfp4_quantize_paged_kv_cache": _NVFP4,
    "nvfp4_attention_sm120_fwd": _NVFP4,
    "nvfp4_attention_sm120_quantize_qkv": _NVFP4,
}
_CLASSES = {
    "PODWithPagedKVCacheWrapper": _MIXED,
    "BatchPODWithPagedKVCacheWrapper": _MIXED,
    "BatchDecodeMlaWithPagedKVCacheWrapper": _MLA,
}


def _function(name: str, instead: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"imbrex.flashinfer: {name} is not there: {instead}")

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Refused: {instead}."
    return refused


def _class(name: str, instead: str) -> Any:
    return type(name, (), {"__init__": _function(name, instead), "__doc__": f"Refused: {instead}."})


REFUSED: Dict[str, Any] = {
    **{name: _function(name, instead) for name, instead in _FUNCTIONS.items()},
    **{name: _class(name, instead) for name, instead in _CLASSES.items()},
}
