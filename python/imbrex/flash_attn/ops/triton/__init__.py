"""flash_attn.ops.triton, of which imbrex has rotary."""
from imbrex.flash_attn.ops.triton import rotary

__all__ = ["rotary"]
