"""Modules of this package import each other by absolute names."""
from imbrex.mamba_ssm.ops import selective_scan_interface, triton

__all__ = ["selective_scan_interface", "triton"]
