"""A few of the cases of fuzz_surfaces.py, without a sanitizer; CI runs many more with one. And what the script itself must see."""

import pytest

import fuzz_surfaces


def test_wrong_arguments_of_numpy_arrays():
    assert fuzz_surfaces.main(["--cases", "60"]) == 0


def test_wrong_arguments_of_tensors():
    pytest.importorskip("torch")
    assert fuzz_surfaces.main(["--of", "torch", "--cases", "72"]) == 0


CRASHING = """
import os
import numpy as np
from fuzz_numpy import Surface

def crash(rng):
    def call(a):
        if a["n"] != 5:
            os.abort()
        return []
    return Surface(dict(n=5), call)

def differ(rng):
    calls = []
    def call(a):
        calls.append(a)
        return [np.array(len(calls))]
    return Surface(dict(n=5), call)

def fine(rng):
    return Surface(dict(n=5), lambda a: [])

SURFACES = [("fine", fine), ("crash", crash), ("differ", differ), ("fine", fine)]
"""


def test_a_crash_and_other_bits_are_failures(tmp_path, monkeypatch, capsys):
    (tmp_path / "fuzz_crashing.py").write_text(CRASHING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert fuzz_surfaces.main(["--of", "crashing", "--cases", "8"]) == 1
    said = capsys.readouterr().out
    assert "FAILED case 1 ended the process" in said and "FAILED case 5 ended the process" in said
    assert "FAILED case 2, differ" in said and "FAILED case 6, differ" in said
    assert "4 failed" in said
