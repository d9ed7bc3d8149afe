"""Python functions over indices, as PyTorch's flex_attention takes them, traced to texts of expressions (docs/expressions.md).

A function is called once with terms in the place of its arguments. What it does with them is written down, and tensors that it indexes with
them are kept; what it does with numbers and tensors alone is computed by Python and PyTorch as usual.
"""
import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Traced", "trace_mask_mod", "trace_score_mod"]

_BOOL, _INT, _FLOAT = "bool", "int", "float"
_KINDS = {torch.bool: _BOOL, torch.uint8: _INT, torch.int8: _INT, torch.int16: _INT, torch.int32: _INT, torch.int64: _INT}
_MOST_INT = 2**31 - 1


def _refuse(what):
    raise NotImplementedError(f"imbrex: an expression of flex_attention cannot have {what}: see docs/expressions.md")


class Traced:
    """An expression as text, tensors declared in front, and these by name."""

    def __init__(self, text, tensors):
        self.text, self.tensors = text, tensors


class _Tensors:
    """Tensors that a function has indexed, by their names in the text."""

    def __init__(self):
        self.given = []  # of (tensor as given, name, tensor as it is bound, type)

    def name_of(self, tensor):
        for known, name, _, kind in self.given:
            if known is tensor:
                return name, kind
        kind = _KINDS.get(tensor.dtype, _FLOAT if tensor.dtype.is_floating_point else None)
        if kind is None:
            _refuse(f"a tensor of {tensor.dtype}")
        wanted = {_BOOL: torch.uint8, _INT: torch.int32, _FLOAT: torch.float32}[kind]
        if kind == _INT and tensor.numel() and max(abs(int(tensor.max())), abs(int(tensor.min()))) > _MOST_INT:
            _refuse("ints beyond 32 bits")
        name = f"t{len(self.given)}"
        self.given.append((tensor, name, tensor.detach().to(wanted), kind))
        return name, kind

    def declarations(self):
        return "".join(f"{kind} {name}[{',' * (bound.dim() - 1)}]; " for _, name, bound, kind in self.given)

    def bound(self):
        return {name: bound for _, name, bound, _ in self.given}


def _literal(value):
    """A Python number, or a tensor of one, as a term."""
    if isinstance(value, torch.Tensor):
        if value.dim() != 0:
            _refuse(f"a tensor of shape {list(value.shape)} that is not indexed")
        value = value.item()
    if isinstance(value, bool):
        return _Term("true" if value else "false", _BOOL)
    if isinstance(value, int):
        if abs(value) > _MOST_INT:
            _refuse(f"the int {value}")
        return _Term(str(value) if value >= 0 else f"({value})", _INT)
    if isinstance(value, float):
        if value != value:
            return _Term("nan", _FLOAT)
        if value in (float("inf"), float("-inf")):
            return _Term("inf" if value > 0 else "(-inf)", _FLOAT)
        text = repr(value)
        text = text if "." in text or "e" in text else text + ".0"
        return _Term(text if value >= 0 else f"({text})", _FLOAT)
    return None


def _as_term(value):
    return value if isinstance(value, _Term) else _literal(value)


def _number(term):
    """A bool takes part in arithmetic as 0 or 1, as in PyTorch."""
    return _Term(f"int({term.text})", _INT) if term.kind == _BOOL else term


def _binary(symbol, a, b):
    a, b = _as_term(a), _as_term(b)
    if a is None or b is None:
        return NotImplemented
    if symbol in ("&", "|", "^"):
        if a.kind != _BOOL or b.kind != _BOOL:
            _refuse(f"{symbol} of ints")
        return _Term(f"({a.text} {symbol} {b.text})", _BOOL)
    if symbol in ("==", "!=") and a.kind == b.kind == _BOOL:
        return _Term(f"({a.text} {symbol} {b.text})", _BOOL)
    a, b = _number(a), _number(b)
    if symbol in ("==", "!=", "<", "<=", ">", ">="):
        return _Term(f"({a.text} {symbol} {b.text})", _BOOL)
    if symbol == "/":
        return _Term(f"({_real(a).text} / {_real(b).text})", _FLOAT)
    both = _FLOAT if _FLOAT in (a.kind, b.kind) else _INT
    if both == _FLOAT and symbol in ("//", "%"):
        quotient = f"floor({_real(a).text} / {_real(b).text})"
        return _Term(quotient if symbol == "//" else f"({_real(a).text} - {_real(b).text} * {quotient})", _FLOAT)
    return _Term(f"({a.text} {symbol} {b.text})", both)


def _real(term):
    return term if term.kind == _FLOAT else _Term(f"float({term.text})", _FLOAT)


def _call(name, *args, kind=None):
    terms = [_number(_as_term(a)) for a in args]
    if kind is None:
        kind = _FLOAT if any(t.kind == _FLOAT for t in terms) else _INT
    return _Term(f"{name}({', '.join(t.text for t in terms)})", kind)


def _where(condition, a, b):
    condition, a, b = _as_term(condition), _as_term(a), _as_term(b)
    if condition.kind != _BOOL:
        _refuse("a condition that is no bool")
    if not a.kind == b.kind == _BOOL:
        a, b = _number(a), _number(b)
    return _Term(f"where({condition.text}, {a.text}, {b.text})", _FLOAT if _FLOAT in (a.kind, b.kind) else a.kind)


def _clamp(x, min=None, max=None):  # noqa: A002: names of PyTorch
    x = _as_term(x)
    x = x if min is None else _call("max", x, min)
    return x if max is None else _call("min", x, max)


def _converted(term, dtype):
    term = _as_term(term)
    if dtype.is_floating_point:
        return _real(term)
    if dtype == torch.bool:
        return term if term.kind == _BOOL else _Term(f"({term.text} != 0)", _BOOL)
    return term if term.kind == _INT else _Term(f"int({term.text})", _INT)


def _power(a, b):
    if isinstance(b, (int, float)) and b == 2:
        return _binary("*", a, a)
    if isinstance(b, (int, float)) and b == 0.5:
        return _real_function("sqrt")(a)
    _refuse("powers but for 2 and 0.5")


def _real_function(name):
    return lambda x: _Term(f"{name}({_real(_as_term(x)).text})", _FLOAT)


def _not(x):
    x = _as_term(x)
    if x.kind != _BOOL:
        _refuse("~ of an int")
    return _Term(f"!{x.text}", _BOOL)


_FUNCTIONS = {
    "add": lambda a, b: _binary("+", a, b),
    "sub": lambda a, b: _binary("-", a, b),
    "subtract": lambda a, b: _binary("-", a, b),
    "rsub": lambda a, b: _binary("-", b, a),
    "mul": lambda a, b: _binary("*", a, b),
    "multiply": lambda a, b: _binary("*", a, b),
    "div": lambda a, b, rounding_mode=None: _binary("//" if rounding_mode == "floor" else "/", a, b),
    "true_divide": lambda a, b: _binary("/", a, b),
    "floor_divide": lambda a, b: _binary("//", a, b),
    "remainder": lambda a, b: _binary("%", a, b),
    "eq": lambda a, b: _binary("==", a, b),
    "ne": lambda a, b: _binary("!=", a, b),
    "lt": lambda a, b: _binary("<", a, b),
    "le": lambda a, b: _binary("<=", a, b),
    "gt": lambda a, b: _binary(">", a, b),
    "ge": lambda a, b: _binary(">=", a, b),
    "less": lambda a, b: _binary("<", a, b),
    "less_equal": lambda a, b: _binary("<=", a, b),
    "greater": lambda a, b: _binary(">", a, b),
    "greater_equal": lambda a, b: _binary(">=", a, b),
    "logical_and": lambda a, b: _binary("&", a, b),
    "logical_or": lambda a, b: _binary("|", a, b),
    "logical_xor": lambda a, b: _binary("^", a, b),
    "bitwise_and": lambda a, b: _binary("&", a, b),
    "bitwise_or": lambda a, b: _binary("|", a, b),
    "bitwise_xor": lambda a, b: _binary("^", a, b),
    "and": lambda a, b: _binary("&", a, b),
    "or": lambda a, b: _binary("|", a, b),
    "xor": lambda a, b: _binary("^", a, b),
    "logical_not": _not,
    "bitwise_not": _not,
    "invert": _not,
    "neg": lambda x: _Term(f"(-{_number(_as_term(x)).text})", _number(_as_term(x)).kind),
    "abs": lambda x: _call("abs", x),
    "minimum": lambda a, b: _call("min", a, b),
    "maximum": lambda a, b: _call("max", a, b),
    "min": lambda a, b: _call("min", a, b),
    "max": lambda a, b: _call("max", a, b),
    "clamp": _clamp,
    "clip": _clamp,
    "where": _where,
    "pow": _power,
    "square": lambda x: _binary("*", x, x),
    "float": lambda x: _real(_as_term(x)),
    "to": lambda x, dtype: _converted(x, dtype),
    **{name: _real_function(name) for name in ("floor", "exp", "log", "sqrt", "tanh", "sigmoid")},
}
_ALIASES = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "rmul": "mul", "radd": "add", "absolute": "abs"}
_REFLECTED = {"rtruediv": "div", "rfloordiv": "floor_divide", "rmod": "remainder", "rand": "and", "ror": "or", "rxor": "xor"}


def _apply(name, args, kwargs):
    name = name.strip("_")
    if name in _REFLECTED:
        name, args = _REFLECTED[name], args[::-1]
    function = _FUNCTIONS.get(_ALIASES.get(name, name))
    if function is None:
        _refuse(f"the function {name}")
    return function(*args, **kwargs)


class _Term:
    """A part of the text, and its type."""

    __slots__ = ("text", "kind")
    __hash__ = None

    def __init__(self, text, kind):
        self.text, self.kind = text, kind

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return _apply(getattr(function, "__name__", str(function)), args, kwargs or {})

    def __bool__(self):
        _refuse("a branch on a value (use torch.where)")

    def __index__(self):
        _refuse("an index into what is no tensor")

    def __getattr__(self, name):
        if name.startswith("__") or _ALIASES.get(name, name) not in _FUNCTIONS:
            raise AttributeError(name)
        return lambda *args, **kwargs: _apply(name, (self, *args), kwargs)


def _operator(name):
    def method(self, *others):
        return _apply(name, (self, *others), {})

    return method


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod and rand or ror xor rxor eq ne lt le gt ge neg abs invert pow"
).split():
    setattr(_Term, f"__{_name}__", _operator(_name))


def _has_terms(values):
    return any(isinstance(v, _Term) or (isinstance(v, (tuple, list)) and _has_terms(v)) for v in values)


class _Recorder(TorchFunctionMode):
    """Takes the calls of PyTorch that a term is an argument of; a tensor that is indexed with one is kept."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = tensors

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _has_terms(args) and not _has_terms(kwargs.values()):
            return function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        if name == "__getitem__" and isinstance(args[0], torch.Tensor):
            return self.element(*args)
        return _apply(name, args, kwargs)

    def element(self, tensor, indices):
        indices = indices if isinstance(indices, tuple) else (indices,)
        terms = [_as_term(i) for i in indices]
        if any(t is None for t in terms) or len(terms) > tensor.dim():
            _refuse(f"{len(indices)} indices of a tensor of {tensor.dim()} dimensions that are no ints")
        if len(terms) < tensor.dim() or tensor.dim() > 3:
            _refuse(f"{len(terms)} indices of a tensor of {tensor.dim()} dimensions")
        name, kind = self.tensors.name_of(tensor)
        return _Term(f"{name}[{', '.join(_number(t).text for t in terms)}]", kind)


def _traced(function, arguments, wanted):
    tensors = _Tensors()
    with _Recorder(tensors):
        result = function(*arguments)
        term = _as_term(result)
    if term is None:
        _refuse(f"a result of type {type(result).__name__}")
    if wanted == _BOOL:
        term = _converted(term, torch.bool)
    elif term.kind != _FLOAT:
        term = _real(_number(term))
    return Traced(tensors.declarations() + term.text, tensors.bound())


def _indices(num_queries, num_keys):
    """batch, head, query and key as flex_attention counts them: queries from 0."""
    before = num_keys - num_queries
    query = _Term("q", _INT) if before == 0 else _Term(f"(q - {before})" if before > 0 else f"(q + {-before})", _INT)
    return _Term("batch", _INT), _Term("head", _INT), query, _Term("kv", _INT)


def trace_mask_mod(mask_mod, num_queries, num_keys):
    """mask_mod(b, h, q_idx, kv_idx) of a request of so many queries and keys."""
    return _traced(mask_mod, _indices(num_queries, num_keys), _BOOL)


def trace_score_mod(score_mod, num_queries, num_keys):
    """score_mod(score, b, h, q_idx, kv_idx), likewise."""
    return _traced(score_mod, (_Term("score", _FLOAT), *_indices(num_queries, num_keys)), _FLOAT)
