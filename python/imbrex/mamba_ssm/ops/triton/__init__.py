"""What mamba_ssm has written in Triton; here it is kernels of imbrex."""
from imbrex.mamba_ssm.ops.triton import selective_state_update, ssd_combined

__all__ = ["selective_state_update", "ssd_combined"]
