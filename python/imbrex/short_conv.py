"""The short convolution of LFM2's layers, on CPUs."""
from typing import Optional

from . import _core
from ._arrays import empty, exported, no_gradient
from .plan import Array, DeviceLike, _device


class ShortConvPlan:
    """Everything one step needs, decided once and reused by every layer of the same spec. For one thread at a time.

    `backend` forces one ("" takes the first that runs the spec). num_threads: 0 is PyTorch's threads where it is loaded, else one for each core.
    """

    def __init__(
        self,
        spec: _core.ShortConvSpec,
        device: DeviceLike = "cpu",
        *,
        backend: str = "",
        max_num_reqs: int = 256,
        max_num_tokens: int = 8192,
        max_seq_len: int = 131072,
        num_threads: int = 0,
        validate: bool = True,
    ) -> None:
        self.spec = spec
        self._plan = _core.ShortConvPlan(
            spec,
            _device(device),
            backend=backend,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            num_threads=num_threads,
            validate=validate,
        )

    def update(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        state_slots: Array,
        *,
        num_drafts: Optional[Array] = None,
        accepted_drafts: Optional[Array] = None,
    ) -> None:
        """One scheduler step: int32 on the host, query_start_loc [num_reqs + 1], the others [num_reqs].

        seq_lens counts this step's tokens too: a request that has no others begins with an empty state, whatever its slot holds. The last
        num_drafts of a request's tokens may be taken back by its next step, which then says how many were kept: accepted_drafts.
        """
        self._plan.update(*map(exported, (query_start_loc, seq_lens, state_slots, num_drafts, accepted_drafts)))

    def run(self, bcx: Array, weight: Array, state: Array, *, bias: Optional[Array] = None, out: Optional[Array] = None) -> Array:
        """y of bcx [>= num_tokens, 3 * dim], which is B, C and x of each token; weight [dim, width], bias [dim].

        state [slots, state_rows, dim] is read and written. Returns out [.., dim], which is made when it is not given. There is no backward pass.
        """
        no_gradient(bcx, weight, state, bias, out)
        if out is None:
            out = empty(bcx, (bcx.shape[0], self.spec.dim), self.spec.dtype)
        self._plan.run(*map(exported, (bcx, weight, bias, state, out)))
        return out

    def __str__(self) -> str:
        return str(self._plan)
