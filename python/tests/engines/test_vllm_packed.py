"""imbrex.vllm with packed pages: where the backend that runs plain rows reads amx_packed, vLLM's pages hold that."""

import pytest

torch = pytest.importorskip("torch")
import imbrex  # noqa: E402
from imbrex import _amx_packed  # noqa: E402
from vllm_runner import Runner, serve  # noqa: E402

SLOPES = [2.0 ** -(i + 1) for i in range(8)]
SINKS = torch.linspace(-1, 2, 8)
WINDOWS = [{"per_layer_sliding_window": 20}, {}]


@pytest.fixture(autouse=True)
def tiles(vllm_on_cpu, monkeypatch):
    if "cpu_amx" != imbrex.select(imbrex.AttentionSpec(32, 8, 128), "cpu").backend:
        monkeypatch.setenv("IMBREX_CPU_ISA", "amx_emulated")
    try:
        chosen = imbrex.select(imbrex.AttentionSpec(32, 8, 128), "cpu").backend
    except imbrex.Error as error:
        pytest.skip(f"no tiles and no AVX-512 to emulate them: {error}")
    if chosen != "cpu_amx":
        pytest.skip(f"no tiles: {chosen} is chosen")


def formats(runner):
    return {layer.impl.kv_format for layer in runner.layers}


@pytest.mark.parametrize(
    "model",
    [
        [{}, {}],
        [{"sinks": SINKS, "logits_soft_cap": 8.0, "per_layer_sliding_window": 24}, {"sinks": SINKS}],
        [{"head_size_v": 32}] * 2,
        [{"num_heads": 8, "num_kv_heads": 1}] * 2,
        [{"alibi_slopes": SLOPES}] * 2,
    ],
)
@pytest.mark.parametrize("block_size", [16, 48, 128])
def test_serving(model, block_size):
    runner = Runner("cpu", model, block_size=block_size)
    serve(runner)
    assert formats(runner) == {_amx_packed.FORMAT}


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 0.5), ([0.5, 0.1], [0.3, 2.0])])
@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2"])
def test_fp8(kv_dtype, scales):
    runner = Runner("cpu", WINDOWS, kv_dtype=kv_dtype, scales=scales)
    serve(runner)
    assert formats(runner) == {_amx_packed.FORMAT}


@pytest.mark.parametrize("padding", [0, 64])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_layouts(layout, padding):
    """A head's block is packed where it is one piece of memory, and plain rows elsewhere."""
    runner = Runner("cpu", [{}, {}], layout=layout, padding=padding)
    serve(runner)
    assert formats(runner) == {_amx_packed.FORMAT if layout.endswith("HNC") or layout in ("LHBNC", "BHLNC") else "strided"}


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 1, "num_blocks": 500},
        {"block_size": 24},
        {"dtype": torch.float16},
        {"dtype": torch.float32},
        {"heads": (8, 2, 80)},
        {"settings": {"backend": "cpu_avx512"}},
    ],
)
def test_plain_rows_where_nothing_is_packed(options):
    runner = Runner("cpu", [{}, {}], **options)
    serve(runner)
    assert formats(runner) == {"strided"}


def test_without_a_layout_rows_are_plain(monkeypatch):
    from imbrex.vllm.metadata import Builder

    runner = Runner("cpu", [{}, {}])
    group = runner.groups[0]
    runner.config.cache_config.kv_cache_layout = None
    Builder(group.spec, group.names, runner.config, runner.device)
    assert formats(runner) == {"strided"}


def test_layers_that_share_their_cache():
    runner = Runner("cpu", [{}, {"kv_sharing_target_layer_name": "layers.0"}])
    serve(runner)
    assert formats(runner) == {_amx_packed.FORMAT}


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_slots_that_no_plan_has(kv_dtype, block_size):
    """What PyTorch scatters is byte for byte what write_kv() writes."""
    from vllm.forward_context import set_forward_context

    runner = Runner("cpu", [{}, {}], kv_dtype=kv_dtype, scales=(0.5, 0.25), block_size=block_size)
    a = runner.request("a", 100)
    layer = runner.layers[0]
    layer.kv_cache.view(torch.uint8).zero_()
    runner.step([(a, 90)])
    table = runner.groups[0].tables["a"]
    slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(90)] + [-1, -1])
    k, v = (torch.cat([x[:90], torch.full_like(x[:2], float("nan"))]) for x in (a.keys[0], a.values[0]))
    before = layer.kv_cache.view(torch.uint8)[table].clone()
    assert before.any()
    layer.kv_cache.view(torch.uint8).zero_()
    with set_forward_context(None, runner.config):
        layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
    assert torch.equal(before, layer.kv_cache.view(torch.uint8)[table])


def test_pages_in_pieces_are_refused():
    runner = Runner("cpu", [{}, {}])
    layer = runner.layers[0]
    pages = layer.kv_cache
    layer.bind_kv_cache(pages.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3))
    with pytest.raises(NotImplementedError, match="expected pages whose last two dimensions are one piece of memory for amx_packed"):
        runner.step([(runner.request("a", 20), 20)])


def halves_the_other_way(runner):
    impl = runner.layers[0].impl
    right = impl.kv_of
    impl.kv_of = lambda layer, cache: imbrex.KvLayer(*right(layer, cache)[1::-1])


def one_memory(runner):
    runner.layers[1].bind_kv_cache(runner.layers[0].kv_cache)


@pytest.mark.parametrize("wrong", [halves_the_other_way, one_memory])
def test_a_wrong_layout_is_found(wrong):
    runner = Runner("cpu", [{}, {}])
    wrong(runner)
    with pytest.raises(imbrex.Error, match="layers.0: expected") as caught:
        runner.step([(runner.request("a", 20), 20)])
    assert caught.value.code == "python.engine_cache"


def test_the_check_leaves_pages_as_they_were():
    runner = Runner("cpu", WINDOWS, kv_dtype="fp8_e4m3", scales=(0.01, 30.0))
    before = [x.kv_cache.clone() for x in runner.layers]
    for builder in runner.builders:
        builder._self_check()
        assert builder._checked
    assert all(torch.equal(a, x.kv_cache) for a, x in zip(before, runner.layers))
