"""flash_attn.layers, of which imbrex has rotary."""
from imbrex.flash_attn.layers import rotary

__all__ = ["rotary"]
