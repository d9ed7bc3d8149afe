from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder


class ShortConvAttentionMetadataBuilder(AttentionMetadataBuilder):
    """One of the classes of builders that vLLM tells how many drafts were accepted."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        raise AssertionError("the builder of vLLM's own layers")

    def update_block_table(self, metadata, blk_table, slot_mapping):
        raise AssertionError("the builder of vLLM's own layers")
