"""imbrex as an attention backend of SGLang. See docs/sglang.md.

Installed beside SGLang, the entry point `imbrex` of the group sglang.srt.plugins calls register() in every process;
`--attention-backend imbrex` then chooses it. SGLang is imported by register(), not before.
"""

from typing import Any, Callable

__all__ = ["NAME", "WRITTEN_FOR", "register"]

NAME = "imbrex"
WRITTEN_FOR = ("0.5.23",)


def _make(runner: Any) -> Any:
    from .backend import Backend

    return Backend(runner)


def admit_to_gpt_oss(server_args: Any, previous: Callable[[Any], None]) -> None:
    """SGLang's step for single models, which asserts for gpt-oss that its attention backend is in a list of its own.

    The list is in the middle of that step, so the step sees imbrex as "triton": both have sinks and sliding windows. Nothing else of the step
    looks at the backend of gpt-oss, and server_args is not touched.
    """
    from sglang.srt.arg_groups import model_hook

    plain = getattr(model_hook, "attention_backends_of", None)
    if plain is None:  # another SGLang, which may refuse
        return previous(server_args)

    def as_seen_by_the_step(config: Any) -> Any:
        of_gpt_oss = model_hook.model_config_of(server_args).hf_config.architectures[0] == "GptOssForCausalLM"
        return tuple("triton" if of_gpt_oss and name == NAME else name for name in plain(config))

    model_hook.attention_backends_of = as_seen_by_the_step
    try:
        return previous(server_args)
    finally:
        model_hook.attention_backends_of = plain


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
            LINEAR_ATTN_KERNEL_BACKEND_CHOICES,
            add_attention_backend_choices,
            add_linear_attn_kernel_backend_choices,
        )
    except ImportError as error:
        raise ImportError(f"imbrex.sglang.register() needs SGLang {' or '.join(WRITTEN_FOR)}, which cannot be imported: {error}") from error
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    if NAME not in ATTENTION_BACKENDS:
        register_resolution_hook("handle_model_specific_adjustments")(admit_to_gpt_oss)
    register_attention_backend(NAME)(_make)
    if NAME not in LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        add_linear_attn_kernel_backend_choices([NAME])
        HookRegistry.register("sglang.srt.layers.attention.attention_registry.attn_backend_wrapper", with_linear_kernels, HookType.AROUND)
