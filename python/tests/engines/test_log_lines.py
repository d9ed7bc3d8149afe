"""The line in an engine's log that says what runs: once a process for each kind of layer, after the self check."""

import logging

import pytest

torch = pytest.importorskip("torch")
import sglang_runner  # noqa: E402
import vllm_runner  # noqa: E402

KINDS = [{"sliding_window_size": 19}, {"sliding_window_size": 19}, {}]


@pytest.fixture
def lines(monkeypatch, caplog):
    """A function: what an engine was told at level INFO, and by which logger."""
    monkeypatch.setattr("imbrex.engines._announced", set())
    caplog.set_level(logging.INFO)
    return lambda: [(r.name, r.getMessage()) for r in caplog.records if r.getMessage().startswith("imbrex")]


def step(runner):
    runner.step([(runner.request("a", 20), 20)])


def test_vllm(vllm_on_cpu, lines):
    for _ in range(2):  # the second engine of a process has nothing new to say
        runner = vllm_runner.Runner("cpu", [{"per_layer_sliding_window": 20}, {}, {}], one_group=True, settings={"backend": "cpu_generic"})
        assert len(lines()) in (0, 2)  # not before the check
        step(runner)
        step_lines = lines()
    assert [name for name, _ in step_lines] == ["vllm.imbrex"] * 2
    window, full = (text for _, text in step_lines)
    assert (
        ": cpu_generic (" in window
        and " runs 1 layer from layers.0 on, in place of CPU_ATTN: decoder q8/kv2 d64 bf16 block16 causal window_left=19" in window
    )
    assert " runs 2 layers from layers.1 on, in place of CPU_ATTN: decoder q8/kv2 d64 bf16 block16 causal scale" in full
    assert all("; self check passed. Kernels: " in text for text in (window, full))


def test_vllm_without_the_check(vllm_on_cpu, lines):
    step(vllm_runner.Runner("cpu", [{}], settings={"self_check": False}))
    ((_, text),) = lines()
    assert "; self check left out. Kernels: " in text


def test_vllm_says_nothing_where_the_check_fails(plain_rows, vllm_on_cpu, lines):
    runner = vllm_runner.Runner("cpu", [{}])
    for layer in runner.layers:
        layer.bind_kv_cache(layer.kv_cache.flip(0).transpose(1, 2).contiguous().transpose(1, 2)[:, :, :, torch.randperm(128)])
        layer.impl.write_pages = lambda *a: None
    with pytest.raises(Exception, match="expected to find"):
        step(runner)
    assert lines() == []


@pytest.mark.parametrize("page_size", [1, 16])
def test_sglang(sglang, lines, page_size):
    for _ in range(2):
        runner = sglang_runner.Runner("cpu", KINDS, page_size=page_size)
        step(runner)
    assert [name for name, _ in lines()] == ["imbrex"] * 2
    window, full = (text for _, text in lines())
    assert f" runs layers like layer 0: decoder q8/kv2 d64 bf16 block{page_size} causal window_left=19" in window
    assert f" runs layers like layer 2: decoder q8/kv2 d64 bf16 block{page_size} causal scale" in full
    assert all("; self check passed. Kernels: " in text for text in (window, full))


def test_sglang_without_the_check(sglang, lines, monkeypatch):
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"self_check": false}')
    step(sglang_runner.Runner("cpu", [{}]))
    ((_, text),) = lines()
    assert "; self check left out. Kernels: " in text
