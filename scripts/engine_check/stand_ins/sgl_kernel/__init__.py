"""A stand-in for SGLang's own kernels (the wheel is of CUDA): every name can be imported, and none can be called. SGLang then takes PyTorch."""

import sys
import types


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            raise NotImplementedError(f"{name} is not in the stand-in of sgl_kernel")

        return call


sys.modules[__name__].__class__ = _StandIn
__version__ = "0.0.0"
