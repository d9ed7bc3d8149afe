import torch


def mamba_get_block_table_tensor(block_table, seq_lens, kv_cache_spec, mamba_cache_mode):
    """The block of each request's state: its only one, or with "align" that of its last token."""
    if mamba_cache_mode == "none":
        return block_table
    last = ((seq_lens - 1) // kv_cache_spec.block_size).clamp(min=0)
    return torch.gather(block_table, 1, last[:, None].to(torch.int64))
