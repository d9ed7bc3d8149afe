import torch


def mamba_get_block_table_tensor(block_table, seq_lens, kv_cache_spec, mamba_cache_mode):
    """The block of each request's state, and those of its drafts: all that it has, or with "align" those from the one of its last token on."""
    if mamba_cache_mode == "none":
        return block_table
    last = ((seq_lens - 1) // kv_cache_spec.block_size).clamp(min=0)
    blocks = last[:, None] + torch.arange(1 + kv_cache_spec.num_speculative_blocks, device=last.device)
    return torch.gather(block_table, 1, blocks.to(torch.int64))
