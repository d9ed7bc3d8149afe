"""The pages' snippets; those about engines are run in engines/, against stand-ins."""
import pytest

from snippets import DOCS, run_snippets

NEEDS = {"python": [], "pytorch": ["torch"], "flashinfer": ["torch"], "transformers": ["torch", "transformers"]}


@pytest.mark.parametrize("page", NEEDS)
def test_snippets(page):
    for module in NEEDS[page]:
        pytest.importorskip(module)
    run_snippets(f"{page}.md", least=1)


def test_every_page_with_a_snippet_is_run():
    pages = {p.stem for p in DOCS.glob("*.md") if "```python\n" in p.read_text()}
    assert pages == {*NEEDS, "vllm", "sglang"}
