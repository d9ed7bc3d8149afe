"""Of flash_attn.ops there is triton.rotary."""
from imbrex.flash_attn.ops import triton

__all__ = ["triton"]
