"""Of flash_attn.ops.triton there is rotary."""
from imbrex.flash_attn.ops.triton import rotary

__all__ = ["rotary"]
