import functools
from enum import Enum
from pkgutil import resolve_name


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    _hooks = []

    @classmethod
    def register(cls, target, hook, hook_type):
        cls._hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        for target, hook, hook_type in cls._hooks:
            assert hook_type is HookType.AROUND
            parent, name = target.rsplit(".", 1)
            owner = resolve_name(parent)
            original = getattr(owner, name)
            setattr(owner, name, _around(hook, original))


def _around(hook, original):
    """A function, which is a method where its owner is a class."""

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return hook(original, *args, **kwargs)

    return wrapped
