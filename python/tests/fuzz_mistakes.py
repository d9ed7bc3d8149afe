"""Mistakes of a caller, for fuzz_surfaces.py: each changes one argument and says how."""

import numpy as np

_NUMBERS = (0, 1, -1, -2, 3, 7, 16, 17, 64, 255, 900, 65536, 1 << 20, 2**31 - 1, -(2**31), 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"), 1e300)


def _wrong_number(rng, right, low=-(2**63), high=2**63 - 1):
    while True:
        number = right + rng.randint(-3, 3) if rng.random() < 0.4 else rng.choice(_NUMBERS)
        if number != right and low <= number <= high:
            return number


def _of_numbers(array, rng):
    """Another number in it."""
    if array.size == 0:
        return None
    array = array.copy()
    at = tuple(rng.randrange(n) for n in array.shape)
    if array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        array[at] = _wrong_number(rng, int(array[at]), int(limits.min), int(limits.max))
    elif array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array[at] = rng.choice(_FLOATS)
    return array, f"[{', '.join(map(str, at))}] = {array[at]}"


def _of_all_numbers(array, rng):
    """All of them more: starts that are later, lengths that are longer."""
    if array.dtype.kind not in "iu" or array.size == 0:
        return None
    by = min(rng.choice((1, 5, 100, 100_000_000)), int(np.iinfo(array.dtype).max))
    first = rng.randrange(array.shape[0]) if array.ndim == 1 else 0
    array = array.copy()
    array[first:] += array.dtype.type(by)
    return array, f"+ {by} from {first} on"


def _of_size(array, rng):
    """Fewer or more entries in one dimension, in memory of that size."""
    if array.ndim == 0:
        return None
    axis = rng.randrange(array.ndim)
    size = rng.choice((0, 1, array.shape[axis] - 1, array.shape[axis] // 2, array.shape[axis] + 1, array.shape[axis] * 2))
    if size < 0 or size == array.shape[axis]:
        return None
    return np.resize(array, (*array.shape[:axis], size, *array.shape[axis + 1 :])).copy(), f"has the shape with {size} in dimension {axis}"


def _of_rank(array, rng):
    if rng.random() < 0.5 or array.ndim == 0:
        axis = rng.randint(0, array.ndim)
        return np.expand_dims(array, axis).copy(), f"has one more dimension, {axis}"
    if rng.random() < 0.3:
        return array.reshape((1,) * rng.randint(3, 6) + array.shape), "has many more dimensions"
    return array.reshape(-1).copy(), "is flat"


def _of_type(array, rng):
    type_ = rng.choice((np.float32, np.float16, np.float64, np.uint16, np.uint8, np.int8, np.int32, np.int64, np.bool_, np.complex64))
    with np.errstate(all="ignore"):
        return array.astype(type_), f"is {np.dtype(type_)}"


def _of_strides(array, rng):
    """The same numbers elsewhere: with gaps, from the end, transposed, all in one place, or at an odd address."""
    kind = rng.choice(("gaps", "backwards", "transposed", "one", "odd"))
    if array.ndim == 0 or array.size == 0:
        return None
    axis = rng.randrange(array.ndim)
    if kind == "gaps":
        wide = np.zeros((*array.shape[:axis], array.shape[axis] * 2, *array.shape[axis + 1 :]), array.dtype)
        view = wide[(slice(None),) * axis + (slice(None, -1, 2),)]
        view[...] = array
        return view, f"has gaps in dimension {axis}"
    if kind == "backwards":
        return np.flip(array.copy(), axis), f"is backwards in dimension {axis}"
    if kind == "transposed":
        return np.swapaxes(array.copy(), axis, -1), f"has dimensions {axis} and the last exchanged"
    if kind == "one":
        return np.broadcast_to(array[(slice(None),) * axis + (slice(0, 1),)].copy(), array.shape), f"has stride 0 in dimension {axis}"
    bytes_ = np.zeros(array.nbytes + 1, np.uint8)
    bytes_[1:] = np.frombuffer(array.tobytes(), np.uint8)
    return bytes_[1:].view(array.dtype).reshape(array.shape), "is at an odd address"


def _read_only(array, rng):
    array = array.copy()
    array.setflags(write=False)
    return array, "is read-only"


_OF_ARRAYS = (_of_numbers, _of_numbers, _of_numbers, _of_all_numbers, _of_all_numbers, _of_size, _of_size, _of_size, _of_rank, _of_type, _of_strides)


def _of_array(array, rng):
    chosen = rng.random()
    if chosen < 0.04:
        return rng.choice((None, 3, "text", [1, 2], array.tolist())), "is no array"
    if chosen < 0.08:
        return _read_only(array, rng)
    return rng.choice(_OF_ARRAYS)(array, rng)


def _of_value(value, rng):
    if isinstance(value, bool):
        return rng.choice((not value, 2, None, "yes")), ""
    if isinstance(value, int):
        return rng.choice((_wrong_number(rng, value), _wrong_number(rng, value), value + 0.5, None, str(value))), ""
    if isinstance(value, float):
        return rng.choice(_FLOATS + (None, "text")), ""
    if isinstance(value, tuple):
        at = rng.randrange(len(value)) if value else 0
        return rng.choice((value[:at] + (_wrong_number(rng, 0),) + value[at + 1 :], value + (1,), (), None)), ""
    if isinstance(value, str):
        return rng.choice(("", "nothing", value + "\0", "é" * 100, None, 7)), ""
    if value is None:
        return rng.choice((0, 1.0, "text", np.ones(4, np.float32), np.ones((2, 3), np.int32))), ""
    return None


def make_mistake(arguments, rng):
    """Changes one of the arguments; what is told of it, in a list."""
    for _ in range(1000):
        name = rng.choice(sorted(arguments))
        value = arguments[name]
        if rng.random() < 0.03:
            other = rng.choice(sorted(arguments))
            arguments[name] = arguments[other]
            return [f"{name} is {other}"]
        if isinstance(value, list):
            if not all(isinstance(part, np.ndarray) for part in value):
                continue  # one mistake is enough
            if not value or rng.random() < 0.1:
                arguments[name] = value[1:]
                return [f"{name} has {len(value) - 1} parts"]
            at = rng.randrange(len(value))
            changed = _of_array(value[at], rng)
            if changed is not None:
                arguments[name] = [*value[:at], changed[0], *value[at + 1 :]]
                return [f"{name}[{at}] {changed[1]}"]
            continue
        changed = _of_array(value, rng) if isinstance(value, np.ndarray) else _of_value(value, rng)
        if changed is not None:
            arguments[name] = changed[0]
            return [f"{name} {changed[1] or '= ' + repr(changed[0])[:40]}"]
    return []
