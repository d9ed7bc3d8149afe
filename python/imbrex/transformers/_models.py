"""Models that would not run their attention here are refused when they are loaded.

Registering a name makes transformers accept it for every model, also for those that run attention code of their own and only take the mask from here: a
bool mask, which they add to their logits.
"""
import functools
import inspect
import re
import sys
from typing import Any, Container, Iterator, Tuple

import torch
from transformers import PreTrainedModel

from ._latent import hand_over_latents
from ._versions import check_continuous_batching

NAMES = ("imbrex", "paged|imbrex")
_OWN_ADDITION = re.compile(r"\+=?\s*(\(1\.0 - )?[\w.]*mask\b")


def _goes_through_the_interface(model: PreTrainedModel) -> bool:
    """Whether a model says so, or its source does: it calls the interface, and has no table of classes for the implementations that it knows."""
    tables = [n for n in vars(sys.modules[type(model).__module__]) if n.endswith("ATTENTION_CLASSES")]
    return bool(model._supports_attention_backend) or (model._can_set_attn_implementation() and not tables)


@functools.lru_cache(maxsize=None)
def _adds_a_mask_itself(layer: type) -> bool:
    """A class of attention that takes a softmax and adds a mask in code of its own, beside others of the same model that go through the interface."""
    if "Attention" not in layer.__name__:
        return False
    methods = [m for m in vars(layer).values() if hasattr(m, "__code__")]
    if any("get_interface" in m.__code__.co_names for m in methods):
        return False
    try:
        sources = [inspect.getsource(m) for m in methods]
    except (OSError, TypeError):  # typed into an interpreter
        return False
    return any("softmax(" in s and _OWN_ADDITION.search(s) for s in sources)


def _own_layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a model that are not in a model within it."""
    for child in module.children():
        if not isinstance(child, PreTrainedModel):
            yield child
            yield from _own_layers(child)


def _refuse(model: PreTrainedModel, why: str) -> None:
    raise NotImplementedError(
        f"imbrex: {type(model).__name__}: {why}, so attn_implementation='imbrex' would not reach it; use 'sdpa' or 'eager'. In a model of several parts, "
        "name what each part takes: attn_implementation={'': 'imbrex', 'vision_config': 'eager'}"
    )


def _check_class(model: PreTrainedModel) -> None:
    if not _goes_through_the_interface(model):
        _refuse(model, "its attention does not go through transformers' attention interface")


def _check_layers(model: PreTrainedModel) -> None:
    for layer in _own_layers(model):
        if _adds_a_mask_itself(type(layer)):
            _refuse(model, f"{type(layer).__name__} does not go through transformers' attention interface")


def _no_weights(model: PreTrainedModel, args: Tuple[Any, ...], kwargs: Any) -> None:
    """Some models return an empty tuple instead of the weights, and do not pass the option on to their layers."""
    if kwargs.get("output_attentions") and model.config._attn_implementation in NAMES:
        raise NotImplementedError("imbrex: output_attentions: weights are never stored; use attn_implementation='eager'")


def _accept(model: PreTrainedModel) -> None:
    """A model with all of its layers, on imbrex from now on."""
    _check_layers(model)
    for layer in _own_layers(model):
        hand_over_latents(layer)
    if _no_weights not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_no_weights, with_kwargs=True)


def _asked(config: Any, implementation: Any) -> Iterator[Tuple[int, Any]]:
    """Which implementation set_attn_implementation() is asked for, by the id of each config of a model with parts."""
    parts = implementation if isinstance(implementation, dict) else None
    yield id(config), implementation if parts is None else parts.get("", config._attn_implementation)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from _asked(part, implementation if parts is None else parts.get(name, part._attn_implementation))


def _hook(name: str, make: Any) -> None:
    """Puts make(method) in the place of a method of PreTrainedModel, once."""
    method = getattr(PreTrainedModel, name)
    if not hasattr(method, "imbrex"):
        hooked = functools.wraps(method)(make(method))
        hooked.imbrex = True
        setattr(PreTrainedModel, name, hooked)


def _checks_class(method):
    """Checks every model that is made: by from_pretrained or from_config, as a part of another, from remote code."""

    def get_correct_attn_implementation(self, requested_attention, *args, **kwargs):
        if requested_attention in NAMES:
            _check_class(self)
        if requested_attention == "paged|imbrex":
            check_continuous_batching()
        return method(self, requested_attention, *args, **kwargs)

    return get_correct_attn_implementation


def _checks_layers(method):
    """Checks every model that is complete."""

    def post_init(self, *args, **kwargs):
        if self.config._attn_implementation in NAMES:
            _accept(self)
        return method(self, *args, **kwargs)

    return post_init


def _bring_copies(model: PreTrainedModel, named: Container[int]) -> None:
    """T5's encoder and decoder have copies of the model's config, which set_attn_implementation() passes over: their layers would go on with what they
    had, under the masks of what was asked for. `named`: ids of the configs that it does reach."""
    wanted = model.config._attn_implementation
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and type(part.config) is type(model.config) and id(part.config) not in named:
            if wanted in NAMES or part.config._attn_implementation in NAMES:
                part.config._attn_implementation = wanted


def _checks_change(method):
    """Checks a model that is switched to imbrex: transformers only warns of parts that cannot be. Nothing changes when one is refused."""

    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        asked = dict(_asked(self.config, attn_implementation))
        models = [m for m in self.modules() if isinstance(m, PreTrainedModel) and asked.get(id(m.config), asked[id(self.config)]) in NAMES]
        if "paged|imbrex" in asked.values():
            check_continuous_batching()
        for model in models:
            _check_class(model)
            _check_layers(model)
        method(self, attn_implementation, *args, **kwargs)
        _bring_copies(self, asked)
        for model in models:
            _accept(model)

    return set_attn_implementation


def refuse_at_load() -> None:
    """Models that would not run here are refused by name from now on."""
    _hook("get_correct_attn_implementation", _checks_class)
    _hook("post_init", _checks_layers)
    _hook("set_attn_implementation", _checks_change)
