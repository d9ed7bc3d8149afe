"""flash_attn.ops, of which imbrex has triton.rotary."""
from imbrex.flash_attn.ops import triton

__all__ = ["triton"]
