from dataclasses import fields

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, subclass_attention_backend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    cache_torch_dtype,
)


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
        mm_prefix_clamp_sliding_window=False,
        attention_chunk_size=None,  # that of vLLM's ChunkedLocalAttention
        rswa_window=None,  # that of vLLM's RSWAAttention
        **extra_impl_args,
    ):
        super().__init__()
        self.mm_prefix_clamp_sliding_window = mm_prefix_clamp_sliding_window
        self.attention_chunk_size, self.rswa_window = attention_chunk_size, rswa_window
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
        if attention_chunk_size is not None:
            self.attn_backend = chunked_local_backend(self.attn_backend, attention_chunk_size)
        if attn_type == AttentionType.ENCODER_DECODER:
            self.attn_backend = cross_attention_backend(self.attn_backend)
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
        if self.attn_type == AttentionType.ENCODER_DECODER:
            return CrossAttentionSpec(**fields)
        if self.attention_chunk_size is not None:
            return ChunkedLocalAttentionSpec(attention_chunk_size=self.attention_chunk_size, **fields)
        if self.rswa_window is not None:
            return RSWASpec(rswa_window=self.rswa_window, **fields)
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


def chunked_local_backend(backend, chunk):
    """As vLLM wraps a backend for chunked local attention: its builder gets a request for each chunk that a request's queries are in."""
    underlying = backend.get_builder_cls()

    class ChunkedLocalAttentionBuilder(underlying):
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            return AttentionCGSupport.NEVER

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            cam = common_attn_metadata
            pages, starts, lengths, tables = chunk // self.kv_cache_spec.block_size, [0], [], []
            for row in range(cam.num_reqs):
                begin, end, length = *cam.query_start_loc_cpu[row : row + 2].tolist(), int(cam.seq_lens[row])
                position = length - (end - begin)
                while position < length:
                    number = position // chunk
                    stop = min(length, (number + 1) * chunk)
                    starts.append(starts[-1] + stop - position)
                    lengths.append(stop - number * chunk)
                    columns = torch.arange(number * pages, (number + 1) * pages).clamp(max=cam.block_table_tensor.shape[1] - 1)
                    tables.append(cam.block_table_tensor[row, columns.to(cam.block_table_tensor.device)])
                    position = stop
            starts, lengths = torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
            made = cam.replace(
                query_start_loc=starts.to(self.device),
                query_start_loc_cpu=starts,
                seq_lens=lengths.to(self.device),
                seq_lens_cpu_upper_bound=lengths,
                num_reqs=len(lengths),
                max_query_len=int(starts.diff().max()),
                max_seq_len=int(lengths.max()),
                block_table_tensor=torch.stack(tables),
            )
            metadata = super().build(common_prefix_len, made, fast_build)
            metadata.make_virtual_batches_block_table = None
            return metadata

    return subclass_attention_backend(f"ChunkedLocalAttention_{chunk}_", backend, ChunkedLocalAttentionBuilder)


def cross_attention_backend(backend):
    """As vLLM wraps a backend for cross attention: lengths are the encoder's, and the layer writes the keys of encoders that are new."""
    builder, impl = backend.get_builder_cls(), backend.get_impl_cls()

    class CrossAttentionBuilder(builder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            cam = common_attn_metadata
            size, slots = self.kv_cache_spec.block_size, [torch.zeros(0, dtype=torch.int64, device=self.device)]
            computed = cam.seq_lens_cpu_upper_bound - cam.query_start_loc_cpu.diff()
            for row, length in enumerate(cam.encoder_seq_lens_cpu.tolist()):
                if computed[row] == 0:
                    at = torch.arange(length, device=self.device)
                    slots.append(cam.block_table_tensor[row][at // size].to(torch.int64) * size + at % size)
            made = cam.replace(
                causal=False,
                max_seq_len=int(cam.encoder_seq_lens_cpu.max()),
                seq_lens=cam.encoder_seq_lens,
                seq_lens_cpu_upper_bound=torch.from_numpy(cam.encoder_seq_lens_cpu),
            )
            metadata = super().build(common_prefix_len, made, fast_build)
            metadata.slot_mapping = torch.cat(slots)
            return metadata

    class CrossAttentionImpl(impl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
            if attn_metadata is not None and key is not None:
                self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)

    overrides = dict(get_builder_cls=lambda: CrossAttentionBuilder, get_impl_cls=lambda: CrossAttentionImpl, forward_includes_kv_cache_update=True)
    return type("CrossAttention_" + backend.__name__, (backend,), overrides)


def fast_prefill_backend(backend):
    """As vLLM wraps a backend for layers that share a cache, with kv_sharing_fast_prefill: its builder gets the tokens alone whose logits are asked
    for, and what it gives has fields besides."""
    underlying = backend.get_builder_cls()

    class FastPrefillAttentionBuilder(underlying):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            cam = common_attn_metadata
            if cam.max_query_len > 1 and cam.logits_indices_padded is not None:
                kept = cam.logits_indices_padded[: cam.num_logits_indices].cpu()
                row = torch.bucketize(kept, cam.query_start_loc_cpu[1:], right=True)
                counts = torch.bincount(row, minlength=cam.num_reqs)
                starts = torch.zeros(cam.num_reqs + 1, dtype=torch.int32)
                starts[1:] = counts.cumsum(0)
                cam = cam.replace(
                    query_start_loc=starts.to(self.device),
                    query_start_loc_cpu=starts,
                    num_actual_tokens=len(kept),
                    max_query_len=int(counts.max()),
                    logits_indices_padded=None,
                )
            metadata = super().build(common_prefix_len, cam, fast_build)

            class KVSharingFastPrefillAttentionMetadata(type(metadata)):
                def __init__(self, made, given):
                    for each in fields(type(made)):
                        setattr(self, each.name, getattr(made, each.name))
                    self.logits_indices_padded, self.num_logits_indices = given.logits_indices_padded, given.num_logits_indices

            return KVSharingFastPrefillAttentionMetadata(metadata, common_attn_metadata)

    return subclass_attention_backend("FastPrefill_", backend, FastPrefillAttentionBuilder)


def encoder_only_spec(layer, vllm_config):
    return EncoderOnlyAttentionSpec(
        block_size=vllm_config.cache_config.block_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        dtype=vllm_config.model_config.dtype,
    )
