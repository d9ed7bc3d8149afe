"""Functions of PyTorch on terms: what the language has, and what is written with it."""
import functools
import math

import torch

from ._expression_terms import BOOL, FLOAT, INT, Term, as_term, binary, call, converted, number, real, real_function, refuse, where

_CONVERSIONS = {
    **dict.fromkeys(("float", "double", "half", "bfloat16"), torch.float32),
    **dict.fromkeys(("int", "long", "short"), torch.int32),
    "bool": torch.bool,
}
_MOST_FACTORS = 8  # of a power that is written as a product


def _clamp(x, min=None, max=None):  # noqa: A002: names of PyTorch
    x = as_term(x)
    x = x if min is None else call("max", x, min)
    return x if max is None else call("min", x, max)


def _power(a, b):
    if isinstance(a, (int, float)) and a > 0:
        return real_function("exp")(binary("*", b, math.log(a)))
    if isinstance(b, (int, float)) and b < 0:
        return binary("/", 1.0, _power(a, -b))
    if isinstance(b, (int, float)) and b == 0.5:
        return real_function("sqrt")(a)
    if not isinstance(b, (int, float)) or b != int(b) or not 1 <= b <= _MOST_FACTORS:
        refuse(f"powers but for the first to the {_MOST_FACTORS}th, square roots, their reciprocals, and powers of a positive number")
    return functools.reduce(lambda x, y: binary("*", x, y), [as_term(a)] * int(b))


def _quotient(a, b, rounding_mode=None):
    if rounding_mode is None:
        return binary("/", a, b)
    if rounding_mode == "floor":
        return binary("//", a, b)
    a, b = number(as_term(a)), number(as_term(b))
    if FLOAT in (a.kind, b.kind):
        return _truncated(binary("/", a, b))
    quotient = binary("//", call("abs", a), call("abs", b))
    return where(binary("^", binary("<", a, 0), binary("<", b, 0)), _negated(quotient), quotient)


def _negated(x):
    x = number(as_term(x))
    return Term(f"(-{x.text})", x.kind)


def _rounding(of_float):
    """A function of floats that leaves ints as they are."""

    def rounded(x):
        x = number(as_term(x))
        return x if x.kind == INT else of_float(x)

    return rounded


_floor = _rounding(lambda x: real_function("floor")(x))
_ceil = _rounding(lambda x: _negated(_floor(_negated(x))))
_truncated = _rounding(lambda x: where(binary("<", x, 0.0), _ceil(x), _floor(x)))


@_rounding
def _to_nearest(x):
    """Of two that are as near, the even one."""
    up = _floor(binary("+", x, 0.5))
    half = binary("/", up, 2.0)
    return where(binary("&", binary("==", binary("-", up, x), 0.5), binary("!=", half, _floor(half))), binary("-", up, 1.0), up)


def _sign(x):
    x = number(as_term(x))
    one, zero = converted(1, x.dtype), converted(0, x.dtype)
    return where(binary(">", x, zero), one, where(binary("<", x, zero), _negated(one), zero))


def _like(value):
    """Of zeros_like() and its kind: a number of the other's type."""
    return lambda x, fill=value, dtype=None, **_: converted(fill, dtype or as_term(x).dtype)


def _new(value):
    """Of new_zeros() and its kind, without dimensions."""

    def new(x, size, fill_value=value, dtype=None, **_):
        if not isinstance(size, (tuple, list)) or len(size) > 0:
            refuse(f"a new tensor of shape {size}")
        return converted(fill_value, dtype or as_term(x).dtype)

    return new


def _gelu(x, approximate="none"):
    x = real(number(as_term(x)))
    if approximate == "tanh":
        inner = binary("*", math.sqrt(2 / math.pi), binary("+", x, binary("*", 0.044715, _power(x, 3))))
        return binary("*", binary("*", 0.5, x), binary("+", 1.0, real_function("tanh")(inner)))
    return binary("*", binary("*", 0.5, x), binary("+", 1.0, real_function("erf")(binary("*", x, math.sqrt(0.5)))))


def _softplus(x, beta=1.0, threshold=20.0):
    scaled = binary("*", x, float(beta))
    soft = binary("+", call("max", scaled, 0.0), _log_one_plus(real_function("exp")(_negated(call("abs", scaled)))))
    return where(binary(">", scaled, float(threshold)), real(number(as_term(x))), binary("/", soft, float(beta)))


def _log_one_plus(x):
    return real_function("log")(binary("+", 1.0, x))


def _elu(x, alpha=1.0):
    x = real(number(as_term(x)))
    return where(binary(">", x, 0.0), x, binary("*", float(alpha), binary("-", real_function("exp")(x), 1.0)))


def _logical(symbol):
    return lambda a, b: binary(symbol, converted(a, torch.bool), converted(b, torch.bool))


def _scaled_function(name, before=None, behind=None):
    """A function of the language, of its argument times a number, or times a number itself."""

    def function(x):
        value = real_function(name)(x if before is None else binary("*", x, before))
        return value if behind is None else binary("*", value, behind)

    return function


def _not(x):
    """~x: of an int, of its bits."""
    x = as_term(x)
    if x.kind == FLOAT:
        refuse("~ of a float")
    return Term(f"!{x.text}", BOOL) if x.kind == BOOL else binary("-", _negated(x), 1)


TABLE = {
    "add": lambda a, b, alpha=1: binary("+", a, b if alpha == 1 else binary("*", b, alpha)),
    "sub": lambda a, b, alpha=1: binary("-", a, b if alpha == 1 else binary("*", b, alpha)),
    "subtract": lambda a, b, alpha=1: binary("-", a, b if alpha == 1 else binary("*", b, alpha)),
    "rsub": lambda a, b: binary("-", b, a),
    "mul": lambda a, b: binary("*", a, b),
    "multiply": lambda a, b: binary("*", a, b),
    "div": _quotient,
    "divide": _quotient,
    "true_divide": lambda a, b: binary("/", a, b),
    "floor_divide": lambda a, b: binary("//", a, b),
    "remainder": lambda a, b: binary("%", a, b),
    "eq": lambda a, b: binary("==", a, b),
    "ne": lambda a, b: binary("!=", a, b),
    "lt": lambda a, b: binary("<", a, b),
    "le": lambda a, b: binary("<=", a, b),
    "gt": lambda a, b: binary(">", a, b),
    "ge": lambda a, b: binary(">=", a, b),
    "less": lambda a, b: binary("<", a, b),
    "less_equal": lambda a, b: binary("<=", a, b),
    "greater": lambda a, b: binary(">", a, b),
    "greater_equal": lambda a, b: binary(">=", a, b),
    "fmod": lambda a, b: binary("-", a, binary("*", b, _quotient(a, b, "trunc"))),
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_xor": _logical("^"),
    "bitwise_left_shift": lambda a, b: binary("<<", a, b),
    "bitwise_right_shift": lambda a, b: binary(">>", a, b),
    "lshift": lambda a, b: binary("<<", a, b),
    "rshift": lambda a, b: binary(">>", a, b),
    "bitwise_and": lambda a, b: binary("&", a, b),
    "bitwise_or": lambda a, b: binary("|", a, b),
    "bitwise_xor": lambda a, b: binary("^", a, b),
    "and": lambda a, b: binary("&", a, b),
    "or": lambda a, b: binary("|", a, b),
    "xor": lambda a, b: binary("^", a, b),
    "logical_not": lambda x: _not(converted(x, torch.bool)),
    "bitwise_not": _not,
    "invert": _not,
    "neg": _negated,
    "negative": _negated,
    "positive": lambda x: number(as_term(x)),
    "pos": lambda x: number(as_term(x)),
    "abs": lambda x: call("abs", x),
    "minimum": lambda a, b: call("min", a, b),
    "maximum": lambda a, b: call("max", a, b),
    "min": lambda a, b: call("min", a, b),
    "max": lambda a, b: call("max", a, b),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda x, least: _clamp(x, min=least),
    "clamp_max": lambda x, most: _clamp(x, max=most),
    "relu": lambda x: call("max", x, converted(0, as_term(x).dtype)),
    "where": where,
    "masked_fill": lambda x, condition, value: where(condition, value, x),
    "pow": _power,
    "square": lambda x: binary("*", x, x),
    "rsqrt": lambda x: _power(x, -0.5),
    "reciprocal": lambda x: binary("/", 1.0, x),
    "sign": _sign,
    "floor": _floor,
    "ceil": _ceil,
    "trunc": _truncated,
    "fix": _truncated,
    "round": _to_nearest,
    "frac": lambda x: binary("-", x, _truncated(x)),
    "isnan": lambda x: binary("!=", x, x),
    "isinf": lambda x: binary("==", call("abs", x), math.inf),
    "isfinite": lambda x: binary("<", call("abs", x), math.inf),
    "exp2": _scaled_function("exp", before=math.log(2)),
    "log2": _scaled_function("log", behind=1 / math.log(2)),
    "log10": _scaled_function("log", behind=1 / math.log(10)),
    "log1p": _log_one_plus,
    "expm1": lambda x: binary("-", real_function("exp")(x), 1.0),
    "tan": lambda x: binary("/", real_function("sin")(x), real_function("cos")(x)),
    "silu": lambda x: binary("*", x, real_function("sigmoid")(x)),
    "gelu": _gelu,
    "softplus": _softplus,
    "elu": _elu,
    "leaky_relu": lambda x, negative_slope=0.01: where(binary(">", x, 0), real(number(as_term(x))), binary("*", x, float(negative_slope))),
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "full_like": _like(None),
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_full": _new(None),
    "to": lambda x, dtype: converted(x, dtype),
    "type_as": lambda x, other: converted(x, as_term(other).dtype),
    **{name: functools.partial(converted, dtype=dtype) for name, dtype in _CONVERSIONS.items()},
    **{name: real_function(name) for name in ("exp", "log", "sqrt", "tanh", "sigmoid", "sin", "cos", "erf")},
}
