"""mamba_ssm's operators on imbrex: the signatures of mamba_ssm 2.3 for torch tensors, on the CPU and NVIDIA GPUs, in the forward direction.

    from imbrex.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined    # instead of: from mamba_ssm.ops...
    out, state = mamba_chunk_scan_combined(x, dt, A, B, C, 256, D=D, dt_bias=dt_bias, dt_softplus=True, return_final_states=True)

selective_scan_fn (Mamba1), mamba_chunk_scan_combined and mamba_split_conv1d_scan_combined (Mamba2) and selective_state_update (a step of both) are there. A is
negative, and steps are not: outputs are no numbers otherwise. Sums and new states are float32. There is no backward pass. docs/recurrent.md has an example.
"""
from imbrex.mamba_ssm import ops
from imbrex.mamba_ssm.ops.selective_scan_interface import selective_scan_fn

__version__ = "2.3.2"  # the one whose names and meanings are here

__all__ = ["ops", "selective_scan_fn"]
