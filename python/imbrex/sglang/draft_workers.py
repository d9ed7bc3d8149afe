"""imbrex among the backends of SGLang's draft workers, whose names are in lists in the middle of SGLang's functions."""

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


def _admit_to_extend_graphs(backend: type) -> None:
    """SGLang's EAGLE worker captures the extend of drafts for instances of some classes, which it has under their names in its module for this alone. An
    isinstance() takes tuples of classes too."""
    worker = sys.modules.get("sglang.srt.speculative.eagle_worker_v2")
    known = getattr(worker, "TritonAttnBackend", None)
    if isinstance(known, type):
        worker.TritonAttnBackend = (known, backend)
