"""Terms that stand for the values of an expression while a function is traced (_expressions.py): parts of its text, with Python's operators."""
import torch

BOOL, INT, FLOAT = "bool", "int", "float"
KINDS = {torch.bool: BOOL, torch.uint8: INT, torch.int8: INT, torch.int16: INT, torch.int32: INT, torch.int64: INT}
_DTYPES = {BOOL: torch.bool, INT: torch.int32, FLOAT: torch.float32}
MOST_INT = 2**31 - 1

FUNCTIONS = {}  # what a function of PyTorch does to terms, by its name: _expressions.py fills it


def refuse(what):
    raise NotImplementedError(f"imbrex: an expression of flex_attention cannot have {what}: see docs/expressions.md")


def _literal(value):
    """A Python number, or a tensor of one, as a term."""
    if isinstance(value, torch.Tensor):
        if value.dim() != 0:
            refuse(f"a tensor of shape {list(value.shape)} that is not indexed")
        value = value.item()
    if isinstance(value, bool):
        return Term("true" if value else "false", BOOL)
    if isinstance(value, int):
        if abs(value) > MOST_INT:
            refuse(f"the int {value}")
        return Term(str(value) if value >= 0 else f"({value})", INT)
    if isinstance(value, float):
        if value != value:
            return Term("nan", FLOAT)
        if value in (float("inf"), float("-inf")):
            return Term("inf" if value > 0 else "(-inf)", FLOAT)
        text = repr(value)
        text = text if "." in text or "e" in text else text + ".0"
        return Term(text if value >= 0 else f"({text})", FLOAT)
    return None


def as_term(value):
    return value if isinstance(value, Term) else _literal(value)


def number(term):
    """A bool takes part in arithmetic as 0 or 1, as in PyTorch."""
    return Term(f"int({term.text})", INT) if term.kind == BOOL else term


def binary(symbol, a, b):
    a, b = as_term(a), as_term(b)
    if a is None or b is None:
        return NotImplemented
    if symbol in ("&", "|", "^") and a.kind == b.kind == BOOL:
        return Term(f"({a.text} {symbol} {b.text})", BOOL)
    if symbol in ("==", "!=") and a.kind == b.kind == BOOL:
        return Term(f"({a.text} {symbol} {b.text})", BOOL)
    a, b = number(a), number(b)
    if symbol in ("==", "!=", "<", "<=", ">", ">="):
        return Term(f"({a.text} {symbol} {b.text})", BOOL)
    if symbol == "/":
        return Term(f"({real(a).text} / {real(b).text})", FLOAT)
    both = FLOAT if FLOAT in (a.kind, b.kind) else INT
    if both == FLOAT and symbol in ("&", "|", "^", "<<", ">>"):
        refuse(f"{symbol} of floats")
    if both == FLOAT and symbol in ("//", "%"):
        quotient = f"floor({real(a).text} / {real(b).text})"
        return Term(quotient if symbol == "//" else f"({real(a).text} - {real(b).text} * {quotient})", FLOAT)
    return Term(f"({a.text} {symbol} {b.text})", both)


def real(term):
    return term if term.kind == FLOAT else Term(f"float({term.text})", FLOAT)


def call(name, *args, kind=None):
    terms = [number(as_term(a)) for a in args]
    if kind is None:
        kind = FLOAT if any(t.kind == FLOAT for t in terms) else INT
    return Term(f"{name}({', '.join(t.text for t in terms)})", kind)


def where(condition, a, b):
    condition, a, b = as_term(condition), as_term(a), as_term(b)
    if condition.kind != BOOL:
        refuse("a condition that is no bool")
    if not a.kind == b.kind == BOOL:
        a, b = number(a), number(b)
    return Term(f"where({condition.text}, {a.text}, {b.text})", FLOAT if FLOAT in (a.kind, b.kind) else a.kind)


def converted(term, dtype):
    term = as_term(term)
    if dtype.is_floating_point:
        return real(term)
    if dtype == torch.bool:
        return term if term.kind == BOOL else Term(f"({term.text} != 0)", BOOL)
    return term if term.kind == INT else Term(f"int({term.text})", INT)


def real_function(name):
    return lambda x: Term(f"{name}({real(as_term(x)).text})", FLOAT)


_ALIASES = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder", "rmul": "mul", "radd": "add", "absolute": "abs"}
_REFLECTED = {
    "rtruediv": "div",
    "rfloordiv": "floor_divide",
    "rmod": "remainder",
    "rand": "and",
    "ror": "or",
    "rxor": "xor",
    "rpow": "pow",
    "rlshift": "lshift",
    "rrshift": "rshift",
}


def apply(name, args, kwargs):
    name = name.strip("_")
    if name in _REFLECTED:
        name, args = _REFLECTED[name], args[::-1]
    function = FUNCTIONS.get(_ALIASES.get(name, name))
    if function is None:
        refuse(f"the function {name}")
    return function(*args, **{key: value for key, value in kwargs.items() if key != "inplace"})


class Term:
    """A part of the text, and its type."""

    __slots__ = ("text", "kind")
    __hash__ = None

    def __init__(self, text, kind):
        self.text, self.kind = text, kind

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return apply(getattr(function, "__name__", str(function)), args, kwargs or {})

    # Of a tensor of one number, which a function may ask for.
    device, shape, ndim = torch.device("cpu"), torch.Size(), 0

    @property
    def dtype(self):
        return _DTYPES[self.kind]

    def __bool__(self):
        refuse("a branch on a value (use torch.where)")

    def __index__(self):
        refuse("an index into what is no tensor")

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        if _ALIASES.get(name, name) not in FUNCTIONS:
            refuse(f"the function {name}")
        return lambda *args, **kwargs: apply(name, (self, *args), kwargs)


def _operator(name):
    def method(self, *others):
        return apply(name, (self, *others), {})

    return method


for _name in (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod and rand or ror xor rxor lshift rlshift rshift rrshift "
    "eq ne lt le gt ge neg pos abs invert pow rpow"
).split():
    setattr(Term, f"__{_name}__", _operator(_name))
