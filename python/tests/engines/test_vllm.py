"""imbrex.vllm against a stand-in of vLLM: a served model, layouts, what is refused, versions, settings."""

import logging
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import imbrex  # noqa: E402
from vllm_runner import Runner, serve  # noqa: E402

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(autouse=True)
def cpu_attention(vllm, monkeypatch):
    """vLLM on a CPU takes CPU_ATTN, so there the plug-in is asked to stand in for it."""
    monkeypatch.setenv("IMBREX_VLLM_CPU_ATTN", "1")
    torch.manual_seed(11)


PLAIN = [{}, {}]
SLOPES = [2.0 ** -(i + 1) for i in range(8)]
SINKS = torch.linspace(-1, 2, 8)
MODELS = {
    "plain": PLAIN,
    "scale": [{"scale": 0.2}, {}],
    "soft cap": [{"logits_soft_cap": 5.0}] * 2,
    "sinks": [{"sinks": SINKS}, {"sinks": SINKS.flip(0).bfloat16()}],
    "alibi": [{"alibi_slopes": SLOPES}] * 2,
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
    assert Backend.get_builder_cls().get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS


def test_slots_that_no_plan_has(device):
    """As a draft model brings them; what has slot -1 is not kept."""
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

        with set_forward_context(None, runner.config):
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
        written = [b.contiguous().view(torch.uint8)[table[:1]] for b in (before, layer.kv_cache)]
        assert torch.equal(*written)
        last = [b[table[1]][:, :14].contiguous().view(torch.uint8) for b in (before, layer.kv_cache)]
        assert torch.equal(*last)


@on_gpu
@pytest.mark.parametrize("settings", [{}, {"on_device": "always"}])
@pytest.mark.parametrize("name", ["plain", "all together"])
def test_graphs(vllm, name, settings):
    runner = Runner("cuda", on("cuda", MODELS[name]), settings=settings)
    runner.capture(8)
    serve(runner)


@on_gpu
def test_lengths_of_the_gpu_where_the_hosts_are_not_exact(vllm):
    """The stand-in's upper bounds are wrong with speculative decoding, so only lengths on the GPU give the right numbers."""
    from vllm.config import SpeculativeConfig

    runner = Runner("cuda", PLAIN, speculative=SpeculativeConfig())
    assert runner.builders[0].on_device and runner.builders[0].supports_draft_decode_metadata_update
    serve(runner)
    a = runner.request("draft", 30)
    runner.step([(a, 10)])
    for index in range(len(runner.groups)):
        runner._place(index, [a], [1], 1)
    metadata, slots = runner._metadata([1], [11], 1, 1)
    inputs = runner.inputs(1, [a], [1])
    runner.builders[0].update_draft_decode_metadata(next(iter(metadata.values())))
    out = runner.forward(runner.layers[0], *(x.reshape(1, -1) for x in inputs[0]), metadata, slots)
    runner._check(0, runner.layers[0], out.view(1, 8, 64), inputs[0][0], [(a, 1)])


def test_never_on_device_is_refused_where_lengths_are_not_exact(vllm, monkeypatch):
    from vllm.config import SpeculativeConfig

    runner = Runner("cpu", PLAIN, speculative=SpeculativeConfig(), settings={"on_device": "never"})
    assert not runner.builders[0].on_device  # a CPU has them
    serve(runner)
    import imbrex.vllm.metadata as metadata

    monkeypatch.setattr(metadata, "device_text", lambda device: "cuda:0")
    with pytest.raises(ValueError, match='on_device "auto" or "always"'):
        metadata.Builder(runner.groups[0].spec, runner.groups[0].names, runner.config, torch.device("cpu"))


# The self check.


def first_step(runner):
    runner.step([(runner.request("a", 20), 20)])


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
def test_a_wrong_layout_is_found(device, wrong):
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


# Refusals.


def choose(**changes):
    """The reasons that vLLM would print."""
    import imbrex.vllm

    imbrex.vllm.register()
    from imbrex.vllm.backend import Backend

    given = dict(
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=16,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=None,
        attn_type="decoder",
    )
    return Backend.validate_configuration(**{**given, **changes})


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(use_mla=True), "MLA not supported"),
        (dict(use_sparse=True), "sparse not supported"),
        (dict(use_mm_prefix=True), "partial multimodal"),
        (dict(attn_type="encoder_decoder"), "attention type encoder_decoder not supported"),
        (dict(kv_cache_dtype="nvfp4"), "kv_cache_dtype not supported"),
        (dict(dtype=torch.float64), "dtype not supported"),
        (dict(use_non_causal=True), "non-causal attention not supported"),
        (dict(use_batch_invariant=True), "batch invariance not supported"),
        (dict(use_dcp=True), "DCP not supported"),
        (dict(use_pcp=True), "PCP not supported"),
        (dict(use_rswa=True), "R-SWA not supported"),
        (dict(head_size=20), r"imbrex: .*head_dim_qk"),
        (dict(head_size=640), r"imbrex: .*head_dim_qk"),
    ],
)
def test_reasons(vllm, changes, reason):
    assert any(re.search(reason, text) for text in choose(**changes)), choose(**changes)


def test_reasons_of_the_selection(vllm, monkeypatch):
    assert choose() == [] and choose(has_sink=True, has_sliding_window=True, kv_cache_dtype="fp8", block_size=None) == []
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"backend": "no_such"}')
    assert any(text.startswith("imbrex: select.forced: ") for text in choose())


def test_a_gpu_is_described_by_its_capability(vllm, monkeypatch):
    from vllm.platforms import DeviceCapability, current_platform

    current_platform.kind = "cuda"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert choose(device_capability=DeviceCapability(9, 0)) == [] == choose(device_capability=DeviceCapability(8, 0))
    large = dict(dtype=torch.float32, head_size=512)
    assert choose(device_capability=DeviceCapability(9, 0), **large) == []
    reasons = choose(device_capability=DeviceCapability(8, 9), **large)
    assert {text.split(":")[0] for text in reasons} == {"imbrex cuda_sm90", "imbrex cuda_sm80"}
    assert any(text.startswith("imbrex cuda_sm80: spec.head_dim_qk: wanted ") and text.endswith("got 512") for text in reasons)
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"backend": "cuda_sm90"}')
    assert choose(device_capability=DeviceCapability(9, 0)) == []
    assert "device.sm: wanted 90, got 80" in choose(device_capability=DeviceCapability(8, 0))[0]


def test_the_engine_shows_the_reasons(vllm):
    import vllm.platforms

    vllm.platforms.current_platform.kind = "cuda"
    with pytest.raises(ValueError, match=r"imbrex: .*head_dim_qk"):
        Runner("cuda", [{"head_size": 20, "scale": 1.0}])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(attn_type="encoder_decoder"), "encoder_decoder"),
        (dict(chunk_lookback=2), "expected no chunk_lookback, got 2"),
        (dict(use_alibi_sqrt=True), "use_alibi_sqrt"),
    ],
)
def test_layers_that_are_refused(vllm, options, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        Runner("cpu", [options])


def test_caches_that_are_refused(vllm):
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec

    runner = Runner("cpu", PLAIN)
    builder = type(runner.builders[0])
    fields = (16, 2, 64, torch.bfloat16)

    def message(spec, config=runner.config):
        with pytest.raises(NotImplementedError) as caught:
            builder(spec, runner.groups[0].names, config, torch.device("cpu"))
        return str(caught.value)

    assert "got ChunkedLocalAttentionSpec" in message(ChunkedLocalAttentionSpec(*fields, attention_chunk_size=64))
    assert "attention_chunk_size None, got 64" in message(FullAttentionSpec(*fields, attention_chunk_size=64))
    assert "num_head_slots None, got 1" in message(FullAttentionSpec(*fields, num_head_slots=1))
    assert "tokens_per_state 1, got 4" in message(FullAttentionSpec(*fields, tokens_per_state=4))
    spec = runner.groups[0].spec
    runner.config.kv_transfer_config = object()
    assert "KV connector" in message(spec)
    runner.config.kv_transfer_config = None
    runner.config.parallel_config.decode_context_parallel_size = 2
    assert "decode_context_parallel_size 1, got 2" in message(spec)
    runner.config.parallel_config.decode_context_parallel_size = 1
    runner.config.parallel_config.use_ubatching = True
    assert "dual batch overlap" in message(spec)
    runner.config.parallel_config.use_ubatching = False
    runner.config.cache_config.kv_sharing_fast_prefill = True
    assert "kv_sharing_fast_prefill" in message(spec)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(causal=False), "causal=False"),
        (dict(causal=torch.ones(1, dtype=torch.bool)), "expected causal"),
        (dict(mm_req_doc_ranges={}), "mm_req_doc_ranges"),
        (dict(rswa_prefix_lens=torch.zeros(1)), "rswa_prefix_lens"),
        (dict(dcp_local_seq_lens=torch.zeros(1)), "dcp_local_seq_lens"),
        (dict(encoder_seq_lens=torch.zeros(1)), "cross attention"),
        (dict(logits_indices_padded=torch.zeros(1)), "logits_indices_padded"),
    ],
)
def test_steps_that_are_refused(vllm, changes, message):
    runner = Runner("cpu", PLAIN)
    first_step(runner)
    cam = runner.common(0, [1], [1], 1, 1).replace(**changes)
    with pytest.raises(NotImplementedError, match=message):
        runner.builders[0].build(0, cam)


def test_quantised_outputs_are_refused(vllm):
    runner = Runner("cpu", PLAIN)
    layer, x = runner.layers[0], torch.zeros(1, 8, 64)
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.impl.forward(layer, x, None, None, layer.kv_cache, None, output=x, output_scale=torch.ones(1))


def test_quantised_queries_are_refused(vllm):
    runner = Runner("cpu", PLAIN)
    layer, x = runner.layers[0], torch.zeros(1, 8, 64)
    assert layer.impl.supports_quant_query_input is False
    with pytest.raises(NotImplementedError, match="expected queries of f32, bf16 or f16 in vLLM, got torch.float8_e4m3fn"):
        layer.impl.forward(layer, x.to(torch.float8_e4m3fn), None, None, layer.kv_cache, None, output=x)


def test_lengths_are_never_guessed(vllm, monkeypatch):
    runner = Runner("cpu", PLAIN)
    first_step(runner)
    cam = runner.common(0, [1], [1], 1, 1).replace(seq_lens_cpu_upper_bound=None)
    runner.builders[0].device_text = "cuda:0"
    with pytest.raises(ValueError, match="seq_lens_cpu_upper_bound"):
        runner.builders[0].build(0, cam)


# Registration, versions, settings.


def test_register_changes_nothing_that_was_not_asked_for(vllm, monkeypatch):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import imbrex.vllm

    monkeypatch.delenv("IMBREX_VLLM_CPU_ATTN")
    for _ in range(3):
        imbrex.vllm.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == "imbrex.vllm.backend.Backend"
    assert AttentionBackendEnum.CUSTOM.get_class().__name__ == "Backend"
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden() and not AttentionBackendEnum.FLASH_ATTN.is_overridden()
    monkeypatch.setenv("IMBREX_VLLM_CPU_ATTN", "1")
    imbrex.vllm.register()
    assert AttentionBackendEnum.CPU_ATTN.get_class().get_name() == "CPU_ATTN"
    monkeypatch.setenv("IMBREX_VLLM_CPU_ATTN", "yes")
    with pytest.raises(ValueError, match="expected 0 or 1"):
        imbrex.vllm.register()


def test_a_patch_release_is_warned_of(vllm, monkeypatch, caplog):
    import imbrex.vllm

    monkeypatch.setattr(vllm, "__version__", "0.33.4")
    imbrex.vllm.register()
    with caplog.at_level(logging.WARNING, "imbrex"):
        import imbrex.vllm.backend  # noqa: F401
    assert "0.32.0 and 0.33.0, and this is 0.33.4" in caplog.text


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0.0", "0.1.dev5+gabc"])
def test_another_version_is_refused_where_it_is_chosen(vllm, monkeypatch, version, caplog):
    import vllm.platforms

    import imbrex.vllm

    monkeypatch.setattr(vllm, "__version__", version)
    imbrex.vllm.register()  # does not disturb who wants another backend
    vllm.platforms.current_platform.kind = "cuda"
    with pytest.raises(ValueError, match=f"CUSTOM.*written for vLLM 0.32.0 and 0.33.0, and this is {re.escape(version)}"):
        Runner("cuda", PLAIN)
    monkeypatch.setenv("IMBREX_ENGINE_ANY_VERSION", "1")
    import imbrex.vllm.backend

    assert version in caplog.text and imbrex.vllm.backend.Backend


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"speed": 11}, "expected some of backend, .* got 'speed'"),
        ({"num_threads": "2"}, "num_threads of type int"),
        ({"on_device": "maybe"}, "on_device"),
    ],
)
def test_settings_that_are_wrong(vllm, settings, message):
    with pytest.raises(ValueError, match=message):
        Runner("cpu", PLAIN, settings=settings)


def test_settings(vllm, monkeypatch):
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"backend": "cpu_generic", "num_threads": 1}')
    runner = Runner("cpu", PLAIN)
    first_step(runner)
    assert "cpu_generic" in str(next(iter(runner.builders[0].plans.values())))
    runner = Runner("cpu", PLAIN, settings={"backend": "reference"})  # over the environment
    first_step(runner)
    assert "reference" in str(next(iter(runner.builders[0].plans.values()))) and runner.builders[0].settings.num_threads == 1
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", "{")
    with pytest.raises(ValueError, match="expected a JSON object"):
        Runner("cpu", PLAIN)


# The stand-in itself.


def test_the_stand_in_rejects_what_lacks_a_member(vllm):
    from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder

    import imbrex.vllm

    imbrex.vllm.register()
    from imbrex.vllm.impl import Impl

    with pytest.raises(TypeError, match="lacks get_impl_cls, get_builder_cls"):
        type("Partial", (AttentionBackend,), {"get_name": staticmethod(lambda: "CUSTOM")})
    with pytest.raises(TypeError, match="abstract"):
        type("Partial", (AttentionImpl,), {"__init__": lambda self: None})()
    with pytest.raises(TypeError, match="abstract"):
        type("Partial", (AttentionMetadataBuilder,), {"build": lambda self: None})()
    runner = Runner("cpu", PLAIN)
    first_step(runner)
    del Impl.do_kv_cache_update
    with pytest.raises(AssertionError, match="does not update the cache"):
        first_step(runner)


def test_numbers_are_looked_at(vllm):
    """A step whose output is off is not let through."""
    runner = Runner("cpu", PLAIN)
    first_step(runner)
    a = runner.request("b", 20)
    a.keys[0] += 1.0
    runner.step([(a, 19)])
    a.values[0] = a.values[0] + np.float32(0.5)
    with pytest.raises(AssertionError, match="off by"):
        runner.step([(a, 1)])
