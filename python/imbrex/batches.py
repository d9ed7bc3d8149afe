"""What an engine does with a step before plans see it: the order of its requests, and batches that are parts of another."""
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import _core
from ._frameworks import exported
from .plan import Array, Spec


class PhaseCounts(NamedTuple):
    """Requests and query tokens of each phase in a batch that is in order."""

    decodes: int
    extends: int
    prefills: int
    decode_tokens: int
    extend_tokens: int
    prefill_tokens: int


def reorder_batch(
    query_lens: Array, context_lens: Array, prompt_lens: Optional[Array] = None, *, decode_threshold: int = 1
) -> Tuple[List[int], List[Tuple[int, int]]]:
    """Puts requests in the order of decodes, short extends, long extends and prompts, as vLLM's reorder_batch_to_split_decodes_and_prefills does.

    int32 on the host: each request's query tokens, the tokens before them, and those of its prompt, without which no request is a short
    extend. Returns the request that comes to each place, and pairs of places that bring requests there when they are swapped one by one.
    """
    return _core.reorder_batch(exported(query_lens), exported(context_lens), exported(prompt_lens), decode_threshold)


def split_decodes_and_prefills(
    query_start_loc: Array,
    *,
    decode_threshold: int = 1,
    num_tokens: int = 0,
    uniform: bool = False,
    is_prefilling: Optional[Array] = None,
) -> PhaseCounts:
    """Counts the requests in front of the first that is no decode, and those behind them.

    query_start_loc int32 [num_reqs + 1] on the host. A decode has at most decode_threshold query tokens; with `uniform` as many as the first
    request, padding apart. num_tokens counts the step's padding too. With is_prefilling, bool [num_reqs], a request whose prompt is not yet
    computed is no decode.
    """
    counts = _core.split_decodes_and_prefills(exported(query_start_loc), decode_threshold, num_tokens, uniform, exported(is_prefilling))
    return PhaseCounts(*counts)


def split_decodes_prefills_and_extends(query_start_loc: Array, seq_lens: Array, *, decode_threshold: int = 1, num_tokens: int = 0) -> PhaseCounts:
    """Counts decodes, extends, which have earlier tokens, and prefills, in a batch with that order."""
    return PhaseCounts(*_core.split_decodes_prefills_and_extends(exported(query_start_loc), exported(seq_lens), decode_threshold, num_tokens))


def split_prefill_chunks(seq_lens: Array, workspace: int, first_request: int = 0) -> List[Tuple[int, int]]:
    """Cuts requests into ranges of neighbours whose lengths are together at most `workspace`, or which are one."""
    return _core.split_prefill_chunks(exported(seq_lens), workspace, first_request)


class DerivedBatch:
    """A batch made of another: `plan.update(**part.arrays)`.

    `arrays` has what the whole batch has, by the names of update(): views of its arrays wherever they can be, which are not to be written.
    Its token 0 is first_token of the whole batch, and its request 0 first_request.
    """

    def __init__(self, made: _core.DerivedBatch) -> None:
        self.arrays: Dict[str, Any] = made.arrays
        self.first_request: int = made.first_request
        self.first_token: int = made.first_token
        self.num_tokens: int = made.num_tokens

    @property
    def tokens(self) -> slice:
        """The rows of q and out, of the whole batch, that a part of split_batch() is for."""
        return slice(self.first_token, self.first_token + self.num_tokens)


def _exported(arrays: Dict[str, Any]) -> Dict[str, Any]:
    return {name: exported(array) for name, array in arrays.items()}


def split_batch(spec: Spec, cuts: Sequence[int], **arrays: Optional[Array]) -> List[DerivedBatch]:
    """Cuts a batch, given by the arrays of update(), in front of tokens in rising order, for plans of a spec.

    A cut may go through a request, which then is in both parts. A spec that is neither causal nor without window, chunk and bias has to have
    positions=True for that: parts have positions then. Keys of all parts have to be written before queries of a request that is cut
    are run; layers with a state compute the parts of such a request in their order.
    """
    return [DerivedBatch(part) for part in _core.split_batch(spec, _exported(arrays), list(cuts))]


def keep_tokens(spec: Spec, tokens: Array, **arrays: Optional[Array]) -> DerivedBatch:
    """Keeps some query tokens of a batch, int32 on the host in rising order, with all keys that they see.

    For layers that are computed for the tokens whose logits are asked for alone (fast prefill). All requests stay. Where tokens of one request
    do not follow one another, the spec has to have positions=True. Slots on a GPU are not gathered: leave them out.
    """
    return DerivedBatch(_core.keep_tokens(spec, _exported(arrays), exported(tokens)))
