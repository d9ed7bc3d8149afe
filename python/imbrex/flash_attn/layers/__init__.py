"""Of flash_attn.layers there is rotary."""
