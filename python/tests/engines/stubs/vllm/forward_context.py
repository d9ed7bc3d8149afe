from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Dict


@dataclass
class ForwardContext:
    no_compile_layers: Dict[str, Any]
    attn_metadata: Any
    slot_mapping: Any


_context = None


def get_forward_context():
    assert _context is not None, "no forward context"
    return _context


def is_forward_context_available():
    return _context is not None


@contextmanager
def set_forward_context(attn_metadata, vllm_config, slot_mapping=None):
    global _context
    before = _context
    _context = ForwardContext(vllm_config.compilation_config.static_forward_context, attn_metadata, slot_mapping or {})
    try:
        yield
    finally:
        _context = before
