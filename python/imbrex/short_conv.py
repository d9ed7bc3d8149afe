"""Causal convolutions of a few tokens: those of LFM2's layers, and those in front of the recurrence of Mamba, GDN and KDA."""
from typing import Any, List, Optional

from . import _core
from ._frameworks import empty, exported, no_gradient, stream_address
from .plan import Array, DeviceLike, Workspace, _device


class ShortConvPlan:
    """Everything one step needs, decided once and reused by every layer of the same spec. For one thread at a time, and one stream.

    `backend` forces one ("" takes the first that runs the spec). num_threads, of a CPU: 0 is PyTorch's threads where it is loaded, else one for each core. on_device:
    update_on_device() will be called, on a GPU only. Calls for a GPU go to `stream`, or to the one that PyTorch would use now. `workspace` may be the one that
    plans of attention share: these plans need no scratch, and take nothing of it.
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
        on_device: bool = False,
        workspace: Optional[Workspace] = None,
    ) -> None:
        self.spec = spec
        self._device = _device(device)
        self._gpu = self._device.index if self._device.type == "cuda" else None
        self._stream = 0  # of the last update_on_device()
        self._plan = _core.ShortConvPlan(
            spec,
            self._device,
            backend=backend,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            num_threads=num_threads,
            validate=validate,
            on_device=on_device,
            workspace=None if workspace is None else workspace._shared,
        )

    def update(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        state_slots: Array,
        *,
        num_drafts: Optional[Array] = None,
        accepted_drafts: Optional[Array] = None,
        stream: Any = None,
    ) -> None:
        """One scheduler step: int32 on the host, query_start_loc [num_reqs + 1], the others [num_reqs].

        seq_lens counts this step's tokens too: a request that has no others begins with an empty state, whatever its slot holds. The last
        num_drafts of a request's tokens may be taken back by its next step, which then says how many were kept: accepted_drafts.
        """
        arrays = map(exported, (query_start_loc, seq_lens, state_slots, num_drafts, accepted_drafts))
        self._plan.update(*arrays, stream=stream_address(stream, query_start_loc, self._gpu))

    def update_on_device(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        state_slots: Array,
        *,
        num_drafts: Optional[Array] = None,
        accepted_drafts: Optional[Array] = None,
        max_num_tokens: int = 0,
        stream: Any = None,
    ) -> None:
        """update() from int32 arrays on the GPU, which are read when its kernel runs; it may be captured into a graph with the layers.

        A request that breaks a rule is left out: device_problems() tells. max_num_tokens: what the host knows of query_start_loc's last entry.
        """
        self._stream = stream_address(stream, query_start_loc)
        arrays = map(exported, (query_start_loc, seq_lens, state_slots, num_drafts, accepted_drafts))
        self._plan.update_on_device(*arrays, max_num_tokens=max_num_tokens, stream=self._stream)

    def device_problems(self) -> List[_core.Reason]:
        """Why requests were left out by update_on_device() since the last call. Waits for that call's stream."""
        return self._plan.device_problems(self._stream)

    @property
    def capturable(self) -> bool:
        """Whether run() may be captured into a CUDA graph that replays later steps too."""
        return self._plan.capturable

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

    def __str__(self) -> str:
        return str(self._plan)
