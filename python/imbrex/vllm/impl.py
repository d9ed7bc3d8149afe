"""One layer: its part of the spec, new keys and values into the cache, and attention."""

from typing import Any, Dict, Optional, Tuple

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from .. import _amx_packed
from ..engines import as_bytes, floats, type_name
from ..plan import KvLayer, Plan


def kv_type(kv_cache_dtype: str, model_dtype: Any) -> str:
    """imbrex's name of vLLM's cache type: "fp8_e4m3" of "fp8"."""
    if kv_cache_dtype == "auto":
        return type_name(model_dtype)
    names = {"float16": "f16", "bfloat16": "bf16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
    if kv_cache_dtype not in names:
        raise NotImplementedError(f"imbrex: expected a KV cache type of auto, {', '.join(names)}, got {kv_cache_dtype}")
    return names[kv_cache_dtype]


def kind_of(attn_type: str) -> str:
    """imbrex's name of vLLM's attention type."""
    names = {
        AttentionType.DECODER: "decoder",
        AttentionType.ENCODER: "encoder_only",
        AttentionType.ENCODER_ONLY: "encoder_only",
        AttentionType.ENCODER_DECODER: "encoder_decoder",
    }
    if attn_type not in names:
        raise NotImplementedError(f"imbrex: expected attention of a type of {', '.join(str(name) for name in names)}, got {attn_type}")
    return names[attn_type]


class Impl(AttentionImpl):
    """An attention layer of a decoder or an encoder, or cross attention between them. The Builder of its group plans for it, under `plan_key`."""

    can_return_lse_for_decode = False  # vLLM has no way to ask a layer without MLA for it
    lse_base_on_e = True  # imbrex's log-sum-exp is a natural logarithm
    supports_pcp = False
    supports_dcp = False
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: Optional[int] = None,
        alibi_slopes: Optional[Any] = None,
        sliding_window: Optional[int] = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: Optional[float] = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: Optional[str] = None,
        sinks: Optional[torch.Tensor] = None,
        use_alibi_sqrt: bool = False,
        chunk_lookback: int = -1,
        **extra: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window, self.soft_cap = sliding_window, float(logits_soft_cap or 0)
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.kind = kind_of(attn_type)
        self.ragged = self.kind == "encoder_only"
        for name, value in extra.items():
            if value not in (None, False, -1):
                raise NotImplementedError(f"imbrex: expected no {name}, got {value!r}")
        self.alibi_slopes = None if alibi_slopes is None else torch.as_tensor(alibi_slopes, dtype=torch.float32)
        self.alibi_sqrt = bool(use_alibi_sqrt) and alibi_slopes is not None
        self.chunk_lookback = chunk_lookback if sliding_window else -1  # 0 or more: the window is of chunks, so many before a token's own
        self.sinks = sinks
        self._sinks = None  # float32; at one address, which graphs read
        self.plan_key: Tuple = ()
        self.kv_format = "strided"  # or amx_packed, which the Builder of the group decides for all of its layers
        self._seen: Optional[torch.Tensor] = None
        self._pages: Tuple[Any, Any] = (None, None)

    def spec_fields(self, kv_cache_spec: Any, model_dtype: Any) -> Dict[str, Any]:
        """The arguments of imbrex.AttentionSpec, of this layer and its group's cache."""
        q_dtype = type_name(model_dtype)
        return dict(
            kind=self.kind,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_size,
            head_dim_v=kv_cache_spec.head_size_v,
            q_dtype=q_dtype,
            kv_dtype=q_dtype if self.ragged else kv_type(self.kv_cache_dtype, model_dtype),
            kv_format=self.kv_format,
            block_size=0 if self.ragged else kv_cache_spec.block_size,
            causal=self.kind == "decoder",
            sinks=self.sinks is not None,
            alibi=self.alibi_slopes is not None,
            **self.score_fields(),
        )

    def score_fields(self) -> Dict[str, Any]:
        """Those arguments that change a query's output."""
        fields = dict(scale=self.scale, soft_cap=self.soft_cap, alibi_sqrt=self.alibi_sqrt)
        if self.chunk_lookback >= 0:
            fields.update(chunk=self.sliding_window // (self.chunk_lookback + 1), chunk_lookback=self.chunk_lookback)
        elif self.sliding_window is not None:
            fields.update(window_left=self.sliding_window - 1, window_right=self.sliding_window - 1 if self.ragged else -1)
        return fields

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is None:
            return
        loaded = floats(self.sinks)
        if self._sinks is None or loaded.data_ptr() == self.sinks.data_ptr():
            self._sinks = loaded
        else:
            self._sinks.copy_(loaded)

    def extras(self, device: torch.device) -> Dict[str, torch.Tensor]:
        """sinks and alibi_slopes for Plan.run()."""
        made = {}
        if self.sinks is not None:
            if self._sinks is None:
                self.process_weights_after_loading(self.sinks.dtype)
            made["sinks"] = self._sinks
        if self.alibi_slopes is not None:
            if self.alibi_slopes.device != device:
                self.alibi_slopes = self.alibi_slopes.to(device)
            made["alibi_slopes"] = self.alibi_slopes
        return made

    def kv_of(self, layer: Any, kv_cache: torch.Tensor) -> KvLayer:
        """The pages of vLLM's [num_blocks, heads, block_size, k and v dims], whatever their strides; packed, keys are the first part of a
        head's block and values the rest."""
        if kv_cache is not self._seen:
            if self.kv_format == _amx_packed.FORMAT:
                self._pages = _amx_packed.halves(kv_cache, self.head_size)
            else:
                pages = as_bytes(kv_cache.permute(0, 2, 1, 3))
                self._pages = pages[..., : self.head_size], pages[..., self.head_size :]
            self._seen = kv_cache
        if not self.kv_cache_dtype.startswith("fp8"):
            return KvLayer(*self._pages)
        return KvLayer(*self._pages, layer._k_scale.reshape(-1), layer._v_scale.reshape(-1))

    def write_pages(self, plan: Plan, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor) -> None:
        """Writes new k and v to the slots of the plan's step."""
        plan.write_kv(self.kv_of(layer, kv_cache), key, value)

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Writes new k and v [tokens, num_kv_heads, head_size] to slot_mapping's slots; slot -1 is skipped. In cross attention these are an
        encoder's tokens, which are written once, whereas the plan's step counts the decoder's."""
        if self.ragged:
            return
        if self.kind == "encoder_decoder":
            return scatter(self.kv_of(layer, kv_cache), self.kv_cache_dtype, kv_cache, key, value, slot_mapping)
        metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
        if isinstance(metadata, list):
            metadata = metadata[0]
        if isinstance(metadata, dict):
            metadata = metadata.get(layer.layer_name)
        if metadata is not None and metadata.slot_mapping.data_ptr() == slot_mapping.data_ptr():
            self.write_pages(metadata.plans[self.plan_key], layer, key, value, kv_cache)
        else:  # a draft model's own slots, of DFlash also outside of its forward, or a graph that is captured without metadata
            scatter(self.kv_of(layer, kv_cache), self.kv_cache_dtype, kv_cache, key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: Optional[torch.Tensor] = None,
        output_block_scale: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Attention of query [tokens, num_heads, head_size] into output; rows past the step's tokens are not written."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("imbrex: expected no output_scale and output_block_scale: outputs are not quantised")
        if query.element_size() == 1:
            raise NotImplementedError(f"imbrex: expected queries of f32, bf16 or f16 in vLLM, got {query.dtype}")
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        plan: Plan = attn_metadata.plans_of_queries[self.plan_key]
        pages = KvLayer(key, value) if self.ragged else self.kv_of(layer, kv_cache)
        plan.run(query, pages, output[: attn_metadata.num_actual_tokens], **self.extras(query.device))
        return output


def scatter(pages: KvLayer, kv_cache_dtype: str, kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """write_kv() with PyTorch alone, for slots that no plan has. For slot -1 zeros go to slot 0, in vLLM's null block, which stands for blocks that
    no query sees, but may be read."""
    block_size = kv_cache.shape[2]
    slots, skipped = slot_mapping.clamp(min=0), (slot_mapping < 0)[:, None, None]
    for side, x, cache, scale in (("k", key, pages.k, pages.k_scale), ("v", value, pages.v, pages.v_scale)):
        x = x[: slots.shape[0]].masked_fill(skipped, 0)
        if scale is not None:
            kind = torch.float8_e5m2 if kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
            most = torch.finfo(kind).max
            x = (x.float() / scale.reshape(-1, 1)).clamp(-most, most).to(kind).view(torch.uint8)
        elif x.dtype != kv_cache.dtype:
            x = x.to(kv_cache.dtype)
        if cache.dim() == 3:
            _amx_packed.write_rows(side, cache, x, block_size, slots)
        else:
            cache[slots // block_size, slots % block_size] = x
