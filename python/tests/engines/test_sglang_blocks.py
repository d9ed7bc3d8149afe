"""Drafts of blocks in SGLang (DFLASH, DSPARK), against its stand-in: a block of masks behind the context, whose tokens see each other, and verification of as
many drafts as each request has."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from serving import check  # noqa: E402
from sglang_runner import Runner, prefilled  # noqa: E402
from test_sglang_draft_workers import draft_runner  # noqa: E402
from test_sglang_layers import of_type  # noqa: E402
from test_sglang_trees import specs  # noqa: E402

pytestmark = pytest.mark.usefixtures("sglang")


def block(width, lens=None):
    """As DFlashVerifyInput."""
    layout = None if lens is None else SimpleNamespace(verify_lens=lens)
    return SimpleNamespace(draft_token_num=width, topk=1, custom_mask=None, ragged_verify_layout=layout)


def verification():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode.TARGET_VERIFY


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("graph", [False, True])
def test_blocks(device, page_size, graph):
    """Full layers see the whole block, sliding ones are causal. The context is as the target has left it, so that a worker begins where it was."""
    sinks = torch.randn(8, device=device)
    layers = [
        of_type("ENCODER_ONLY"),
        dict(sliding_window_size=9),
        of_type("ENCODER_ONLY", sliding_window_size=9),
        of_type("ENCODER_ONLY", sinks=sinks),
    ]
    runner = draft_runner(device, layers, page_size=page_size)
    requests = [runner.request(name, 90) for name in "abc"]
    for request, length in zip(requests, (37, 61, 20)):  # a draft's prompts are written, and not run
        slots = torch.tensor(runner.slots(request, length), device=device)
        for keys, values, k, v in zip(request.keys, request.values, runner.token_to_kv_pool.k_buffer, runner.token_to_kv_pool.v_buffer):
            k[slots], v[slots] = keys[:length].to(k.dtype), values[:length].to(v.dtype)
        request.computed = length
    if graph:
        runner.capture(4, mode=verification(), width=5, spec_info=block(5))
    for kept in (3, 5, 1):
        before = [r.computed for r in requests]
        runner.step([(r, 5) for r in requests], mode=verification(), spec_info=block(5))
        for request, length in zip(requests, before):
            request.computed = length + kept
    if not graph:
        assert [spec.causal for spec in specs(runner)] == [False, True, False, False]


@pytest.mark.parametrize("page_size", [1, 16])
def test_as_many_drafts_as_each_request_has(device, page_size):
    runner = Runner(device, [{}, dict(sliding_window_size=7)], page_size=page_size)
    requests = prefilled(runner)
    for counts in ((4, 1, 3), (1, 1, 1), (5, 5, 5), (2, 5, 1)):
        info = block(5, torch.tensor(counts, dtype=torch.int32, device=device))
        runner.step(list(zip(requests, counts)), mode=verification(), spec_info=info, input_ids=torch.zeros(sum(counts), device=device))


def test_rows_of_padding_behind_them(device, on_device):
    """On a GPU SGLang knows a bound of them alone: there are rows behind the last request's."""
    runner = Runner(device, [{}, dict(sliding_window_size=7)], speculative=True)
    requests, backend = prefilled(runner), runner.attn_backend
    for counts, known in (((4, 1, 3), None), ((2, 5, 1), max(r.computed for r in requests) + 8)):
        scheduled = list(zip(requests, counts))
        info = block(5, torch.tensor(counts, dtype=torch.int64, device=device))
        batch = runner.batch(verification(), scheduled, spec_info=info, input_ids=torch.zeros(sum(counts) + 4, device=device))
        batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(4)])
        batch.seq_lens_cpu, batch.max_seq_len_host = None, known
        inputs = runner.inputs(scheduled, 4)
        backend.init_forward_metadata(batch)
        assert backend.forward_metadata.on_device and backend.forward_metadata.num_tokens == sum(counts) + 4
        outputs = runner.forward(batch, inputs)
        for index, (layer, out) in enumerate(zip(runner.layers, outputs)):
            runner._check(index, layer, out.view(out.shape[0], layer.tp_q_head_num, layer.v_head_dim), inputs[index][0], scheduled, None)
        for request, count in scheduled:
            request.computed += count


def over_the_targets_cache(device, page_size):
    """A chain over the cache of a target (FROZEN_KV_MTP): all of its steps are one token a request in front of the last, which writes nothing. SGLang lends
    the draft's backend the target's pool, and plans without spec_info. Returns the draft's backend."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    layers = [{}, dict(sliding_window_size=9)]
    target = Runner(device, layers, page_size=page_size)
    own = MHATokenToKVPool(64, page_size, torch.bfloat16, 2, 64, 2, device)
    draft = draft_runner(device, layers, page_size=page_size, pool=own, req_to_token_pool=target.req_to_token_pool)
    backend, requests = draft.attn_backend, prefilled(target)
    for _ in range(2):
        batch = target.batch(ForwardMode.DECODE, [(r, 0) for r in requests], out_cache_loc=None)
        batch.seq_lens_cpu = None if backend.device_text == "cpu" else batch.seq_lens_cpu + 4  # a bound
        backend.token_to_kv_pool = target.token_to_kv_pool
        backend.init_forward_metadata(batch)
        for _ in range(3):
            for index, layer in enumerate(draft.layers):
                q = torch.randn(len(requests), 8, 64, device=device).to(target.dtype)
                out = layer(q.flatten(1), None, None, batch, backend, save_kv_cache=False).view(q.shape)
                for i, r in enumerate(requests):
                    kept = (r.keys[index][: r.computed], r.values[index][: r.computed])
                    window = layers[index].get("sliding_window_size", -1)
                    check(
                        out[i : i + 1],
                        q[i : i + 1],
                        *kept,
                        target.dtype,
                        f"layer {index}, {r.name}",
                        causal=True,
                        scale=layer.scaling,
                        window_left=window,
                    )
        backend.token_to_kv_pool = own
        target.step([(r, 1) for r in requests])
    return backend


@pytest.mark.parametrize("page_size", [1, 16])
def test_chains_over_the_targets_cache(device, page_size):
    over_the_targets_cache(device, page_size)


def test_chains_over_the_targets_cache_planned_on_the_gpu(device, on_device):
    """The host knows no more than a bound of lengths."""
    assert over_the_targets_cache(device, 1).forward_metadata.on_device
