import importlib
from enum import Enum, EnumMeta


class _Meta(EnumMeta):
    def __getitem__(cls, name):
        if name not in cls.__members__:
            raise ValueError(f"Unknown attention backend: '{name}'")
        return super().__getitem__(name)


class AttentionBackendEnum(Enum, metaclass=_Meta):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    CPU_MLA = "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend"
    CUSTOM = None

    def get_path(self):
        path = _overrides.get(self, self.value)
        if not path:
            raise ValueError(f"Backend {self.name} must be registered before use.")
        return path

    def get_class(self):
        module, name = self.get_path().rsplit(".", 1)
        return getattr(importlib.import_module(module), name)

    def is_overridden(self):
        return self in _overrides

    def clear_override(self):
        _overrides.pop(self, None)


_overrides = {}


def register_backend(backend, class_path=None, is_mamba=False):
    assert isinstance(backend, AttentionBackendEnum) and not is_mamba, "only enum members of attention backends here"

    def decorator(cls):
        _overrides[backend] = f"{cls.__module__}.{cls.__qualname__}"
        return cls

    if class_path is None:
        return decorator
    _overrides[backend] = class_path
    return lambda x: x
