"""python -m imbrex.bench: what it runs, what it refuses to time, and what it says."""
import argparse
import json
import re
import shlex
import sys

import pytest

torch = pytest.importorskip("torch")

from imbrex import bench  # noqa: E402
from snippets import DOCS  # noqa: E402

SMALL = ["--heads", "4/2", "--head-dim", "32", "--rounds", "1", "--seconds", "0.001"]


def test_batches():
    assert bench.parse_batch("q2k") == [(2048, 2048)]
    assert bench.parse_batch("2q4s1k,q1s7_3q2") == [(4, 1024)] * 2 + [(1, 7)] + [(2, 2)] * 3
    for wrong in ("", "2", "q", "q0", "q5s4", "0q1", "q1s", "q1m"):
        with pytest.raises(ValueError, match="expected"):
            bench.parse_batch(wrong)


def test_on_the_cpu(tmp_path, capsys):
    assert bench.main(["q24", "3q1s40,2q5s17", *SMALL, "--device", "cpu", "--block-size", "8", "--json", str(tmp_path / "b.json")]) == 0
    rows = {(r["batch"], r["name"]): r for r in json.loads((tmp_path / "b.json").read_text())["rows"]}
    assert rows["q24", "imbrex"]["us"] > 0 and rows["q24", "imbrex"]["ratio"] == 1 and rows["q24", "imbrex"]["error"] < 2e-2
    assert rows["q24", "sdpa-flash"]["us"] > 0
    assert rows["3q1s40,2q5s17", "imbrex"]["us"] > 0
    assert rows["3q1s40,2q5s17", "sdpa-flash"]["why"] == "requests of different lengths"
    assert "time/imbrex" in capsys.readouterr().out


def test_who_is_wrong_is_not_timed(monkeypatch, capsys):
    def off(problem):
        right = bench.imbrex_calls(problem)
        return bench.Contender(right.calls, lambda out: out + 0.5)

    def refuses(problem):
        raise RuntimeError("no kernel\nand more")

    def absent(problem):
        raise ImportError

    peers = dict(imbrex=bench.imbrex_calls, off=off, refuses=refuses, absent=absent)
    monkeypatch.setattr(bench, "contenders", lambda device: peers)
    assert bench.main(["q8", *SMALL, "--device", "cpu"]) == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert "wrong: off by 0.5" in lines["off"] and lines["refuses"].endswith("no kernel") and lines["absent"].endswith("not installed")
    monkeypatch.setattr(bench, "contenders", lambda device: dict(imbrex=off))
    assert bench.main(["q8", *SMALL, "--device", "cpu"]) == 1


def test_usage():
    for wrong in (
        ["q0"],
        ["q8", "--heads", "8"],
        ["q8", "--dtype", "int8"],
        ["q8", "--block-size", "0"],
        ["q8", "--heads", "3/2"],
        ["q8", "--head-dim", "20"],
    ):
        with pytest.raises(SystemExit) as ended:
            bench.main(wrong)
        assert ended.value.code == 2


def test_the_commands_of_the_page_are_commands():
    lines = re.findall(r"^python -m imbrex[.]bench (.*)$", (DOCS / "python.md").read_text(), flags=re.M)
    assert len(lines) >= 2
    for line in lines:
        assert bench.arguments(shlex.split(line)).batch


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(capsys):
    assert bench.main(["q256", "4q1s512", "2q64s300", "--rounds", "1", "--seconds", "0.01", "--device", "cuda"]) == 0
    out = capsys.readouterr().out
    assert out.count("imbrex  ") >= 3 and "sdpa-cudnn" in out


class _Interface:
    """flash_attn_interface (flash-attn 3) on imbrex: what the benchmark calls of it."""

    @staticmethod
    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, causal):
        from imbrex import flash_attn

        starts = torch.nn.functional.pad(cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        longest = int(cache_seqlens.max())
        return flash_attn.flash_attn_varlen_func(
            q, k_cache, v_cache, cu_seqlens_q, starts, max_seqlen_q, longest, causal=causal, block_table=page_table
        )


@pytest.mark.parametrize("text", ["3q1s300", "2q40s300,q7", "q64"])
@pytest.mark.parametrize("peer", ["flash_attn_calls", "flash_attn_3_calls", "flashinfer_calls"])
def test_peers_are_called_as_their_interfaces_are(text, peer, monkeypatch):
    """The packages themselves need a GPU: imbrex's modules of the same signatures stand in for them."""
    import imbrex.flash_attn
    import imbrex.flashinfer

    monkeypatch.setitem(sys.modules, "flash_attn", imbrex.flash_attn)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", _Interface)
    monkeypatch.setitem(sys.modules, "flashinfer", imbrex.flashinfer)
    args = argparse.Namespace(heads=[4, 2], head_dim=32, dtype="f32", block_size=256, device="cpu", seed=3)
    problem = bench.Problem(bench.parse_batch(text), args)
    contender = getattr(bench, peer)(problem)
    assert problem.check(contender.rows(contender.calls[0]())) < 1e-4
    if peer == "flash_attn_calls":
        args.block_size = 16
        with pytest.raises(bench.NotHere, match="256"):
            bench.flash_attn_calls(bench.Problem(bench.parse_batch(text), args))
