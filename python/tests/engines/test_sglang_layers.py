"""Layers of imbrex.sglang that are no plain decoder's, against a stand-in of SGLang: bidirectional ones, local attention, a temperature by length."""

import pytest

torch = pytest.importorskip("torch")
from sglang_runner import Runner, VerifyInput, masks_of, prefilled, random_trees, serve  # noqa: E402
from test_sglang_trees import specs, verify  # noqa: E402

pytestmark = pytest.mark.usefixtures("sglang")


def of_type(name, **options):
    from sglang.srt.layers.radix_attention import AttentionType

    return dict(attn_type=AttentionType[name], **options)


def new_prompts(runner, *lengths, names="abc"):
    requests = [runner.request(name, length + 30) for name, length in zip(names, lengths)]
    runner.step([(r, length) for r, length in zip(requests, lengths)], mode=extend())
    return requests


def extend():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode.EXTEND


# Bidirectional layers.


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["ENCODER_ONLY", "DECODER_BIDIRECTIONAL"])
def test_bidirectional(device, kind, page_size):
    """Embedding models have whole prompts, and no others; a decoder goes on with a causal layer."""
    runner = Runner(device, [of_type(kind), of_type(kind, sliding_window_size=7), of_type(kind, logit_cap=6.0)], page_size=page_size)
    requests = new_prompts(runner, 37, 1, 130)
    new_prompts(runner, 20, names="d")
    assert [spec.causal for spec in specs(runner)] == [False] * 3
    runner.step([(r, 1) for r in requests])
    runner.step([(r, 1) for r in requests], mode=None, pad_reqs=2)


def test_drafts_behind_a_bidirectional_prompt(device):
    runner = Runner(device, [of_type("DECODER_BIDIRECTIONAL"), of_type("DECODER_BIDIRECTIONAL", sliding_window_size=3)])
    verify(runner, new_prompts(runner, 37, 5, 60), 6)


@pytest.mark.parametrize("kind", ["ENCODER_ONLY", "DECODER_BIDIRECTIONAL"])
def test_parts_of_prompts_are_refused(sglang, kind):
    """Keys of the earlier part do not know the later."""
    runner = Runner("cpu", [of_type(kind)])
    (a,) = new_prompts(runner, 20)
    with pytest.raises(
        NotImplementedError, match=rf"whole prompts for attention of type {kind.lower()} in SGLang, got prefixes of \[20\] tokens: --ch"
    ):
        runner.step([(a, 5)])


# Local attention.


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [32, 48])
def test_local_attention(device, chunk, page_size):
    """A model's layers with rotary embeddings see their own chunk; the others see everything."""
    runner = Runner(device, [{"use_irope": True}, {}], page_size=page_size)
    runner.attention_chunk_size = runner.attn_backend.chunk = chunk
    serve(runner)
    assert {spec.chunk for spec in specs(runner)} == {0, chunk}


def test_the_chunk_of_a_model(sglang):
    assert Runner("cpu", [{}], attention_chunk_size=8192).attn_backend.chunk == 8192
    runner = Runner("cpu", [{"use_irope": True}])  # of a model without chunks
    assert runner.attn_backend.chunk == 0
    new_prompts(runner, 20)


def test_local_attention_in_graphs(device):
    runner = Runner(device, [{"use_irope": True}, {}], attention_chunk_size=32)
    runner.capture(6)
    serve(runner)


def test_trees_in_chunks(device):
    """Chunks go by depth: with 30 tokens in front, those of depths 0 and 1 are in the first chunk of 32."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner(device, [{"use_irope": True}], attention_chunk_size=32)
    requests, trees = prefilled(runner, [30]), random_trees(1, 12)
    masks, _ = masks_of(requests, 12, device, trees=trees)
    depth = (torch.tensor(masks[0][:, 30:]).sum(1) - 1).numpy()
    assert depth.max() > 2
    place = [*range(30), *(30 + depth)]
    for row, d in zip(masks[0], depth):
        row &= [p // 32 == (30 + d) // 32 for p in place]
    runner.attention_chunk_size = 10**6  # the mask says it all
    runner.step([(requests[0], 12)], mode=ForwardMode.TARGET_VERIFY, masks=masks, spec_info=VerifyInput(12, trees=trees, device=device))


# A temperature by length.


@pytest.mark.parametrize("page_size", [1, 16])
def test_temperature(device, page_size):
    model = [{"xai_temperature_len": 4, "logit_cap": 5.0}, {"xai_temperature_len": 25}, {}]
    runner = Runner(device, model, page_size=page_size, dtype=torch.float32)
    serve(runner)
    assert {bool(spec.score_mod) for spec in specs(runner)} == {False, True}


def test_temperature_in_graphs(device):
    runner = Runner(device, [{"xai_temperature_len": 25}, {}])
    runner.capture(6)
    serve(runner)


def test_temperature_of_drafts(device):
    """Of a chain; the position of a token of a tree is its depth's."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner(device, [{"xai_temperature_len": 25}])
    requests = prefilled(runner)
    runner.step([(r, 4) for r in requests], mode=ForwardMode.TARGET_VERIFY, spec_info=VerifyInput(4, topk=1))
    with pytest.raises(NotImplementedError, match="no tree of draft tokens in layers with a temperature by length"):
        verify(runner, requests, 4)
