import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType, subclass_attention_backend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec, FullAttentionSpec, SlidingWindowSpec, cache_torch_dtype


class Attention(nn.Module, AttentionLayerBase):
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        use_alibi_sqrt=None,
        logits_soft_cap=None,
        per_layer_sliding_window=None,
        prefix="",
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
        attn_backend=None,
        head_size_v=None,
        **extra_impl_args,
    ):
        super().__init__()
        config = get_current_vllm_config()
        self.vllm_config, self.layer_name, self.attn_type = config, prefix, attn_type
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.head_size_v = head_size_v or head_size
        self.sliding_window = per_layer_sliding_window
        self.kv_cache_dtype = config.cache_config.cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.attn_backend = attn_backend or get_attn_backend(
            head_size,
            torch.get_default_dtype(),
            self.kv_cache_dtype,
            has_sink=extra_impl_args.get("sinks") is not None,
            attn_type=attn_type,
            has_sliding_window=per_layer_sliding_window is not None,
        )
        if use_alibi_sqrt and not self.attn_backend.supports_alibi_sqrt():
            raise ValueError("use_alibi_sqrt is not supported")
        if self.attn_backend.supports_alibi_sqrt():
            extra_impl_args["use_alibi_sqrt"] = bool(use_alibi_sqrt)
        self.impl = self.attn_backend.get_impl_cls()(
            num_heads,
            head_size,
            scale,
            self.num_kv_heads,
            alibi_slopes,
            per_layer_sliding_window,
            self.kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **extra_impl_args,
        )
        self.backend = AttentionBackendEnum[self.attn_backend.get_name()]
        self.kv_cache = torch.tensor([])
        for name in "qkv":
            self.register_buffer(f"_{name}_scale", torch.tensor(1.0))
            setattr(self, f"_{name}_scale_float", 1.0)
        config.compilation_config.static_forward_context[prefix] = self

    def process_weights_after_loading(self, act_dtype):
        self.impl.process_weights_after_loading(act_dtype)

    def get_attn_backend(self):
        return self.attn_backend

    def get_kv_cache_spec(self, vllm_config):
        if self.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
            return None
        fields = dict(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            dtype=cache_torch_dtype(self.kv_cache_dtype, vllm_config.model_config.dtype),
        )
        return FullAttentionSpec(**fields) if self.sliding_window is None else SlidingWindowSpec(sliding_window=self.sliding_window, **fields)

    def forward(self, query, key, value):
        output = torch.full((query.shape[0], self.num_heads * self.head_size_v), float("nan"), dtype=query.dtype, device=query.device)
        query = query.view(-1, self.num_heads, self.head_size)
        if key is not None:
            key, value = key.view(-1, self.num_kv_heads, self.head_size), value.view(-1, self.num_kv_heads, self.head_size_v)
        if not self.attn_backend.forward_includes_kv_cache_update and self.kv_sharing_target_layer_name is None and key is not None:
            unified_kv_cache_update(key, value, self.layer_name)
        unified_attention_with_output(query, key, value, output.view(-1, self.num_heads, self.head_size_v), self.layer_name)
        return output


def get_attention_context(layer_name):
    context = get_forward_context()
    metadata = context.attn_metadata
    if isinstance(metadata, list):
        metadata = metadata[0]
    if isinstance(metadata, dict):
        metadata = metadata[layer_name]
    layer = context.no_compile_layers[layer_name]
    return metadata, layer, layer.kv_cache, context.slot_mapping.get(layer_name)


def unified_kv_cache_update(key, value, layer_name):
    _, layer, kv_cache, slots = get_attention_context(layer_name)
    if slots is not None:
        assert hasattr(layer.impl, "do_kv_cache_update"), f"{type(layer.impl).__name__} does not update the cache"
        layer.impl.do_kv_cache_update(layer, key, value, kv_cache, slots)


def unified_attention_with_output(query, key, value, output, layer_name):
    metadata, layer, kv_cache, _ = get_attention_context(layer_name)
    layer.impl.forward(layer, query, key, value, kv_cache, metadata, output=output, output_scale=None, output_block_scale=None)


def encoder_only_backend(backend):
    """As vLLM wraps a backend for encoder layers: their builder gets causal False."""
    underlying = backend.get_builder_cls()

    class EncoderOnlyAttentionBuilder(underlying):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return super().build(common_prefix_len, common_attn_metadata.replace(causal=False), fast_build)

    return subclass_attention_backend("EncoderOnlyAttention_", backend, EncoderOnlyAttentionBuilder)


def encoder_only_spec(layer, vllm_config):
    return EncoderOnlyAttentionSpec(
        block_size=vllm_config.cache_config.block_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        dtype=vllm_config.model_config.dtype,
    )
