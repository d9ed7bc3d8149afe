"""The pages about the engines, against their stand-ins."""

import pytest
from snippets import DOCS, run_snippets


def test_vllm_page(vllm, monkeypatch):
    monkeypatch.setattr("vllm.platforms.current_platform.kind", "cuda")
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    run_snippets("vllm.md", least=3)


def test_sglang_page(sglang, monkeypatch):
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", "{}")  # a snippet sets it
    run_snippets("sglang.md", least=2)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_pages_name_the_versions(request, engine):
    request.getfixturevalue(engine)
    module = __import__(f"imbrex.{engine}", fromlist=["WRITTEN_FOR"])
    text = (DOCS / f"{engine}.md").read_text()
    for version in module.WRITTEN_FOR:
        assert f"**{version}**" in text or f"**{version.rsplit('.', 1)[0]}**" in text
