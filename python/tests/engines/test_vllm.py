"""imbrex.vllm against a stand-in of vLLM: a served model, layouts, slots, graphs, the check of a cache's layout."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
import imbrex  # noqa: E402
from vllm_runner import Runner, first_step, serve  # noqa: E402

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


PLAIN = [{}, {}]
SLOPES = [2.0 ** -(i + 1) for i in range(8)]
SINKS = torch.linspace(-1, 2, 8)
MODELS = {
    "plain": PLAIN,
    "scale": [{"scale": 0.2}, {}],
    "soft cap": [{"logits_soft_cap": 5.0}] * 2,
    "sinks": [{"sinks": SINKS}, {"sinks": SINKS.flip(0).bfloat16()}],
    "alibi": [{"alibi_slopes": SLOPES}] * 2,
    "alibi by square roots": [{"alibi_slopes": SLOPES, "use_alibi_sqrt": True}] * 2,
    "chunks": [{"per_layer_sliding_window": 32, "chunk_lookback": 1}, {"per_layer_sliding_window": 24, "chunk_lookback": 2}],
    "local chunks": [{"attention_chunk_size": 32}, {}],
    "windows": [{"per_layer_sliding_window": 20}, {}],
    "window of one": [{"per_layer_sliding_window": 1}, {"per_layer_sliding_window": 33}],
    "all together": [{"per_layer_sliding_window": 24, "sinks": SINKS, "logits_soft_cap": 8.0}, {"sinks": SINKS}],
    "values of their own dim": [{"head_size_v": 32}] * 2,
    "heads": [{"num_heads": 4, "num_kv_heads": 4}, {"num_heads": 8, "num_kv_heads": 1}],
}


def on(device, model):
    return [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()} for options in model]


@pytest.mark.parametrize("name", MODELS)
def test_serving(device, name):
    serve(Runner(device, on(device, MODELS[name])))


def test_local_chunks_of_many_requests_at_their_ends(device):
    runner = Runner(device, [{"attention_chunk_size": 32}])
    requests = [runner.request(str(number), 40) for number in range(8)]
    for request in requests:
        runner.step([(request, 31)])
    runner.step([(request, 2) for request in requests])  # a request for vLLM's builder on each side of the chunk's end
    runner.step([(request, 1) for request in requests])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_types_of_models(device, dtype):
    serve(Runner(device, on(device, MODELS["all together"]), dtype=dtype))


@pytest.mark.parametrize(
    "kv_dtype, scales", [("fp8", (1.0, 1.0)), ("fp8_e4m3", (0.25, 0.5)), ("fp8_e5m2", (0.5, 2.0)), ("fp8", ([0.5, 0.1], [0.3, 2.0]))]
)
def test_fp8_pages_with_scales(device, kv_dtype, scales):
    serve(Runner(device, on(device, MODELS["windows"]), kv_dtype=kv_dtype, scales=scales))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_layout(device, layout):
    serve(Runner(device, PLAIN, layout=layout))


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_padded_pages(device, layout):
    serve(Runner(device, PLAIN, layout=layout, padding=64))


@pytest.mark.parametrize("block_size", [1, 32, 48])
def test_block_sizes(device, block_size):
    serve(Runner(device, PLAIN, block_size=block_size, num_blocks=500 if block_size == 1 else 24))


def test_layers_of_different_windows_in_one_group(device):
    runner = Runner(device, MODELS["windows"], one_group=True)
    assert len(runner.groups) == 1 and len(runner.builders[0].plans) == 2
    serve(runner)


def test_layers_that_are_named_behind_the_first(device):
    """As vLLM's proposers do with those of a draft, in the list that the builder was given."""
    runner = Runner(device, MODELS["windows"], one_group=True)
    group = runner.groups[0]
    names = group.names[:1]
    runner.builders[0] = type(runner.builders[0])(group.spec, names, runner.config, runner.device)
    assert len(runner.builders[0].plans) == 1
    names += group.names[1:]
    serve(runner)
    assert len(runner.builders[0].plans) == 2


def test_layers_that_share_their_cache(device):
    serve(Runner(device, [{}, {"kv_sharing_target_layer_name": "layers.0"}]))


def test_encoders(device, vllm):
    from vllm.model_executor.layers.attention import encoder_only_backend

    import imbrex.vllm

    imbrex.vllm.register()
    from imbrex.vllm.backend import Backend, CpuBackend

    wrapped = encoder_only_backend(CpuBackend if device == "cpu" else Backend)
    model = [
        dict(attn_type="encoder_only", attn_backend=wrapped),
        dict(attn_type="encoder_only", attn_backend=wrapped, per_layer_sliding_window=7),
    ]
    runner = Runner(device, model)
    runner.step([(runner.request("a", 40), 40), (runner.request("b", 9), 9)], pad_tokens=3, pad_reqs=1)
    runner.step([(runner.request("c", 64), 64)])


def test_what_the_classes_say(vllm):
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.kv_cache_layout import KVCacheLayout

    import imbrex.vllm

    imbrex.vllm.register()
    from imbrex.vllm.backend import Backend, CpuBackend

    assert (Backend.get_name(), CpuBackend.get_name()) == ("CUSTOM", "CPU_ATTN")
    assert Backend.forward_includes_kv_cache_update is False and callable(Backend.get_impl_cls().do_kv_cache_update)
    assert set(Backend.supported_kv_cache_layouts()) == set(KVCacheLayout) and Backend.supported_kv_cache_layouts()[0] is KVCacheLayout.LBHNC
    assert Backend.get_impl_cls().lse_base_on_e is True and not Backend.supports_dcp() and not Backend.supports_pcp()
    from vllm.config import AttentionConfig, ModelConfig, VllmConfig

    support = Backend.get_builder_cls().get_cudagraph_support
    assert support(VllmConfig(), None) is AttentionCGSupport.ALWAYS
    assert support(VllmConfig(ModelConfig(is_mm_prefix_lm=True)), None) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert support(VllmConfig(attention_config=AttentionConfig(use_non_causal=True)), None) is AttentionCGSupport.NEVER


@pytest.mark.parametrize("forward", [True, False])
def test_slots_that_no_plan_has(plain_rows, device, forward):
    """As a draft model brings them, one of blocks (DFlash) also outside of its forward; what has slot -1 is not kept."""
    for kv_dtype in ("auto", "fp8_e4m3", "fp8_e5m2"):
        runner = Runner(device, PLAIN, kv_dtype=kv_dtype, scales=(0.5, 0.25))
        a = runner.request("a", 40)
        runner.step([(a, 30)])
        layer, table = runner.layers[0], runner.groups[0].tables["a"]
        slots = torch.tensor([table[p // 16] * 16 + p % 16 for p in range(30)] + [-1, -1], device=device)
        k, v = (torch.cat([x[:30], torch.full_like(x[:2], float("nan"))]) for x in (a.keys[0], a.values[0]))
        before = layer.kv_cache.clone()
        layer.kv_cache[table] = 0
        from vllm.forward_context import set_forward_context

        with set_forward_context(None, runner.config) if forward else nullcontext():
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
        written = [b.contiguous().view(torch.uint8)[table[:1]] for b in (before, layer.kv_cache)]
        assert torch.equal(*written)
        last = [b[table[1]][:, :14].contiguous().view(torch.uint8) for b in (before, layer.kv_cache)]
        assert torch.equal(*last)
        assert (layer.kv_cache[0][:, 0].contiguous().view(torch.uint8) == 0).all()  # of the null block, which may be read in place of others


@on_gpu
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("settings", [{}, {"on_device": "always"}])
@pytest.mark.parametrize("name", ["plain", "all together"])
def test_graphs(vllm, name, settings, mode):
    runner = Runner("cuda", on("cuda", MODELS[name]), settings=settings, cudagraph_mode=mode)
    runner.capture(8)
    serve(runner)


def test_steps_with_a_token_each_have_plans_of_their_own_where_decode_has_graphs_of_its_own(device):
    from vllm.config import SpeculativeConfig

    runner = Runner(device, PLAIN, cudagraph_mode="FULL_AND_PIECEWISE")
    builder = runner.builders[0]
    (key, decode), whole = next(iter(builder.decode_plans.items())), builder.plans
    assert decode is not whole[key]
    with pytest.raises(imbrex.Error, match="at most 1 query token"):
        starts, lengths, table = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [2], [[0]]))
        decode.update(starts, lengths, block_table=table, slot_mapping=torch.zeros(2, dtype=torch.int64))
    a, b = runner.request("a", 40), runner.request("b", 40)
    for scheduled, plans in [([(a, 9)], whole), ([(a, 1), (b, 3)], whole), ([(a, 1), (b, 1)], builder.decode_plans), ([(b, 2)], whole)]:
        lengths = [r.computed + n for r, n in scheduled]
        for index in range(len(runner.groups)):
            runner._place(index, [r for r, _ in scheduled], [n for _, n in scheduled], sum(n for _, n in scheduled))
        metadata, _ = runner._metadata([n for _, n in scheduled], lengths, sum(n for _, n in scheduled), len(scheduled))
        assert metadata[runner.groups[0].names[0]].plans is plans
        runner.step(scheduled)
    for other in ({"cudagraph_mode": "FULL"}, {"cudagraph_mode": "FULL_AND_PIECEWISE", "speculative": SpeculativeConfig()}):
        builder = Runner(device, PLAIN, **other).builders[0]
        assert builder.decode_plans is builder.plans


@on_gpu
def test_lengths_of_the_gpu_where_the_hosts_are_not_exact(vllm):
    """The stand-in's upper bounds are wrong with speculative decoding, so only lengths on the GPU give the right numbers."""
    from vllm.config import SpeculativeConfig

    runner = Runner("cuda", PLAIN, speculative=SpeculativeConfig())
    assert runner.builders[0].on_device and runner.builders[0].supports_draft_decode_metadata_update
    serve(runner)


@pytest.mark.parametrize("name", ["plain", "sinks", "windows"])
def test_drafts_are_planned_in_place(device, name):
    from vllm.config import SpeculativeConfig

    runner = Runner(device, on(device, MODELS[name]), speculative=SpeculativeConfig())
    a, b = runner.request("a", 60), runner.request("b", 60)
    runner.step([(a, 10), (b, 29)])
    runner.draft([a, b], 5)
    runner.step([(a, 3), (b, 1)])
    runner.draft([b, a], 3)


def test_never_on_device_is_refused_where_lengths_are_not_exact(vllm, monkeypatch):
    from vllm.config import SpeculativeConfig

    runner = Runner("cpu", PLAIN, speculative=SpeculativeConfig(), settings={"on_device": "never"})
    assert not runner.builders[0].on_device  # a CPU has them
    serve(runner)
    from imbrex.vllm import builders, metadata

    monkeypatch.setattr(builders, "device_text", lambda device: "cuda:0")
    with pytest.raises(ValueError, match='on_device "auto" or "always"'):
        metadata.Builder(runner.groups[0].spec, runner.groups[0].names, runner.config, torch.device("cpu"))


# The self check.


def test_the_check_leaves_pages_as_they_were(device):
    runner = Runner(device, MODELS["windows"], kv_dtype="fp8_e4m3", scales=(0.01, 30.0))
    before = [x.kv_cache.clone() for x in runner.layers]
    for builder in runner.builders:
        builder._self_check()
        assert builder._checked
    assert all(torch.equal(a, x.kv_cache) for a, x in zip(before, runner.layers))


def test_the_check_waits_for_pages(device):
    runner = Runner(device, PLAIN, bind=False)
    runner.builders[0]._self_check()
    assert not runner.builders[0]._checked


def swapped(runner):
    for layer in runner.layers:
        layer.bind_kv_cache(layer.kv_cache.transpose(1, 2))


def other_block_size(runner):
    for layer in runner.layers:
        layer.bind_kv_cache(layer.kv_cache.reshape(runner.num_blocks * 2, 2, 8, 128))


def key_and_value_apart(runner):
    for layer in runner.layers:
        layer.bind_kv_cache(torch.zeros(2, runner.num_blocks, 16, 2, 64, dtype=runner.dtype, device=runner.device))


@pytest.mark.parametrize("wrong", [swapped, other_block_size, key_and_value_apart])
def test_pages_of_another_shape(device, wrong):
    runner = Runner(device, PLAIN)
    wrong(runner)
    with pytest.raises(NotImplementedError, match=r"expected pages \[num_blocks, 2, 16, 128\] of layers.0, got "):
        first_step(runner)


def one_memory(runner):
    runner.layers[1].bind_kv_cache(runner.layers[0].kv_cache)


def blocks_that_overlap(runner):
    cache = runner.layers[0].kv_cache
    runner.layers[0].bind_kv_cache(cache.as_strided(cache.shape, (cache.stride(0) // 2, *cache.stride()[1:])))


def halves_the_other_way(runner):
    impl = runner.layers[0].impl
    right = impl.kv_of
    impl.kv_of = lambda layer, cache: imbrex.KvLayer(*right(layer, cache)[1::-1])


def tokens_and_heads_mixed(runner):
    """The kernels' view has the right sizes, but strides of another order."""
    impl = runner.layers[0].impl
    right = impl.kv_of
    other = {}

    def view(layer, cache):
        if not other:
            for side, x in zip("kv", right(layer, cache)[:2]):
                b, n, h, d = x.shape
                other[side] = x.as_strided(x.shape, (x.stride(0), x.stride(2) // 8, x.stride(1) * 8, 1))
        return imbrex.KvLayer(other["k"], other["v"])

    impl.kv_of = view


@pytest.mark.parametrize("wrong", [one_memory, blocks_that_overlap, halves_the_other_way, tokens_and_heads_mixed])
def test_a_wrong_layout_is_found(plain_rows, device, wrong):
    runner = Runner(device, PLAIN)
    wrong(runner)
    with pytest.raises(imbrex.Error, match="layers.0: expected") as caught:
        first_step(runner)
    assert caught.value.code == "python.engine_cache"


def test_the_check_can_be_left_out(device):
    runner = Runner(device, PLAIN, settings={"self_check": False})
    one_memory(runner)
    a = runner.request("a", 20)
    runner.step([(a, 19)])
    with pytest.raises(AssertionError, match="off by"):
        runner.step([(a, 1)])
