"""imbrex as an attention backend of vLLM. See docs/vllm.md.

Installed beside vLLM, the entry point `imbrex` of the group vllm.general_plugins calls register() in every process. That makes
`--attention-backend CUSTOM` be imbrex, and nothing else; on CPUs, where vLLM takes CPU_ATTN whatever is asked for, IMBREX_VLLM_CPU_ATTN=1
puts imbrex in its place, and in that of CPU_MLA, which vLLM takes for latent attention. vLLM is imported by register(), not before.
"""

import os

__all__ = ["CPU_VARIABLE", "STATES_VARIABLE", "WRITTEN_FOR", "register"]

WRITTEN_FOR = ("0.32.0", "0.33.0")
CPU_VARIABLE = "IMBREX_VLLM_CPU_ATTN"
STATES_VARIABLE = "IMBREX_VLLM_STATES"


def register() -> None:
    """Names imbrex to vLLM's registry of attention backends; any number of times. ImportError without vLLM.

    A version of vLLM that imbrex was not written for is refused when the backend is chosen, not here, where it would disturb others.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(f"imbrex.vllm.register() needs vLLM {' or '.join(WRITTEN_FOR)}, which cannot be imported: {error}") from error
    register_backend(AttentionBackendEnum.CUSTOM, "imbrex.vllm.custom.Backend")
    if _is_set(CPU_VARIABLE):
        register_backend(AttentionBackendEnum.CPU_ATTN, "imbrex.vllm.backend.CpuBackend")
        if hasattr(AttentionBackendEnum, "CPU_MLA"):
            register_backend(AttentionBackendEnum.CPU_MLA, "imbrex.vllm.mla.CpuMlaBackend")
    if _is_set(STATES_VARIABLE):
        from . import state_layers

        state_layers.register()


def _is_set(variable: str) -> bool:
    wanted = os.environ.get(variable, "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"{variable}: expected 0 or 1, got {wanted!r}")
    return wanted == "1"
