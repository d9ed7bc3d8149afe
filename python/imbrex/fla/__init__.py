"""Operators of flash-linear-attention on imbrex: the signatures of fla-core 0.6 for torch tensors, on the CPU and NVIDIA GPUs, in the forward direction.

    from imbrex.fla.ops import chunk_gated_delta_rule    # instead of: from fla.ops import chunk_gated_delta_rule
    out, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

Gated delta nets, KDA, simple GLA and lightning attention are there, each as its chunked and its recurrent function, and gated delta products. Both functions
compute the same: how, the backend chooses by the lengths. Outputs are of the type of q, states are float32, and sums too. There is no backward pass. docs/recurrent.md has an example.
"""
from imbrex.fla import ops

__version__ = "0.6.0"  # of fla-core, whose names and meanings are here

__all__ = ["ops"]
