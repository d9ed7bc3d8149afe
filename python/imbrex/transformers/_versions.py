"""Versions of transformers that imbrex runs in; older ones are refused by name."""
import transformers

OLDEST = (5, 4)
OLDEST_WITH_CONTINUOUS_BATCHING = (5, 16)
OLDEST_WITH_RECURRENT_LAYERS = (5, 16)


def _number(version: str):
    return tuple(int(n) for n in version.split(".")[:2])


def check(version: str = transformers.__version__) -> None:
    if _number(version) < OLDEST:
        raise ImportError(f"imbrex.transformers: expected transformers {OLDEST[0]}.{OLDEST[1]} or later, got {version}")


def check_continuous_batching(version: str = transformers.__version__) -> None:
    if _number(version) < OLDEST_WITH_CONTINUOUS_BATCHING:
        major, minor = OLDEST_WITH_CONTINUOUS_BATCHING
        raise NotImplementedError(
            f"imbrex: continuous batching: expected transformers {major}.{minor} or later, got {version}; use generate(), or attn_implementation='sdpa'"
        )


def check_recurrent(version: str = transformers.__version__) -> None:
    if _number(version) < OLDEST_WITH_RECURRENT_LAYERS:
        major, minor = OLDEST_WITH_RECURRENT_LAYERS
        raise NotImplementedError(f"imbrex: recurrent layers: expected transformers {major}.{minor} or later, got {version}")
