"""What plans of layers with a state in slots have, whatever their family."""
from typing import Any, ClassVar, List, Optional

from . import _core
from ._frameworks import exported, stream_address
from .plan import Array, DeviceLike, Workspace, _device


class StatePlan:
    """The base of ShortConvPlan and RecurrentPlan, which have run()."""

    _of_core: ClassVar[Any]  # the class of imbrex._core

    def __init__(
        self,
        spec: Any,
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
        self._plan = self._of_core(
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
        source_slots: Optional[Array] = None,
        draft_parents: Optional[Array] = None,
        pad_slot: Optional[int] = None,
        stream: Any = None,
    ) -> None:
        """One scheduler step: int32 on the host, query_start_loc [num_reqs + 1], the others [num_reqs].

        seq_lens counts this step's tokens too: a request that has no others begins with an empty state, whatever its slot holds. The last
        num_drafts of a request's tokens may be taken back by its next step, which then says which was the last that was kept, counted from 1: accepted_drafts.
        A request's state is read from source_slots, where they are given, and written to state_slots. With spec.tree_drafts, draft_parents [num_tokens] has of
        each draft the token that it follows, counted from 0 among the request's tokens of the step, -1 in front of them; of other tokens it is not read.
        Requests with tokens whose entry of state_slots is pad_slot are padding, and any number may be: no state is read or written for them, and their tokens'
        outputs are zeros.
        """
        arrays = map(exported, (query_start_loc, seq_lens, state_slots, num_drafts, accepted_drafts, source_slots, draft_parents))
        self._plan.update(*arrays, pad_slot=pad_slot, stream=stream_address(stream, query_start_loc, self._gpu))

    def update_on_device(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        state_slots: Array,
        *,
        num_drafts: Optional[Array] = None,
        accepted_drafts: Optional[Array] = None,
        source_slots: Optional[Array] = None,
        draft_parents: Optional[Array] = None,
        pad_slot: Optional[int] = None,
        max_num_tokens: int = 0,
        stream: Any = None,
    ) -> None:
        """update() from int32 arrays on the GPU, which are read when its kernel runs; it may be captured into a graph with the layers.

        A request that breaks a rule is left out: device_problems() tells. max_num_tokens: what the host knows of query_start_loc's last entry.
        """
        self._stream = stream_address(stream, query_start_loc)
        arrays = map(exported, (query_start_loc, seq_lens, state_slots, num_drafts, accepted_drafts, source_slots, draft_parents))
        self._plan.update_on_device(*arrays, pad_slot=pad_slot, max_num_tokens=max_num_tokens, stream=self._stream)

    def device_problems(self) -> List[_core.Reason]:
        """Why requests were left out by update_on_device() since the last call. Waits for that call's stream."""
        return self._plan.device_problems(self._stream)

    @property
    def capturable(self) -> bool:
        """Whether run() may be captured into a CUDA graph that replays later steps too."""
        return self._plan.capturable

    def __str__(self) -> str:
        return str(self._plan)
