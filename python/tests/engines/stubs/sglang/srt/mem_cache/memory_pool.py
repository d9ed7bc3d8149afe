from dataclasses import dataclass
from typing import Optional

import torch


class ReqToTokenPool:
    """Row 0 is for requests of padding; what a row has past a request's tokens is whatever was there before."""

    def __init__(self, size, max_context_len, device):
        self.size, self.max_context_len, self.device = size, max_context_len, device
        self.req_to_token = torch.zeros((size + 1, max_context_len), dtype=torch.int32, device=device)

    def write(self, indices, values):
        self.req_to_token[indices] = values


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: Optional[torch.Tensor] = None
    full_loc: Optional[torch.Tensor] = None
    physical: bool = False

    @classmethod
    def for_batch(cls, forward_batch, *, swa_loc=None, full_loc=None):
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc, physical=forward_batch.out_cache_loc_is_physical)

    @classmethod
    def for_layer(cls, forward_batch, layer, *, swa_loc=None, full_loc=None):
        if layer.is_cross_attention:
            return cls(forward_batch.encoder_out_cache_loc, swa_loc, full_loc)
        return cls.for_batch(forward_batch, swa_loc=swa_loc, full_loc=full_loc)


class KVCache:
    pass


class MHATokenToKVPool(KVCache):
    is_quantized_kv_cache = False

    """Keys and values of each layer: [tokens, heads, dim] (nhd), or [pages, heads, page_size, dim] (hnd). Page 0 is for padding."""

    def __init__(self, size, page_size, dtype, head_num, head_dim, layer_num, device, v_head_dim=None, kv_cache_layout="nhd", poison=0x7F):
        assert size % page_size == 0
        self.size, self.page_size, self.dtype, self.kv_cache_layout = size, page_size, dtype, kv_cache_layout
        self.store_dtype = torch.uint8 if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else dtype
        self.start_layer, self.layer_num = 0, layer_num

        def buffer(dim):
            tokens = size + page_size
            shape = (tokens // page_size, head_num, page_size, dim) if kv_cache_layout == "hnd" else (tokens, head_num, dim)
            return torch.full(shape, poison if self.store_dtype == torch.uint8 else float("nan"), dtype=self.store_dtype, device=device)

        self.k_buffer = [buffer(head_dim) for _ in range(layer_num)]
        self.v_buffer = [buffer(v_head_dim or head_dim) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id):
        return self.k_buffer[layer_id - self.start_layer].view(self.dtype)

    def get_value_buffer(self, layer_id):
        return self.v_buffer[layer_id - self.start_layer].view(self.dtype)

    def get_kv_buffer(self, layer_id):
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=None, v_scale=None, layer_id_override=None):
        loc = loc_info.loc if isinstance(loc_info, KVWriteLoc) else loc_info
        if cache_k.dtype != self.dtype:
            if k_scale is not None:
                cache_k.div_(k_scale)
            if v_scale is not None:
                cache_v.div_(v_scale)
            cache_k, cache_v = cache_k.to(self.dtype), cache_v.to(self.dtype)
        index = (layer.layer_id if layer_id_override is None else layer_id_override) - self.start_layer
        for pages, new in ((self.k_buffer[index], cache_k), (self.v_buffer[index], cache_v)):
            new = new.view(self.store_dtype)
            if self.kv_cache_layout == "hnd":
                pages[loc // self.page_size, :, loc % self.page_size] = new
            else:
                pages[loc] = new


class HybridLinearKVPool(KVCache):
    """Pages for the layers with full attention alone, by the number that these have among themselves."""

    def __init__(self, full_kv_pool, full_attention_layer_ids):
        self.full_kv_pool, self.mapping = full_kv_pool, {layer: index for index, layer in enumerate(full_attention_layer_ids)}

    def get_kv_buffer(self, layer_id):
        return self.full_kv_pool.get_kv_buffer(self.mapping[layer_id])

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, k_scale=1.0, v_scale=1.0):
        self.full_kv_pool.set_kv_buffer(layer, loc_info, cache_k, cache_v, k_scale, v_scale, layer_id_override=self.mapping[layer.layer_id])


class MLATokenToKVPool(KVCache):
    """Latents of each layer with the part of their keys that has a position: [tokens, 1, kv_lora_rank + qk_rope_head_dim]."""

    def __init__(self, size, page_size, dtype, kv_lora_rank, qk_rope_head_dim, layer_num, device, use_dsa=False):
        self.size, self.page_size, self.dtype, self.use_dsa = size, page_size, dtype, use_dsa
        self.kv_lora_rank, self.qk_rope_head_dim, self.kv_cache_dim = kv_lora_rank, qk_rope_head_dim, kv_lora_rank + qk_rope_head_dim
        self.kv_scale_buffer = None
        self.store_dtype = torch.uint8 if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else dtype
        poison = 0x7F if self.store_dtype == torch.uint8 else float("nan")
        shape = (size + page_size, 1, self.kv_cache_dim)
        self.kv_buffer = [torch.full(shape, poison, dtype=self.store_dtype, device=device) for _ in range(layer_num)]

    def get_key_buffer(self, layer_id):
        return self.kv_buffer[layer_id].view(self.dtype)

    def get_kv_buffer(self, layer_id):
        return self.get_key_buffer(layer_id), self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v, layer_id_override=None):
        loc = loc_info.loc if isinstance(loc_info, KVWriteLoc) else loc_info
        index = layer.layer_id if layer_id_override is None else layer_id_override
        self.kv_buffer[index][loc] = cache_k.to(self.dtype).view(self.store_dtype)
