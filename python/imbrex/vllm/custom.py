"""What vLLM finds under the name CUSTOM: `Backend`, which for a model with latent attention (MLA) is another class than for others."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if getattr(getattr(config, "model_config", None), "use_mla", False):
        from .mla import MlaBackend

        return MlaBackend
    from .backend import Backend

    return Backend
