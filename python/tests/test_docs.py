"""The snippets of the pages run, page by page and one after the other, as a reader would run them."""
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
NEEDS = {"python": [], "pytorch": ["torch"], "flashinfer": ["torch"], "transformers": ["torch", "transformers"]}


@pytest.mark.parametrize("page", NEEDS)
def test_snippets(page):
    for module in NEEDS[page]:
        pytest.importorskip(module)
    snippets = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), flags=re.M | re.S)
    assert snippets
    names = {}
    for snippet in snippets:
        exec(compile(snippet, f"docs/{page}.md", "exec"), names)


def test_every_page_with_a_snippet_is_run():
    pages = {p.stem for p in DOCS.glob("*.md") if "```python\n" in p.read_text()}
    assert pages == set(NEEDS)
