"""Of flash_attn.ops.triton there is rotary."""
