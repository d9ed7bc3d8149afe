"""Causal convolutions of a few tokens: those of LFM2's layers, and those in front of the recurrence of Mamba, GDN and KDA."""
from typing import Any, Optional

from . import _core
from ._frameworks import empty, exported, no_gradient, stream_address
from ._state_plan import StatePlan
from .plan import Array


class ShortConvPlan(StatePlan):
    """Everything one step needs, decided once and reused by every layer of the same spec. For one thread at a time, and one stream.

    `backend` forces one ("" takes the first that runs the spec). num_threads, of a CPU: 0 is PyTorch's threads where it is loaded, else one for each core. on_device:
    update_on_device() will be called, on a GPU only. Calls for a GPU go to `stream`, or to the one that PyTorch would use now. `workspace` may be the one that
    plans of attention share: these plans need no scratch, and take nothing of it.
    """

    _of_core = _core.ShortConvPlan

    def run(
        self, input: Array, weight: Array, state: Array, *, bias: Optional[Array] = None, out: Optional[Array] = None, stream: Any = None
    ) -> Array:
        """y of input [>= num_tokens, 3 * dim], which is B, C and x of each token, or of the form "plain" [>= num_tokens, dim], x; weight [dim, width], bias [dim].

        state [slots, state_rows, dim] is read and written. Returns out [.., dim], which is made when it is not given, and has no memory of the input. There is no backward pass.
        """
        no_gradient(input, weight, state, bias, out)
        if out is None:
            out = empty(input, (input.shape[0], self.spec.dim), self.spec.dtype)
        self._plan.run(*map(exported, (input, weight, bias, state, out)), stream=stream_address(stream, input))
        return out
