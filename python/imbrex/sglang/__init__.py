"""imbrex as an attention backend of SGLang. See docs/sglang.md.

Installed beside SGLang, the entry point `imbrex` of the group sglang.srt.plugins calls register() in every process;
`--attention-backend imbrex` then chooses it. SGLang is imported by register(), not before.
"""

from contextlib import contextmanager
from typing import Any, Callable, Iterator

__all__ = ["NAME", "WRITTEN_FOR", "register"]

NAME = "imbrex"
WRITTEN_FOR = ("0.5.23",)


def _make(runner: Any) -> Any:
    from .backend import Backend

    return Backend(runner)


class _SeenAsTriton:
    """SGLang's view of its arguments, in which imbrex is "triton"."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._view, name)
        return "triton" if name == "attention_backend" and value == NAME else value


@contextmanager
def _replaced(module: Any, **functions: Any) -> Iterator[None]:
    """Has other functions in the place of a module's."""
    plain = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(plain)


def admit_to_models(server_args: Any, previous: Callable[[Any], None]) -> None:
    """SGLang's step for single models, which asserts for gpt-oss and Llama 4 that their attention backend is in lists of its own.

    The lists are in the middle of that step, so the step sees imbrex as "triton": both have sinks, sliding windows and local attention. Nothing
    else of the step looks at the backend of these models, and server_args is not touched.
    """
    from sglang.srt.arg_groups import model_hook

    backends, view = (getattr(model_hook, name, None) for name in ("attention_backends_of", "resolved_view"))
    if backends is None or view is None:  # another SGLang, which may refuse
        return previous(server_args)

    def is_one_of(*architectures: str) -> bool:
        return model_hook.model_config_of(server_args).hf_config.architectures[0] in architectures

    def backends_seen(config: Any) -> Any:
        of_gpt_oss = is_one_of("GptOssForCausalLM")
        return tuple("triton" if of_gpt_oss and name == NAME else name for name in backends(config))

    def view_seen(args: Any) -> Any:
        return _SeenAsTriton(view(args)) if is_one_of("Llama4ForConditionalGeneration", "Llama4ForCausalLM") else view(args)

    with _replaced(model_hook, attention_backends_of=backends_seen, resolved_view=view_seen):
        return previous(server_args)


def admit_to_drafts(server_args: Any, previous: Callable[[Any], None]) -> None:
    """SGLang's step for drafts, which refuses attention backends that are not in lists of its own: EAGLE with a top-k above 1 and pages of more than one token, and
    UNO with any but FA3 ("fa3"), whose steps are verifications of a chain and of a tree as others are.
    """
    from sglang.srt.arg_groups import speculative_hook as hook

    def seen(step: str, name: str, as_listed: Callable[[Any], Any]) -> Callable[[Any], None]:
        """One of the step's parts, which sees what the function of that name says `as_listed`."""
        part, said = getattr(hook, step), getattr(hook, name)

        def run(args: Any) -> None:
            with _replaced(hook, **{name: lambda of: as_listed(said(of))}):
                part(args)

        return run

    parts = {
        "_handle_eagle_family": ("resolved_view", _SeenAsTriton),
        "_handle_uno": ("attention_backends_of", lambda backends: tuple("fa3" if name == NAME else name for name in backends)),
    }
    there = {step: how for step, how in parts.items() if hasattr(hook, step) and hasattr(hook, how[0])}  # another SGLang may lack some, and refuse
    with _replaced(hook, **{step: seen(step, *how) for step, how in there.items()}):
        previous(server_args)


def with_linear_kernels(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """Around the function of SGLang that makes the backend for layers of linear attention: imbrex's kernels where --linear-attn-backend, or that of a phase, names it."""
    from sglang.srt.runtime_context import get_exec

    mamba = get_exec().mamba
    phases = "linear_attn_backend", "linear_attn_decode_backend", "linear_attn_prefill_backend", "linear_attn_verify_backend"
    if all(getattr(mamba, phase, None) != NAME for phase in phases):
        return original(runner, full_attn_backend)
    from .linear import in_place

    with in_place():
        return original(runner, full_attn_backend)


def register() -> None:
    """Names imbrex to SGLang's arguments and its registry of attention backends; any number of times. ImportError without SGLang.

    A version of SGLang that imbrex was not written for is refused when the backend is made, not here, where it would disturb others.
    """
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.server_args import (
            ATTENTION_BACKEND_CHOICES,
            DRAFT_ATTENTION_BACKEND_CHOICES,
            LINEAR_ATTN_KERNEL_BACKEND_CHOICES,
            add_attention_backend_choices,
            add_draft_attention_backend_choices,
            add_linear_attn_kernel_backend_choices,
        )
    except ImportError as error:
        raise ImportError(f"imbrex.sglang.register() needs SGLang {' or '.join(WRITTEN_FOR)}, which cannot be imported: {error}") from error
    from . import draft_workers

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    if NAME not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([NAME])
        HookRegistry.register(
            "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend", draft_workers.with_own_draft_backends, HookType.AROUND
        )
        HookRegistry.register(
            "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", draft_workers.with_own_frozen_branches, HookType.AROUND
        )
    if NAME not in ATTENTION_BACKENDS:
        register_resolution_hook("handle_model_specific_adjustments")(admit_to_models)
        register_resolution_hook("handle_speculative_decoding")(admit_to_drafts)
    register_attention_backend(NAME)(_make)
    if NAME not in LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        add_linear_attn_kernel_backend_choices([NAME])
        HookRegistry.register("sglang.srt.layers.attention.attention_registry.attn_backend_wrapper", with_linear_kernels, HookType.AROUND)
