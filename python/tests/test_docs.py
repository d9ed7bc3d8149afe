"""The pages' snippets; those about engines are run in engines/, against stand-ins."""
import sys

import pytest

from snippets import DOCS, run_snippets

NEEDS = {
    "batches": [],
    "python": [],
    "pytorch": ["torch"],
    "flash_attn": ["torch"],
    "flashinfer": ["torch"],
    "mla": ["torch"],
    "recurrent": ["torch"],
    "transformers": ["torch", "transformers"],
}
STAND_INS = ("flash_attn", "fla", "causal_conv1d", "mamba_ssm")  # names under which pages put imbrex


@pytest.mark.parametrize("page", NEEDS)
def test_snippets(page):
    for module in NEEDS[page]:
        pytest.importorskip(module)
    names = set(sys.modules)
    run_snippets(f"{page}.md", least=1)
    for name in set(sys.modules) - names:
        if name.split(".")[0] in STAND_INS or name.startswith("flash_attn"):  # other tests would find them installed
            del sys.modules[name]


def test_every_page_with_a_snippet_is_run():
    pages = {p.stem for p in DOCS.glob("*.md") if "```python\n" in p.read_text()}
    assert pages == {*NEEDS, "vllm", "sglang"}
