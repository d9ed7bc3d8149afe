"""What imbrex.sglang says no to, in which versions and with which settings; and that its stand-in of SGLang is strict."""

import logging
import re
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from sglang_runner import Runner, VerifyInput, first_step, idle, masks_of, prefilled  # noqa: E402


pytestmark = pytest.mark.usefixtures("sglang")
PLAIN = [{}, {}]

# Refusals.


def test_a_runner_that_is_refused(sglang):
    with pytest.raises(NotImplementedError, match="a unified memory pool"):
        Runner("cpu", PLAIN, kv_index_translator=SimpleNamespace(is_translating=True))


def test_pools_that_are_refused(sglang):
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
    from sglang.srt.runtime_context import get_parallel

    with pytest.raises(NotImplementedError, match="--disable-hybrid-swa-memory"):
        Runner("cpu", PLAIN, pool=BaseSWAKVPool())
    with pytest.raises(NotImplementedError, match="kv_cache_layout nhd or hnd, got SimpleNamespace with vectorized_5d"):
        Runner("cpu", PLAIN, pool=SimpleNamespace(kv_cache_layout="vectorized_5d"))
    quantised = SimpleNamespace(kv_cache_layout="nhd", is_quantized_kv_cache=True, quant_method=SimpleNamespace(name="nvfp4"))
    with pytest.raises(NotImplementedError, match="floating-point numbers, got SimpleNamespace with nvfp4"):
        Runner("cpu", PLAIN, pool=quantised)
    get_parallel().attn_dcp_size = 2
    with pytest.raises(NotImplementedError, match="decode context parallelism"):
        Runner("cpu", PLAIN)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("is_cross_attention", True, "expected encoder_lens with layers of cross attention"),
        ("pos_encoding_mode", "ALIBI", "pos_encoding_mode NONE in SGLang, got ALIBI"),
    ],
)
def test_layers_that_are_refused(sglang, name, value, message):
    runner = Runner("cpu", PLAIN)
    setattr(runner.layers[0], name, value() if callable(value) else value)
    with pytest.raises(NotImplementedError, match=message):
        first_step(runner)


def test_requests_of_several_items_are_refused(sglang):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner("cpu", PLAIN)
    batch = runner.batch(ForwardMode.EXTEND, [(runner.request("a", 5), 5)], multi_item_delimiter_indices=[torch.tensor([3])])
    with pytest.raises(NotImplementedError, match="multi-item scoring"):
        runner.attn_backend.init_forward_metadata(batch)


def test_calls_that_are_refused(sglang):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner("cpu", [{"logit_cap": 3.0, "logit_capping_method": "sigmoid"}, {}])
    with pytest.raises(NotImplementedError, match="expected logit_capping_method tanh, got sigmoid"):
        first_step(runner)
    runner = Runner("cpu", PLAIN)
    a = runner.request("a", 40)
    batch, (q, k, v) = runner.batch(ForwardMode.EXTEND, [(a, 20)]), runner.inputs([(a, 20)])[0]
    runner.attn_backend.init_forward_metadata(batch)
    for name in ("q_rope", "k_rope", "score_mod", "aux_tensors", "topk_indices"):
        with pytest.raises(NotImplementedError, match=f"expected no {name}"):
            runner.attn_backend.forward(q.view(20, -1), k, v, runner.layers[0], batch, **{name: q})
    with pytest.raises(NotImplementedError, match="expected queries of f32, bf16 or f16"):
        runner.attn_backend.forward(q.view(20, -1).to(torch.float8_e4m3fn), k, v, runner.layers[0], batch)
    batch.mha_return_lse = True
    with pytest.raises(NotImplementedError, match="mha_return_lse"):
        runner.attn_backend.forward(q.view(20, -1), k, v, runner.layers[0], batch)


def test_steps_that_are_refused(sglang):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner("cpu", [{"sliding_window_size": 5}, {}])
    requests = prefilled(runner)
    backend = runner.attn_backend

    def refused(message, mode, **changes):
        with pytest.raises(NotImplementedError, match=message):
            backend.init_forward_metadata(runner.batch(mode, [(requests[0], 1)], **changes))

    refused("DLLM_EXTEND", ForwardMode.DLLM_EXTEND)
    widened = SimpleNamespace(num_tokens_per_req=3, num_front_tokens=2)
    refused("no tokens in front of a draft's extend .* SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX=0", ForwardMode.DRAFT_EXTEND_V2, spec_info=widened)
    refused("PREBUILT", ForwardMode.PREBUILT)
    refused("planned by a draft worker's backends", ForwardMode.DECODE, spec_info=VerifyInput(1, None))
    backend.init_cuda_graph_state(2, 2)
    with pytest.raises(NotImplementedError, match="CUDA graph of decoding, verification or a draft's extend in SGLang, got EXTEND"):
        backend.init_forward_metadata_out_graph(runner.batch(ForwardMode.EXTEND, [(requests[0], 1)]), in_capture=True)
    masks, flat = masks_of(requests, 4, "cpu")
    with pytest.raises(NotImplementedError, match="got a mask of all keys"):
        runner.step([(r, 4) for r in requests], mode=ForwardMode.TARGET_VERIFY, spec_info=VerifyInput(4, flat))


def test_lengths_are_never_guessed(sglang, monkeypatch):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner("cpu", PLAIN)
    a = prefilled(runner)[0]
    runner.attn_backend.device_text = "cuda:0"
    with pytest.raises(ValueError, match="expected lengths on the host"):
        runner.attn_backend.init_forward_metadata(runner.batch(ForwardMode.DECODE, [(a, 1)], seq_lens_cpu=None))
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"on_device": "never"}')
    monkeypatch.setattr("imbrex.sglang.backend.device_text", lambda device: "cuda:0")
    with pytest.raises(ValueError, match='expected on_device "auto" or "always" with speculative decoding'):
        Runner("cpu", PLAIN, speculative=True)


# Registration, versions, settings.


def test_register(sglang):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    import imbrex.sglang

    others = list(ATTENTION_BACKEND_CHOICES)
    for _ in range(3):
        imbrex.sglang.register()
    assert ATTENTION_BACKEND_CHOICES == [*others, "imbrex"] and set(ATTENTION_BACKENDS) == {"imbrex"}


def server_args(architecture, prefill, decode):
    hf_config = SimpleNamespace(architectures=[architecture])
    backends = dict(attention_backend=None, prefill_attention_backend=prefill, decode_attention_backend=decode)
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=hf_config), **backends)


def test_llama4_may_have_imbrex(sglang):
    """Its list is another one, of what the resolved arguments have."""
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.arg_groups.resolution_hooks import run_hook

    import imbrex.sglang

    args = server_args("Llama4ForConditionalGeneration", None, None)
    args.attention_backend = "imbrex"
    plain = model_hook.resolved_view
    with pytest.raises(AssertionError, match="required for Llama4 model but got imbrex"):
        run_hook(model_hook.handle_model_specific_adjustments, args)
    imbrex.sglang.register()
    run_hook(model_hook.handle_model_specific_adjustments, args)
    assert args.attention_backend == "imbrex" and model_hook.resolved_view is plain
    args.attention_backend = "flashinfer"
    with pytest.raises(AssertionError, match="required for Llama4 model but got flashinfer"):
        run_hook(model_hook.handle_model_specific_adjustments, args)


def test_gpt_oss_may_have_imbrex(sglang):
    """SGLang's list of backends for it is inside of a function."""
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.arg_groups.resolution_hooks import run_hook

    import imbrex.sglang

    def adjust(*arguments):
        args = server_args(*arguments)
        before = dict(vars(args))
        run_hook(model_hook.handle_model_specific_adjustments, args)
        assert vars(args) == before

    with pytest.raises(AssertionError, match="GptOssForCausalLM requires one of"):
        adjust("GptOssForCausalLM", "imbrex", "imbrex")
    for _ in range(2):
        imbrex.sglang.register()
    plain = model_hook.attention_backends_of
    for prefill, decode in (("imbrex", "imbrex"), ("triton", "imbrex"), ("imbrex", "fa3")):
        adjust("GptOssForCausalLM", prefill, decode)
    for refused in (
        ("GptOssForCausalLM", "imbrex", "flashinfer"),
        ("GptOssForCausalLM", "flashinfer", "flashinfer"),
        ("Gemma4ForCausalLM", "imbrex", "imbrex"),
    ):
        with pytest.raises(AssertionError, match="requires one of"):
            adjust(*refused)
        assert model_hook.attention_backends_of is plain


@pytest.mark.parametrize("version", ["0.5.22", "0.4.0", "0.6.0", "nightly"])
def test_another_version_is_refused_where_it_is_chosen(sglang, monkeypatch, version, caplog):
    import imbrex.sglang

    monkeypatch.setattr(sglang, "__version__", version)
    imbrex.sglang.register()
    with pytest.raises(ImportError, match=f"written for SGLang 0.5.23, and this is {re.escape(version)}"):
        Runner("cpu", PLAIN)
    monkeypatch.setenv("IMBREX_ENGINE_ANY_VERSION", "1")
    idle(Runner("cpu", PLAIN))
    assert version in caplog.text


@pytest.mark.parametrize("version", ["0.5.24", "0.5.23.post1", "0.5.30rc0"])
def test_a_later_patch_is_warned_of(sglang, monkeypatch, version, caplog):
    monkeypatch.setattr(sglang, "__version__", version)
    with caplog.at_level(logging.WARNING, "imbrex"):
        first_step(Runner("cpu", PLAIN))
    assert (version in caplog.text) == ("post" not in version)


def test_settings(sglang, monkeypatch):
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"backend": "reference", "num_threads": 1}')
    runner = Runner("cpu", PLAIN)
    first_step(runner)
    assert all("reference" in str(kept.plan) for kept in runner.attn_backend._eager.kept())
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"speed": 11}')
    with pytest.raises(ValueError, match="got 'speed'"):
        Runner("cpu", PLAIN)


# The stand-in itself.


def test_the_stand_in_rejects_what_lacks_a_member(sglang):
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    with pytest.raises(TypeError, match="lacks init_cuda_graph_state, get_cuda_graph_seq_len_fill_value, forward_extend"):
        type("Partial", (AttentionBackend,), {"init_forward_metadata_out_graph": lambda self, b: None, "forward_decode": lambda self, q: q})


def test_numbers_are_looked_at(sglang):
    runner = Runner("cpu", PLAIN)
    a = runner.request("a", 20)
    runner.step([(a, 19)])
    a.values[0] = a.values[0] + 0.5
    with pytest.raises(AssertionError, match="off by"):
        runner.step([(a, 1)])
