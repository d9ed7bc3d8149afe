"""Of flash_attn.layers there is rotary."""
from imbrex.flash_attn.layers import rotary

__all__ = ["rotary"]
