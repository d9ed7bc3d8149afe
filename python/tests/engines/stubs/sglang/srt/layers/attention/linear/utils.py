from dataclasses import dataclass
from enum import Enum


class LinearAttnKernelBackend(Enum):
    TRITON = "triton"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value):
        return cls.CUSTOM

    def is_triton(self):
        return self is LinearAttnKernelBackend.TRITON

    def is_custom(self):
        return self is LinearAttnKernelBackend.CUSTOM


@dataclass(frozen=True)
class LinearAttnBackends:
    decode: LinearAttnKernelBackend
    prefill: LinearAttnKernelBackend
    verify: LinearAttnKernelBackend


class Dispatcher:
    """Knows Triton's kernels alone."""

    def __init__(self, backends):
        for name in ("decode", "prefill", "verify"):
            if not getattr(backends, name).is_triton():
                raise ValueError(f"Unsupported {name} backend: {getattr(backends, name)}")
        self.decode_kernel = self.extend_kernel = self.verify_kernel = "triton"
        self.supports_packed_decode = self.supports_packed_decode_safe_gate = True
