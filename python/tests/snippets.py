"""The Python snippets of a page of docs/, run one after the other, as a reader would run them."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def run_snippets(page, least):
    """Their names after the last one. `least`: how many there must be."""
    snippets = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.M | re.S)
    assert len(snippets) >= least
    names = {}
    for snippet in snippets:
        exec(compile(snippet, f"docs/{page}", "exec"), names)
    return names
