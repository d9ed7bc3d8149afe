"""Recurrent layers and short convolutions of hybrid models.

Their modules call functions of the modeling file by names that transformers gives to the kernels of causal_conv1d, fla and mamba_ssm, or to code of its
own in PyTorch. Behind these names stand functions that look which module is calling: one that was set to imbrex gets imbrex's, every other one what it had.
"""
import functools
import inspect
import threading
from typing import Any, Callable, Dict, FrozenSet, Optional, Tuple

import torch

from ..causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from ..fla import ops
from ..mamba_ssm import selective_scan_fn
from ..mamba_ssm.ops.triton.selective_state_update import selective_state_update
from ..mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from ._refusals import no_backward, refuse_training, wants_gradient
from ._versions import check_recurrent

# By the names that modeling files have for them. mamba_inner_fn and mamba2_split_conv1d_scan_combined are called in training alone.
_KERNELS: Dict[str, Callable] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "chunk_kimi_delta_attention": ops.chunk_kda,
    "mamba2_chunk_scan": mamba_chunk_scan_combined,
    "mamba2_selective_state_update": selective_state_update,
    "mamba_selective_scan": selective_scan_fn,
    "mamba_selective_state_update": selective_state_update,
    "recurrent_kimi_delta_attention": ops.fused_recurrent_kda,
    "torch_chunk_gated_delta_rule": ops.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": ops.fused_recurrent_gated_delta_rule,
}


class _Running(threading.local):
    """The modules on imbrex whose forward() the calling thread is in."""

    def __init__(self) -> None:
        self.modules = []


_running = _Running()


def _begin(module: torch.nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        _running.modules.append(module)


def _end(module: torch.nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling() and _running.modules and _running.modules[-1] is module:
        _running.modules.pop()


class _NoBackward(torch.autograd.Function):
    """Outputs of a model in evaluation mode that runs with gradients enabled: asking for one is refused."""

    @staticmethod
    def forward(context: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        no_backward(gradient)


def _run(kernel: Callable, taken: FrozenSet[str], module: torch.nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """Calls a kernel with those of the arguments that it knows, as transformers calls kernels."""
    kwargs = {name: value for name, value in kwargs.items() if name in taken}
    tensors = tuple(x for x in (*args, *kwargs.values()) if torch.is_tensor(x))
    if not wants_gradient(tensors):
        return kernel(*args, **kwargs)
    refuse_training(module)
    with torch.no_grad():
        result = kernel(*args, **kwargs)
    out, *states = result if isinstance(result, tuple) else (result,)
    out = _NoBackward.apply(out, *(x for x in tensors if x.requires_grad))
    return (out, *states) if states else out


def _dispatcher(original: Callable, kernel: Callable) -> Callable:
    taken = frozenset(inspect.signature(kernel).parameters)

    @functools.wraps(original, updated=())  # it may be a module, with a dictionary of its own
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _running.modules or not (args[0].is_cpu or args[0].is_cuda):
            return original(*args, **kwargs)
        return _run(kernel, taken, _running.modules[-1], args, kwargs)

    call.imbrex = True
    return call


def _globals_of(module: torch.nn.Module) -> Optional[Dict[str, Any]]:
    """What a module's forward() finds by name, if there are kernels among it."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or not any(name in _KERNELS and callable(forward.__globals__.get(name)) for name in code.co_names):
        return None
    return forward.__globals__


def _put_dispatchers(names: Dict[str, Any]) -> None:
    """Once for a modeling file."""
    for name, kernel in _KERNELS.items():
        original = names.get(name)
        if callable(original) and not hasattr(original, "imbrex"):
            names[name] = _dispatcher(original, kernel)


def _remove(hooks: Dict[int, Callable], hook: Callable) -> None:
    for key in [key for key, other in hooks.items() if other is hook]:
        del hooks[key]


def set_recurrent_implementation(model: torch.nn.Module, implementation: Optional[str] = "imbrex") -> None:
    """Makes the recurrent layers and short convolutions of a model run on imbrex, or with None on what transformers has chosen for them.

    Other models, also of the same class, stay what they are. Attention is chosen by set_attn_implementation(). In torch.compile, and for tensors that
    are neither on a CPU nor on an NVIDIA GPU, layers run as before. A model in training mode that needs gradients is refused in its forward pass.
    """
    if implementation not in ("imbrex", None):
        raise ValueError(f"imbrex: implementation: expected 'imbrex' or None, got {implementation!r}")
    check_recurrent()
    layers = [(module, names) for module in model.modules() for names in [_globals_of(module)] if names is not None]
    if not layers:
        raise NotImplementedError(f"imbrex: {type(model).__name__}: expected layers that call one of {', '.join(sorted(_KERNELS))}; it has none")
    for module, names in layers:
        _remove(module._forward_pre_hooks, _begin)
        _remove(module._forward_hooks, _end)
        if implementation is not None:
            _put_dispatchers(names)
            module.register_forward_pre_hook(_begin)
            module.register_forward_hook(_end, always_call=True)
