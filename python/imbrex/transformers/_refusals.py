"""Refusals of a call's arguments, by name."""
from typing import Any, Optional, Tuple

import torch

# Arguments of other implementations that change a result.
_REFUSED = ("head_mask", "layer_head_mask", "attention_bias", "alibi", "block_mask", "score_mod")


def refuse(module: torch.nn.Module, tensors: Tuple[Optional[torch.Tensor], ...], dropout: float, kwargs: Any) -> None:
    """Refuses arguments that would change the result or the training and that imbrex does not have."""
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"imbrex: {name}: expected None; use attn_implementation='eager' or 'sdpa'")
    indices = kwargs.get("indices")
    if indices is not None and indices.shape[-1] < tensors[1].shape[2]:
        raise NotImplementedError(
            f"imbrex: indices: expected all {tensors[1].shape[2]} keys for each query, got {indices.shape[-1]} that an indexer picked: there is no sparse "
            "attention; use attn_implementation='sdpa' or 'eager' beyond that many keys"
        )
    if kwargs.get("output_attentions"):
        raise NotImplementedError("imbrex: output_attentions: weights are never stored; use attn_implementation='eager'")
    if dropout:
        raise NotImplementedError(f"imbrex: dropout: expected 0.0, got {dropout}; call model.eval()")
    if module.training and wants_gradient(tensors):
        raise NotImplementedError(
            "imbrex: a model in training mode whose attention needs a gradient: there is no backward pass; call model.eval() or torch.no_grad(), "
            "or train with attn_implementation='sdpa'"
        )


def refuse_training(module: torch.nn.Module) -> None:
    """Of a recurrent layer that needs a gradient."""
    if module.training:
        raise NotImplementedError(
            f"imbrex: {type(module).__name__} in training mode needs a gradient: there is no backward pass; call model.eval() or torch.no_grad(), "
            "or train after set_recurrent_implementation(model, None)"
        )


def wants_gradient(tensors: Tuple[Optional[torch.Tensor], ...]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def no_backward(gradient: torch.Tensor) -> None:
    raise NotImplementedError(
        "imbrex: there is no backward pass; compute gradients with attn_implementation='sdpa' or 'eager', and after "
        "set_recurrent_implementation(model, None) where it was called"
    )


def finish(out: torch.Tensor) -> Tuple[torch.Tensor, None]:
    """What an attention function returns. A model in evaluation mode may run with gradients enabled; asking for one is refused then."""
    if out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(no_backward)
    return out, None
