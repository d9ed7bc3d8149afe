"""flash-attn's functions on imbrex: the signatures of flash-attn 2.8 for torch tensors, on the CPU and NVIDIA GPUs, in the forward direction.

    from imbrex import flash_attn            # instead of: import flash_attn
    out = flash_attn.flash_attn_func(q, k, v, causal=True)

    sys.modules["flash_attn"] = flash_attn   # for programs whose import lines cannot be changed, before they are imported

Beside what flash-attn takes: float32, any head_dim (padded to a multiple of 8), CPU tensors. window_size is (left, right), inclusive; causal is
aligned at the bottom right; the log-sum-exp is the natural one. Differences: a row that sees no key has lse -inf (flash-attn 2: +inf); `deterministic` and
`num_splits` change nothing, since results do not depend on the split; there is no backward pass and no dropout. docs/flash_attn.md has the table.

bert_padding, layers.rotary and flash_attn_interface are modules of it as in flash-attn; imbrex.flash_attn_interface is FlashAttention 3's.
"""
from imbrex.flash_attn import bert_padding, flash_attn_interface, layers, ops
from imbrex.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_gpu,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.3"  # the one whose names and meanings are here

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "layers",
    "ops",
]
