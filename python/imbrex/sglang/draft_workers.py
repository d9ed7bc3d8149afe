"""imbrex among the backends of SGLang's draft workers, whose names are in lists in the middle of SGLang's functions."""

import functools
import sys
from typing import Any, Callable, Dict, Tuple

from . import NAME

Makers = Dict[str, Callable[[], Tuple[str, Any]]]


def with_own_draft_backends(
    original: Callable[..., Any], factory: Any, backend_name: str, backend_map: Makers, error_template: str, stamps_children: bool = False
) -> Any:
    """Around DraftBackendFactory._create_backend, which takes one of the functions in backend_map: with stamps_children for the steps that decode drafts,
    otherwise for the extend in front of them."""
    runner = factory.draft_model_runner

    def steps() -> Tuple[str, Any]:
        from .multi_step import DraftSteps

        return NAME, DraftSteps(runner, factory.topk, factory.speculative_num_steps)

    def extend() -> Tuple[str, Any]:
        from .backend import Backend

        _admit_to_extend_graphs(Backend)
        return NAME, Backend(runner)

    own: Makers = {NAME: steps if stamps_children else extend}
    return original(factory, backend_name, {**backend_map, **own}, error_template, stamps_children)


def with_own_frozen_branches(original: Callable[..., Any], algorithm: Any, *args: Any) -> Any:
    """Around SpeculativeAlgorithm.create_worker, which imports the worker of drafts over the target's own cache (FROZEN_KV_MTP) where it is asked for. For branches
    that makes one of two backends of SGLang's. All its steps are the same: a token of each branch, over the committed tokens, and without new keys.
    """
    worker = original(algorithm, *args)
    own = getattr(sys.modules.get("sglang.srt.speculative.frozen_kv_mtp_worker_v2"), "FrozenKVMTPDraftWorker", None)
    make = getattr(own, "_init_draft_attn_backend", None)
    if make is not None and not getattr(make, "takes_imbrex", False):

        @functools.wraps(make)
        def backend(draft_worker: Any) -> Any:
            if draft_worker.topk == 1 or draft_worker._resolve_draft_backend_type() != NAME:
                return make(draft_worker)
            from .backend import Backend

            return Backend(draft_worker.draft_model_runner)

        backend.takes_imbrex = True
        own._init_draft_attn_backend = backend
    return worker


def _admit_to_extend_graphs(backend: type) -> None:
    """SGLang's EAGLE worker captures the extend of drafts for instances of some classes, which it has under their names in its module for this alone. An
    isinstance() takes tuples of classes too."""
    worker = sys.modules.get("sglang.srt.speculative.eagle_worker_v2")
    known = getattr(worker, "TritonAttnBackend", None)
    if isinstance(known, type):
        worker.TritonAttnBackend = (known, backend)
