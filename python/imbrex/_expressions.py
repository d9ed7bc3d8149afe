"""Python functions over indices, as PyTorch's flex_attention takes them, traced to texts of expressions (docs/expressions.md).

A function is called once with terms in the place of its arguments. What it does with them is written down, and tensors that it indexes with
them are kept; what it does with numbers and tensors alone is computed by Python and PyTorch as usual.
"""
import torch
from torch.overrides import TorchFunctionMode

from ._expression_functions import TABLE
from ._expression_terms import BOOL, FLOAT, FUNCTIONS, INT, KINDS, MOST_INT, Term, apply, as_term, converted, number, real, refuse

FUNCTIONS.update(TABLE)

__all__ = ["Traced", "trace_mask_mod", "trace_score_mod"]

_MOST_RANK = 3  # of a tensor in a text: the leading dimensions of others are one


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
        kind = KINDS.get(tensor.dtype, FLOAT if tensor.dtype.is_floating_point else None)
        if kind is None:
            refuse(f"a tensor of {tensor.dtype}")
        wanted = {BOOL: torch.uint8, INT: torch.int32, FLOAT: torch.float32}[kind]
        if kind == INT and tensor.numel() and max(abs(int(tensor.max())), abs(int(tensor.min()))) > MOST_INT:
            refuse("ints beyond 32 bits")
        if tensor.dim() > _MOST_RANK and tensor.numel() > MOST_INT:
            refuse(f"a tensor of shape {list(tensor.shape)}")
        name = f"t{len(self.given)}"
        bound = tensor.detach().to(wanted)
        self.given.append((tensor, name, bound.flatten(0, -_MOST_RANK) if bound.dim() > _MOST_RANK else bound, kind))
        return name, kind

    def declarations(self):
        return "".join(f"{kind} {name}[{',' * (bound.dim() - 1)}]; " for _, name, bound, kind in self.given)

    def bound(self):
        return {name: bound for _, name, bound, _ in self.given}


def _has_terms(values):
    return any(isinstance(v, Term) or (isinstance(v, (tuple, list)) and _has_terms(v)) for v in values)


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
        if name in ("__getitem__", "index") and isinstance(args[0], torch.Tensor):
            indices = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
            return self.element(args[0], tuple(indices))
        return apply(name, args, kwargs)

    def element(self, tensor, indices):
        terms = [as_term(i) for i in indices]
        if any(t is None for t in terms) or len(terms) > tensor.dim():
            refuse(f"{len(indices)} indices of a tensor of {tensor.dim()} dimensions that are no ints")
        if len(terms) < tensor.dim():
            return _Part(self, tensor, indices)
        name, kind = self.tensors.name_of(tensor)
        texts = [number(t).text for t in terms]
        leading = max(len(texts) - _MOST_RANK, 0)
        for text, size in zip(texts[1 : leading + 1], tensor.shape[1:]):
            texts[0] = f"({texts[0]} * {size} + {text})"
        return Term(f"{name}[{', '.join([texts[0], *texts[leading + 1 :]])}]", kind)


class _Part(Term):
    """A tensor and its first indices, which more have to follow."""

    __slots__ = ("recorder", "tensor", "indices")
    __torch_function__ = Term.__torch_function__

    def __init__(self, recorder, tensor, indices):
        self.recorder, self.tensor, self.indices = recorder, tensor, indices

    def __getitem__(self, indices):
        return self.recorder.element(self.tensor, self.indices + (indices if isinstance(indices, tuple) else (indices,)))

    def __iter__(self):
        return (self[i] for i in range(self.tensor.shape[len(self.indices)]))

    @property
    def text(self):
        refuse(f"{len(self.indices)} indices of a tensor of {self.tensor.dim()} dimensions")

    kind = text


def _traced(function, arguments, wanted):
    tensors = _Tensors()
    with _Recorder(tensors):
        result = function(*arguments)
        term = as_term(result)
    if term is None:
        refuse(f"a result of type {type(result).__name__}")
    if wanted == BOOL:
        term = converted(term, torch.bool)
    elif term.kind != FLOAT:
        term = real(number(term))
    return Traced(tensors.declarations() + term.text, tensors.bound())


def _indices(num_queries, num_keys):
    """batch, head, query and key as flex_attention counts them: queries from 0."""
    before = num_keys - num_queries
    query = Term("q", INT) if before == 0 else Term(f"(q - {before})" if before > 0 else f"(q + {-before})", INT)
    return Term("batch", INT), Term("head", INT), query, Term("kv", INT)


def trace_mask_mod(mask_mod, num_queries, num_keys):
    """mask_mod(b, h, q_idx, kv_idx) of a request of so many queries and keys."""
    return _traced(mask_mod, _indices(num_queries, num_keys), BOOL)


def trace_score_mod(score_mod, num_queries, num_keys):
    """score_mod(score, b, h, q_idx, kv_idx), likewise."""
    return _traced(score_mod, (Term("score", FLOAT), *_indices(num_queries, num_keys)), FLOAT)
