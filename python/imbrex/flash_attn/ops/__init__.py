"""Of flash_attn.ops there is triton.rotary."""
