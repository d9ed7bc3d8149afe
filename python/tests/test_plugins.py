"""What the plug-ins for vLLM and SGLang do without them, and without PyTorch."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import fields
from importlib import metadata
from pathlib import Path

import pytest
from snippets import DOCS

import imbrex
from imbrex.engines import Settings, all_cores, check_version, settings, version_of

ENTRY_POINTS = {("vllm.general_plugins", "imbrex.vllm:register"), ("sglang.srt.plugins", "imbrex.sglang:register")}


def run_python(text):
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=Path(imbrex.__file__).parents[1])


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_importing_imports_no_engine(engine):
    text = f"import sys, imbrex, imbrex.{engine}\nassert not {{'torch', 'vllm', 'sglang', 'imbrex.{engine}.backend'}} & set(sys.modules)"
    ran = run_python(text)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("engine, name", [("vllm", "vLLM 0.32.0 or 0.33.0"), ("sglang", "SGLang 0.5.23")])
def test_register_without_the_engine(engine, name):
    ran = run_python(f"import sys\nsys.modules['{engine}'] = None\nimport imbrex.{engine}\nimbrex.{engine}.register()")
    assert ran.returncode == 1 and f"ImportError: imbrex.{engine}.register() needs {name}, which cannot be imported" in ran.stderr


def test_entry_points_are_declared():
    text = (DOCS.parent / "pyproject.toml").read_text()
    for group, target in ENTRY_POINTS:
        section = re.search(rf'^\[project\.entry-points\."{re.escape(group)}"\]\n((?:[^\[\n].*\n)*)', text, re.M)
        assert section and f'imbrex = "{target}"' in section[1]


def test_entry_points_are_installed():
    try:
        installed = metadata.distribution("imbrex")
    except metadata.PackageNotFoundError:
        pytest.skip("imbrex is not installed as a distribution")
    assert {(p.group, p.value) for p in installed.entry_points} >= ENTRY_POINTS
    for point in installed.entry_points:
        assert callable(point.load())


def test_versions(monkeypatch, caplog):
    monkeypatch.delenv("IMBREX_ENGINE_ANY_VERSION", raising=False)
    assert [version_of(v) for v in ("0.33.1rc2", "1.2", "0.5.23.post1", "nightly")] == [(0, 33, 1), (1, 2, 0), (0, 5, 23), (0, 0, 0)]
    check_version("X", "0.33.0+cu130", ("0.32.0", "0.33.0"), least_patch=False)
    assert not caplog.text
    check_version("X", "0.32.1", ("0.32.0", "0.33.0"), least_patch=False)
    assert "imbrex was written for X 0.32.0 and 0.33.0, and this is 0.32.1" in caplog.text
    for version, least_patch in (("0.34.0", False), ("0.31.9", False), ("1.33.0", False), ("0.5.22", True)):
        with pytest.raises(ImportError, match=f"and this is {version}. IMBREX_ENGINE_ANY_VERSION=1"):
            check_version("X", version, ("0.5.23",) if least_patch else ("0.32.0", "0.33.0"), least_patch)
    monkeypatch.setenv("IMBREX_ENGINE_ANY_VERSION", "1")
    check_version("X", "9.9", ("0.5.23",), least_patch=True)
    assert "this is 9.9" in caplog.text


def test_settings(monkeypatch):
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"num_threads": 3, "validate": false}')
    assert settings({"num_threads": 2}) == Settings(num_threads=2, validate=False)
    for given, message in (
        ({"speed": 1}, "got 'speed'"),
        ({"validate": 1}, "validate of type bool, got 1"),
        ([], None),
        ([1], "an object"),
    ):
        if message is None:
            assert settings(given).num_threads == 3
            continue
        with pytest.raises(ValueError, match=message):
            settings(given)
    for text, message in (("{", "expected a JSON object"), ("[]", "expected an object"), ('{"on_device": "if possible"}', "on_device")):
        monkeypatch.setenv("IMBREX_ENGINE_CONFIG", text)
        with pytest.raises(ValueError, match=message):
            settings()


def test_the_page_lists_every_setting():
    text = (DOCS / "vllm.md").read_text()
    for field in fields(Settings):
        default = json.dumps(field.default)
        assert f"| `{field.name}` | " in text and any(f"| {d} |" in text for d in (default, f"`{default}`"))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_may_use_the_cores_of_the_others():
    cores, seen = os.sched_getaffinity(0), {}

    def bound():
        os.sched_setaffinity(0, {min(cores)})
        with all_cores():
            seen["inside"] = os.sched_getaffinity(0)
        seen["after"] = os.sched_getaffinity(0)

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert seen == {"inside": cores, "after": {min(cores)}}
