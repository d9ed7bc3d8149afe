"""Selection, errors, the pool, and what the package brings along."""
import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import imbrex


def test_select_explains():
    spec = imbrex.AttentionSpec(32, 8, 128)
    chosen = imbrex.select(spec)
    names = [name for name, _ in chosen.candidates]
    assert chosen.backend in names and dict(chosen.candidates)[chosen.backend] == []
    refused = dict(chosen.candidates)["cuda_sm90"]
    assert refused and refused[0].code and refused[0].wanted and refused[0].actual
    assert chosen.backend in imbrex.explain(spec) and chosen.rule
    assert imbrex.select(spec, "h200").backend == "cuda_sm90"
    assert imbrex.select(spec, "h200", forced="FLASHINFER").backend.startswith("cuda_")
    nothing = imbrex.select(imbrex.AttentionSpec(32, 8, 128, kv_format="amx_packed", block_size=32), "h200")
    assert nothing.backend is None and nothing.proposals
    assert [name for name, _ in imbrex.backends()] == names


def test_errors_have_codes():
    def code(call):
        with pytest.raises(imbrex.Error) as caught:
            call()
        assert str(caught.value)
        return caught.value.code

    spec = imbrex.AttentionSpec(8, 2, 64, q_dtype="f32")
    plan = imbrex.Plan(spec)
    i32 = np.int32
    table = np.zeros((1, 1), i32)
    assert code(lambda: imbrex.AttentionSpec(8, 3, 64)).startswith("spec.")
    assert code(lambda: imbrex.AttentionSpec(8, 2, 64, q_dtype="f128")) == "dtype.unknown"
    assert code(lambda: imbrex.AttentionSpec(8, 2, 64, kind="poodle")) == "python.name"
    assert code(lambda: imbrex.Device("abacus")) == "device.unknown"
    assert code(lambda: imbrex.select(spec, forced="no_such")) == "select.forced"
    assert code(lambda: imbrex.Plan(imbrex.AttentionSpec(8, 2, 64), "h200")) == "backend.device_absent"
    assert code(lambda: plan.update(np.array([0, 3], i32), np.array([1], i32), block_table=table)) == "batch.seq_len.shorter_than_query"
    assert code(lambda: plan.update(np.array([0.0, 1.0]), np.array([1], i32))) == "python.tensor"
    assert code(lambda: plan.update(np.array([[0, 1]], i32), np.array([1], i32))) == "python.tensor"
    plan.update(np.array([0, 1], i32), np.array([1], i32), block_table=table)
    pages = np.zeros((1, 16, 2, 64), np.float32)
    q = np.zeros((1, 8, 64), np.float32)
    assert code(lambda: plan.run(q[:, :4], (pages, pages), np.empty_like(q))) == "run.q"
    assert code(lambda: plan.run(q.astype(np.complex64), (pages, pages), np.empty_like(q))) == "python.tensor"
    assert code(lambda: plan.run(q, (pages[:, :8], pages), np.empty_like(q))).startswith("kv_cache.")
    with pytest.raises(TypeError):
        plan.run(None, (pages, pages), np.empty_like(q))
    assert plan.run(q, (pages, pages)).shape == (1, 8, 64)


def test_hashes_belong_to_a_process_or_to_a_key():
    key = bytes(range(16))
    assert imbrex.hash_block(0x0706050403020100, [0x0F0E0D0C0B0A0908], key=key) == 0x3F2ACC7F57C29BDB  # SipHash-2-4's own vector
    assert imbrex.hash_block(0, [1, 2], key=key) != imbrex.hash_block(0, [1, 2], key=bytes(16))
    assert imbrex.hash_block(0, [1, 2]) == imbrex.hash_block(0, [1, 2]) != imbrex.hash_block(0, [1, 2], key=key)
    with pytest.raises(imbrex.Error, match="16 bytes, got 15"):
        imbrex.hash_block(0, [1], key=key[:15])
    text = f"import imbrex\nprint(imbrex.hash_block(0, [1, 2]), imbrex.hash_block(0, [1, 2], key={key!r}))"
    mine, keyed = imbrex.hash_block(0, [1, 2]), imbrex.hash_block(0, [1, 2], key=key)
    others = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=Path(imbrex.__file__).parents[1], check=True).stdout.split()
        for _ in range(2)
    ]
    assert [int(keyed_too) for _, keyed_too in others] == [keyed, keyed]
    assert len({mine, *(int(own) for own, _ in others)}) == 3  # nobody outside can make them


def test_pool():
    pool = imbrex.BlockPool(3)
    blocks = pool.allocate(2)
    assert len(blocks) == 2 and pool.num_free == 1 and pool.allocate(2) is None
    first = imbrex.hash_block(0, [1, 2, 3])
    pool.publish(blocks[0], first)
    assert pool.lookup([first, imbrex.hash_block(first, [4])]) == [blocks[0]] and pool.ref_count(blocks[0]) == 2
    assert pool.make_writable(blocks[0]) not in (None, blocks[0])
    pool.release(blocks)
    with pytest.raises(imbrex.Error):
        pool.release([blocks[0]] * 2)


def test_spec_says_what_it_is():
    spec = imbrex.AttentionSpec(32, 8, 128, kv_dtype="float8_e4m3fn", window_left=127)
    assert (spec.num_q_heads, spec.head_dim_v, spec.kv_dtype) == (32, 128, "fp8_e4m3")
    assert spec == imbrex.AttentionSpec(32, 8, 128, kv_dtype="fp8_e4m3", window_left=127) != imbrex.AttentionSpec(32, 8, 128)
    assert spec.out_dtypes[0] == "bf16" and spec.kv_bytes_per_token == 8 * 256
    assert "window" in str(spec)


def test_program_and_stubs_are_there():
    ran = subprocess.run([sys.executable, "-m", "imbrex", "select", "--heads", "8/2"], capture_output=True, text=True, check=True)
    assert "cpu_" in ran.stdout
    import pathlib

    folder = pathlib.Path(imbrex.__file__).parent
    assert "class AttentionSpec" in (folder / "_core.pyi").read_text() and (folder / "py.typed").exists()
    for name in imbrex.__all__:
        assert getattr(imbrex, name).__doc__, name


def test_stubs_are_python():
    """What type checkers read: every public name of the extension, in a file that parses."""
    folder = Path(imbrex.__file__).parent
    names = {node.name for node in ast.parse((folder / "_core.pyi").read_text()).body if hasattr(node, "name")}
    missing = {n for n in dir(imbrex._core) if not n.startswith("_")} - names
    assert missing <= {"Error"} and (folder / "py.typed").exists(), missing
