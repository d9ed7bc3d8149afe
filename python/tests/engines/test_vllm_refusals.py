"""What imbrex.vllm says no to, in which versions and with which settings; and that its stand-in of vLLM is strict."""

import logging
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from vllm_runner import Runner, first_step  # noqa: E402


pytestmark = pytest.mark.usefixtures("vllm_on_cpu")
PLAIN = [{}, {}]

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
        (dict(kv_cache_dtype="nvfp4"), "kv_cache_dtype not supported"),
        (dict(dtype=torch.float64), "dtype not supported"),
        (dict(use_batch_invariant=True), "batch invariance not supported"),
        (dict(use_dcp=True), "DCP not supported"),
        (dict(use_pcp=True), "PCP not supported"),
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
    masked = [dict(use_mm_prefix=True), dict(use_rswa=True), dict(use_non_causal=True), dict(attn_type="encoder_decoder")]
    assert all(choose(device_capability=DeviceCapability(9, 0), **changes) == [] for changes in masked)
    large = dict(dtype=torch.float32, head_size=512)
    assert choose(device_capability=DeviceCapability(9, 0), **large) == []
    reasons = choose(device_capability=DeviceCapability(8, 9), **large)
    assert {text.split(":")[0] for text in reasons} == {"imbrex cuda_sm90", "imbrex cuda_sm80"}
    assert any(text.startswith("imbrex cuda_sm80: spec.head_dim_qk: wanted ") and text.endswith("got 512") for text in reasons)
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"backend": "cuda_sm90"}')
    assert choose(device_capability=DeviceCapability(9, 0)) == []
    assert choose(device_capability=DeviceCapability(9, 0), use_rswa=True) == []
    assert "spec.mask.positions" in choose(device_capability=DeviceCapability(9, 0), use_mm_prefix=True)[0]
    assert "device.sm: wanted 90, got 80" in choose(device_capability=DeviceCapability(8, 0))[0]


def test_the_engine_shows_the_reasons(vllm):
    import vllm.platforms

    vllm.platforms.current_platform.kind = "cuda"
    with pytest.raises(ValueError, match=r"imbrex: .*head_dim_qk"):
        Runner("cuda", [{"head_size": 20, "scale": 1.0}])


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(attn_type="decoder_decoder"), "decoder_decoder"),
        (dict(a_feature_of_tomorrow=2), "expected no a_feature_of_tomorrow, got 2"),
    ],
)
def test_layers_that_are_refused(vllm, options, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        Runner("cpu", [options])


def test_caches_that_are_refused(vllm):
    from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

    runner = Runner("cpu", PLAIN)
    builder = type(runner.builders[0])
    fields = (16, 2, 64, torch.bfloat16)

    def message(spec, config=runner.config):
        with pytest.raises(NotImplementedError) as caught:
            builder(spec, runner.groups[0].names, config, torch.device("cpu"))
        return str(caught.value)

    assert "got AttentionSpec" in message(AttentionSpec(*fields))
    assert "num_head_slots None, got 1" in message(FullAttentionSpec(*fields, num_head_slots=1))
    assert "tokens_per_state 1, got 4" in message(FullAttentionSpec(*fields, tokens_per_state=4))
    spec = runner.groups[0].spec
    runner.config.kv_transfer_config = object()
    assert "KV connector" in message(spec)
    runner.config.kv_transfer_config = None
    runner.config.parallel_config.decode_context_parallel_size = 2
    assert "decode_context_parallel_size 1, got 2" in message(spec)
    runner.config.parallel_config.decode_context_parallel_size = 1


def test_steps_that_are_refused(vllm):
    runner = Runner("cpu", PLAIN)
    first_step(runner)
    cam = runner.common(0, [1], [1], 1, 1)
    with pytest.raises(NotImplementedError, match="decode context parallelism in vLLM, but dcp_local_seq_lens is given"):
        runner.builders[0].build(0, cam.replace(dcp_local_seq_lens=torch.zeros(1)))
    with pytest.raises(NotImplementedError, match="common_prefix_len 0, got 16"):
        runner.builders[0].build(16, cam)


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
    assert AttentionBackendEnum.CUSTOM.get_path() == "imbrex.vllm.custom.Backend"
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
