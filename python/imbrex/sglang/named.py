"""Functions that SGLang's backends find by name in a module: while a backend of imbrex runs, those that it has for these names are called."""

import contextlib
import functools
import threading
from typing import Any, Callable, Dict, Iterator, Optional

Own = Dict[str, Callable]  # each takes what SGLang's function is called with, behind that function itself

_running = threading.local()


@contextlib.contextmanager
def running(own: Own) -> Iterator[None]:
    before = getattr(_running, "own", None)
    _running.own = own
    try:
        yield
    finally:
        _running.own = before


class _Named:
    def __init__(self, name: str, original: Optional[Callable]) -> None:
        self._name, self._original = name, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = (getattr(_running, "own", None) or {}).get(self._name)
        if own is not None:
            return own(self._original, *args, **kwargs)
        if self._original is None:
            raise NotImplementedError(f"imbrex: SGLang has no {self._name} on this device")
        return self._original(*args, **kwargs)


def put(module: Any, *names: str) -> None:
    """Once for a module; names that it lacks, as it does on some devices, are made."""
    for name in names:
        current = getattr(module, name, None)
        if not isinstance(current, _Named):
            setattr(module, name, _Named(name, current))


def put_always(module: Any, name: str, own: Callable) -> None:
    """As put(), for a function that is called whichever backend runs; a module that lacks the name is left alone."""
    current = getattr(module, name, None)
    if current is None or getattr(current, "func", None) is own:
        return
    setattr(module, name, functools.partial(own, current))
