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


def made_by_sglang(runner, topk):
    """The backend that SGLang's worker of drafts over the target's own cache (FROZEN_KV_MTP) has."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm().create_worker(None)(runner, topk)._init_draft_attn_backend()


def over_the_targets_cache(device, page_size, topk=1, graph_reqs=0):
    """A chain or branches over the cache of a target: all steps are a token of each branch in front of the last, which writes nothing. SGLang lends the draft's
    backend the target's pool, and plans without spec_info. graph_reqs: of so many requests, in a graph. Returns the draft's backend."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    layers = [{}, dict(sliding_window_size=9)]
    target = Runner(device, layers, page_size=page_size)
    own = MHATokenToKVPool(64, page_size, torch.bfloat16, 2, 64, 2, device)
    draft = draft_runner(device, layers, page_size=page_size, pool=own, req_to_token_pool=target.req_to_token_pool)
    backend, requests = made_by_sglang(draft, topk), prefilled(target)
    assert (backend is draft.attn_backend) == (topk == 1)
    count = max(graph_reqs, len(requests)) * topk
    rows, lens = torch.zeros(count, dtype=torch.int64, device=device), torch.ones(count, dtype=torch.int64, device=device)
    batch = ForwardBatch(ForwardMode.DECODE, count, None, rows, lens, None, None)
    queries = [[torch.zeros(count, 8, 64, device=device, dtype=target.dtype) for _ in layers] for _ in range(3)]

    def run():
        backend.init_forward_metadata_in_graph(batch)
        attend = [[layer(q.flatten(1), None, None, batch, backend, save_kv_cache=False) for layer, q in zip(draft.layers, step)] for step in queries]
        return [[x.view(count, 8, 64) for x in step] for step in attend]

    backend.token_to_kv_pool = target.token_to_kv_pool
    graph = None
    if graph_reqs:
        batch.seq_lens_cpu = lens.cpu()
        backend.init_cuda_graph_state(count, count)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        run(), run()
        if device == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = run()
    for _ in range(2):
        branches = [r for r in requests for _ in range(topk)]
        rows[: len(branches)] = torch.tensor([target.rows[r.name] for r in branches], device=device)
        lens[: len(branches)] = torch.tensor([r.computed for r in branches], device=device)
        batch.seq_lens_cpu = None if backend.device_text == "cpu" else lens.cpu() + 4  # a bound
        for q in (q for step in queries for q in step):
            q.copy_(torch.randn(q.shape))
        (backend.init_forward_metadata_out_graph if graph_reqs else backend.init_forward_metadata)(batch)
        if graph is None:
            outputs = run()
        else:
            graph.replay()
        for index, options in enumerate(layers):
            for i, r in enumerate(branches):
                for q, out in ((step[index], found[index]) for step, found in zip(queries, outputs)):
                    check(
                        out[i : i + 1],
                        q[i : i + 1],
                        r.keys[index][: r.computed],
                        r.values[index][: r.computed],
                        target.dtype,
                        f"layer {index}, branch {i} of {r.name}",
                        causal=True,
                        scale=draft.layers[index].scaling,
                        window_left=options.get("sliding_window_size", -1),
                    )
        backend.token_to_kv_pool = own
        target.step([(r, 1) for r in requests])
        backend.token_to_kv_pool = target.token_to_kv_pool
    return backend


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("graph_reqs", [0, 4])
def test_drafts_over_the_targets_cache(device, topk, page_size, graph_reqs):
    over_the_targets_cache(device, page_size, topk, graph_reqs)


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("graph_reqs", [0, 4])
def test_drafts_over_the_targets_cache_planned_on_the_gpu(device, on_device, topk, graph_reqs):
    """The host knows no more than a bound of lengths."""
    assert over_the_targets_cache(device, 1, topk, graph_reqs).forward_metadata.on_device


def test_sglang_makes_other_backends_over_the_targets_cache(device):
    runner = draft_runner(device, [{}])
    for _ in range(2):
        own = made_by_sglang(runner, 4)
        assert type(own).__name__ == "Backend" and own is not runner.attn_backend
    runner.draft_attention_backend = "triton"
    assert made_by_sglang(runner, 4) == "triton's"
    runner.draft_attention_backend = "fa3"
    with pytest.raises(ValueError, match="got fa3"):
        made_by_sglang(runner, 4)


def run_uno(device, page_size, graph, **changes):
    """A step of UNO: a chain of noise behind the last token is read, then a chain from the token behind that one is verified in its place. Its input has neither
    a top-k nor links, and lengths on the host are a bound."""
    runner = Runner(device, [{}, dict(sliding_window_size=9)], page_size=page_size, speculative=True)
    requests, info = prefilled(runner), SimpleNamespace(draft_token_num=4, custom_mask=None)
    if graph:
        runner.capture(4, mode=verification(), width=4, spec_info=info)
    for kept in (2, 5, 3):
        before = [r.computed for r in requests]
        for first in (0, 1):
            for request, length in zip(requests, before):
                request.computed = length + first
            known = None if device == "cpu" else torch.tensor(before) + 8
            runner.step([(r, 4) for r in requests], mode=verification(), spec_info=info, seq_lens_cpu=known)
        for request, length in zip(requests, before):
            request.computed = length + kept
    assert not any(spec.tree or spec.custom_mask for spec in specs(runner))
    return runner.attn_backend


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("graph", [False, True])
def test_uno(device, page_size, graph):
    run_uno(device, page_size, graph)


@pytest.mark.parametrize("graph", [False, True])
def test_uno_planned_on_the_gpu(device, on_device, graph):
    assert run_uno(device, 16, graph).forward_metadata.on_device
