"""The snippets of docs/python.md run, one after the other, as a reader would run them."""
import re
from pathlib import Path


def test_snippets():
    text = (Path(__file__).resolve().parents[2] / "docs/python.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    assert len(snippets) >= 3
    names = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/python.md", "exec"), names)
    out, lse = names["out"], names["lse"]
    assert out.shape == (20, 32, 128) and lse.shape == (20, 32)
