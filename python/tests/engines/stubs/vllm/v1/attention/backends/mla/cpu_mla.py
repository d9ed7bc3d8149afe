from vllm.v1.attention.backend import AttentionBackend


class CPUMLAImpl:
    is_sparse = False

    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type,
                 kv_sharing_target_layer_name, **mla_args):  # fmt: skip
        assert num_kv_heads == 1 and not any((alibi_slopes, sliding_window, logits_soft_cap, kv_sharing_target_layer_name))
        self.num_heads, self.head_size, self.scale, self.kv_cache_dtype = num_heads, head_size, scale, kv_cache_dtype
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj"):
            setattr(self, name, mla_args[name])
        self.indexer = mla_args.get("indexer")

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale):
        rank = kv_c_normed.shape[-1]
        rows, valid = kv_cache.view(-1, kv_cache.shape[-1]), slot_mapping >= 0
        rows[slot_mapping[valid], :rank] = kv_c_normed[valid]
        rows[slot_mapping[valid], rank:] = k_pe.squeeze(1)[valid]


class CPUMLABackend(AttentionBackend):
    @staticmethod
    def get_name():
        return "CPU_MLA"

    @classmethod
    def is_mla(cls):
        return True

    @classmethod
    def get_supported_head_sizes(cls):
        return [576]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [16]

    @staticmethod
    def get_impl_cls():
        return CPUMLAImpl

    @staticmethod
    def get_builder_cls():
        raise NotImplementedError
