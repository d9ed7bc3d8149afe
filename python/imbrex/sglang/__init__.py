"""imbrex as an attention backend of SGLang. See docs/sglang.md.

Installed beside SGLang, the entry point `imbrex` of the group sglang.srt.plugins calls register() in every process;
`--attention-backend imbrex` then chooses it. SGLang is imported by register(), not before.
"""

from typing import Any

__all__ = ["NAME", "WRITTEN_FOR", "register"]

NAME = "imbrex"
WRITTEN_FOR = ("0.5.23",)


def _make(runner: Any) -> Any:
    from .backend import Backend

    return Backend(runner)


def register() -> None:
    """Names imbrex to SGLang's arguments and its registry of attention backends; any number of times. ImportError without SGLang.

    A version of SGLang that imbrex was not written for is refused when the backend is made, not here, where it would disturb others.
    """
    try:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    except ImportError as error:
        raise ImportError(f"imbrex.sglang.register() needs SGLang {' or '.join(WRITTEN_FOR)}, which cannot be imported: {error}") from error
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_make)
