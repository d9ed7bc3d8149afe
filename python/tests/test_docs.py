"""The snippets of the documents about Python run, one after the other, as a reader would run them."""
import re
from pathlib import Path

import pytest


def run_snippets(document):
    """The names that they leave."""
    text = (Path(__file__).resolve().parents[2] / document).read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    assert snippets
    names = {}
    for snippet in snippets:
        exec(compile(snippet, document, "exec"), names)
    return names


def test_python():
    names = run_snippets("docs/python.md")
    out, lse = names["out"], names["lse"]
    assert out.shape == (20, 32, 128) and lse.shape == (20, 32)


def test_flashinfer():
    pytest.importorskip("torch")
    names = run_snippets("docs/flashinfer.md")
    assert names["out"].isfinite().all() and names["lse"].isfinite().all()
