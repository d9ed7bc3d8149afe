"""Recurrent layers: Mamba, gated delta nets, KDA and lightning attention."""
from typing import Any, Optional

from . import _core
from ._frameworks import empty, exported, no_gradient, stream_address
from ._state_plan import StatePlan
from .plan import Array


class RecurrentPlan(StatePlan):
    """Everything one step needs, decided once and reused by every layer of the same spec. For one thread at a time, and one stream.

    `backend` forces one ("" takes the first that runs the spec). num_threads, of a CPU: 0 is PyTorch's threads where it is loaded, else one for each core. on_device:
    update_on_device() will be called, on a GPU only. Calls for a GPU go to `stream`, or to the one that PyTorch would use now. `workspace` may be the one that
    plans of other layers share.
    """

    _of_core = _core.RecurrentPlan

    def run(
        self,
        q: Array,
        k: Array,
        v: Array,
        state: Array,
        *,
        gate: Optional[Array] = None,
        beta: Optional[Array] = None,
        rates: Optional[Array] = None,
        gate_bias: Optional[Array] = None,
        skip: Optional[Array] = None,
        z: Optional[Array] = None,
        norm_weight: Optional[Array] = None,
        out: Optional[Array] = None,
        stream: Any = None,
    ) -> Array:
        """The layer's outputs of q, k [>= num_tokens, num_k_heads, head_dim_k] and v [>= num_tokens, num_v_heads, head_dim_v].

        gate [.., num_v_heads], or [.., num_v_heads, head_dim_k] with channel_gate, and beta [.., num_v_heads] are of the spec's type or float32; rates, gate_bias
        and skip are float32: [num_v_heads], or [num_v_heads, head_dim_k] where the spec has them of each channel. An array that the spec has no use for is
        refused, and so is one that is missing; gate_bias may be. z [.., num_v_heads, head_dim_v] is what out_gate is of, norm_weight [num_v_heads, head_dim_v] or
        [head_dim_v] of the spec's type or float32 is for out_norm. state [slots, *spec.state_shape] is read and written. Returns out [.., num_v_heads, head_dim_v],
        which is made when it is not given. There is no backward pass.
        """
        return self._call(v, (q, k, v, gate, beta, rates, gate_bias, skip, z, norm_weight, None, None, None, None, state), out, stream)

    def run_convolved(
        self,
        input: Array,
        conv_weight: Array,
        conv_state: Array,
        state: Array,
        *,
        conv_bias: Optional[Array] = None,
        gate: Optional[Array] = None,
        beta: Optional[Array] = None,
        rates: Optional[Array] = None,
        gate_bias: Optional[Array] = None,
        skip: Optional[Array] = None,
        z: Optional[Array] = None,
        norm_weight: Optional[Array] = None,
        out: Optional[Array] = None,
        stream: Any = None,
    ) -> Array:
        """The outputs of a layer with a convolution in front (RecurrentSpec.conv), of input [>= num_tokens, channels]: its q, k and v before it.

        Rows of input may be parts of wider ones. conv_weight is [channels, conv_width], conv_bias [channels], and conv_state [slots, *spec.conv_state_shape] is read
        and written in the slots of state. The rest is as in run().
        """
        arrays = (None, None, None, gate, beta, rates, gate_bias, skip, z, norm_weight, input, conv_weight, conv_bias, conv_state, state)
        return self._call(input, arrays, out, stream)

    def _call(self, like: Array, arrays: Any, out: Optional[Array], stream: Any) -> Array:
        no_gradient(*arrays, out)
        if out is None:
            out = empty(like, (like.shape[0], self.spec.num_v_heads, self.spec.head_dim_v), self.spec.dtype)
        self._plan.run(*map(exported, (*arrays, out)), stream=stream_address(stream, like))
        return out
