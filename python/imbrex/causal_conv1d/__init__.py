"""causal_conv1d's functions on imbrex: the signatures of causal_conv1d 1.7 for torch tensors, on the CPU and NVIDIA GPUs, in the forward direction.

    from imbrex import causal_conv1d            # instead of: import causal_conv1d
    out = causal_conv1d.causal_conv1d_fn(x, weight, bias, activation="silu")

    sys.modules["causal_conv1d"] = causal_conv1d   # for programs whose import lines cannot be changed, before they are imported

Beside what causal_conv1d takes: CPU tensors, widths from 2 to 8, float32 and 16-bit tensors in one call (sums are floats, and the result is of the type of
x), and final states of any layout of x. x and states are read in place where the channels of a token lie together (stride(1) == 1), and copied otherwise.
There is no backward pass. docs/recurrent.md has an example.
"""
from imbrex.causal_conv1d import causal_conv1d_interface, causal_conv1d_varlen
from imbrex.causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

__version__ = "1.7.0"  # the one whose names and meanings are here

__all__ = ["causal_conv1d_fn", "causal_conv1d_interface", "causal_conv1d_update", "causal_conv1d_varlen"]
