"""Wrappers of imbrex.flashinfer with use_cuda_graph: what ran once computes the step of the last plan().

On a GPU a CUDA graph is captured and replayed. On the CPU the library's calls are recorded and made again: the same plan, the same tensors.
"""
import pytest

torch = pytest.importorskip("torch")

import imbrex  # noqa: E402
import imbrex.flashinfer as flashinfer  # noqa: E402
from flashinfer_cases import Batch, check, devices, flat  # noqa: E402
from imbrex.flashinfer import _plans  # noqa: E402


class Recorded:
    """Calls of Plan.run() within a `with`, for replay()."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.calls = monkeypatch, []

    def __enter__(self):
        run = imbrex.Plan.run

        def recorded(plan, *args, **options):
            self.calls.append(lambda: run(plan, *args, **options))
            return run(plan, *args, **options)

        self.monkeypatch.setattr(imbrex.Plan, "run", recorded)

    def __exit__(self, *error):
        self.monkeypatch.undo()

    def replay(self):
        for call in self.calls:
            call()


@pytest.fixture
def graph(device, monkeypatch):
    """What captures, and replays."""
    if device == "cpu":
        recorded = Recorded(monkeypatch)
        return recorded, recorded.replay
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()

    def replay():
        made.replay()
        torch.cuda.synchronize()

    return torch.cuda.graph(made), replay


def int32(n, device):
    return torch.full((n,), -5, dtype=torch.int32, device=device)


def workspace(device):
    return torch.empty(0, device=device)


def share(into, batch):
    """A batch's queries and pages into those that the graph reads."""
    q, (k, v) = into
    q[: len(batch.q)] = batch.q
    for x, rows in zip((k, v), batch.cache()):
        x[: len(rows)] = rows


def memory(device, tokens, pages=60):
    q = torch.zeros(tokens, 4, 64, dtype=torch.bfloat16, device=device)
    return q, tuple(torch.full((pages, 4, 2, 64), float("nan"), dtype=torch.bfloat16, device=device) for _ in range(2))


DECODES = [[5, 9, 0, 1], [60, 0, 33, 7], [0, 0, 0, 0], [1, 40, 40, 40]]


@devices
@pytest.mark.parametrize("options", [{}, dict(sinks=True), dict(k_scale=2.0, v_scale=0.5)], ids=["plain", "sinks", "scales"])
@pytest.mark.parametrize("form", ["flag", "class"])
def test_decode(device, graph, options, form):
    buffers = int32(5, device), int32(50, device), int32(4, device)
    if form == "class":
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    else:
        named = dict(zip(("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"), buffers))
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, **named)
    assert wrapper.is_cuda_graph_enabled
    options = dict(options)
    if device == "cpu":
        options.pop("v_scale", None)  # torch multiplies the output, which is not recorded
    if options.pop("sinks", None):
        options["sinks"] = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    mine = memory(device, 4)
    out = torch.empty_like(mine[0])
    made = None
    for seed, lens in enumerate(DECODES):
        batch = Batch(seed, [1] * 4, lens, device=device)
        share(mine, batch)
        wrapper.plan(*batch.arrays("cpu" if seed % 2 else device), 4, 2, 64, 4, q_data_type=torch.bfloat16)
        assert torch.equal(buffers[0].cpu(), batch.indptr) and torch.equal(buffers[2].cpu(), batch.last)
        assert torch.equal(buffers[1][: len(batch.indices)].cpu(), batch.indices)
        if seed == 0:
            wrapper.run(*mine, out=out, **options)
            made = dict(wrapper._plans._made)
            with graph[0]:
                wrapper.run(*mine, out=out, **options)
        out.fill_(9)
        graph[1]()
        check(out, batch.expected(**options))
    assert wrapper._plans._made == made


@devices
def test_verify_steps(device, graph):
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), int32(4, device), int32(50, device), int32(3, device))
    mine, out = memory(device, 9), None
    for seed, lens in enumerate(([5, 9, 3], [60, 3, 33])):
        batch = Batch(seed, [3] * 3, lens, device=device)
        share(mine, batch)
        wrapper.plan(*batch.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16, q_len_per_req=3)
        if out is None:
            out = torch.empty_like(mine[0])
            wrapper.run(*mine, out=out)
            with graph[0]:
                wrapper.run(*mine, out=out)
        out.fill_(9)
        graph[1]()
        check(out, batch.expected(causal=True))
    with pytest.raises(ValueError, match="q_len_per_req: expected 3"):
        wrapper.plan(*batch.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)


def prefill_wrapper(device, num_reqs, masked):
    buffers = dict(
        qo_indptr_buf=int32(num_reqs + 1, device),
        paged_kv_indptr_buf=int32(num_reqs + 1, device),
        paged_kv_indices_buf=int32(50, device),
        paged_kv_last_page_len_buf=int32(num_reqs, device),
    )
    if masked:
        buffers.update(custom_mask_buf=torch.empty(200, dtype=torch.uint8, device=device), mask_indptr_buf=int32(num_reqs + 1, device))
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device), use_cuda_graph=True, **buffers), buffers


PREFILLS = [([4, 5, 0], [20, 5, 0]), ([1, 1, 7], [50, 33, 7]), ([0, 2, 1], [0, 2, 60])]


@devices
@pytest.mark.parametrize("mask", ["none", "bool", "packed"])
def test_prefill(device, graph, mask):
    wrapper, buffers = prefill_wrapper(device, 3, mask != "none")
    mine = memory(device, 9)
    out = torch.empty_like(mine[0])
    for seed, (q_lens, kv_lens) in enumerate(PREFILLS):
        batch = Batch(seed, q_lens, kv_lens, device=device)
        share(mine, batch)
        masks = None if mask == "none" else batch.masks()
        given = {} if masks is None else dict(custom_mask=flat(masks).to(device))
        if mask == "packed":
            bits = Batch.starts([t * s for t, s in zip(q_lens, kv_lens)])
            given = dict(packed_custom_mask=flashinfer.segment_packbits(flat(masks), bits, "little")[0])
        wrapper.plan(batch.qo_indptr, *batch.arrays("cpu"), 4, 2, 64, 4, causal=True, q_data_type=torch.bfloat16, **given)
        assert torch.equal(buffers["qo_indptr_buf"].cpu(), batch.qo_indptr)
        if seed == 0:
            wrapper.run(*mine, out=out)
            with graph[0]:
                wrapper.run(*mine, out=out)
        out.fill_(9)
        graph[1]()
        tokens = sum(q_lens)
        check(out[:tokens], batch.expected(masks, causal=masks is None))
        assert (out[tokens:] == 9).all()


@devices
def test_prefill_of_ragged_keys(device, graph):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        workspace(device), use_cuda_graph=True, qo_indptr_buf=int32(4, device), kv_indptr_buf=int32(4, device)
    )
    q, k, v = (torch.zeros(n, h, 64, dtype=torch.bfloat16, device=device) for n, h in ((9, 4), (100, 2), (100, 2)))
    out = torch.empty_like(q)
    for seed, (q_lens, kv_lens) in enumerate(PREFILLS):
        batch = Batch(seed, q_lens, kv_lens, device=device)
        q[: len(batch.q)] = batch.q
        for x, rows in zip((k, v), batch.ragged()):
            x.fill_(float("nan"))
            x[: len(rows)] = rows
        wrapper.plan(batch.qo_indptr, batch.kv_indptr, 4, 2, 64, causal=True, q_data_type=torch.bfloat16)
        if seed == 0:
            wrapper.run(q, k, v, out=out)
            with graph[0]:
                wrapper.run(q, k, v, out=out)
        out.fill_(9)
        graph[1]()
        check(out[: len(batch.q)], batch.expected(causal=True))


@devices
def test_mla(device, graph):
    buffers = int32(4, device), int32(4, device), int32(50, device), int32(3, device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), True, *buffers)
    q = torch.zeros(3, 4, 80, dtype=torch.bfloat16, device=device)
    pages = torch.full((60, 4, 80), float("nan"), dtype=torch.bfloat16, device=device)
    out = torch.empty(3, 4, 64, dtype=torch.bfloat16, device=device)
    for seed, lens in enumerate(([5, 9, 0], [60, 1, 33])):
        batch = Batch(seed, [1] * 3, lens, kv_heads=1, dim=80, device=device)
        batch.v = [k[..., :64] for k in batch.k]
        q[:] = batch.q
        pages[: batch.num_pages] = batch.cache()[0][:, :, 0]
        kv_lens = torch.tensor(lens, dtype=torch.int32)
        wrapper.plan(batch.qo_indptr, batch.indptr, batch.indices, kv_lens, 4, 64, 16, 4, False, 0.125, torch.bfloat16, torch.bfloat16)
        assert torch.equal(buffers[3].cpu(), kv_lens)
        if seed == 0:
            wrapper.run(q[..., :64], q[..., 64:], pages[..., :64], pages[..., 64:], out=out)
            with graph[0]:
                wrapper.run(q[..., :64], q[..., 64:], pages[..., :64], pages[..., 64:], out=out)
        out.fill_(9)
        graph[1]()
        check(out, batch.expected(scale=0.125))


@devices
def test_batch_attention(device, graph):
    """Without buffers: arrays are read where they lie, and powers of two are the limits."""
    wrapper = flashinfer.BatchAttention(device=device)
    mine = memory(device, 9)
    out, lse, indices = torch.empty_like(mine[0]), torch.empty(9, 4, device=device), int32(50, device)
    for seed, (q_lens, kv_lens) in enumerate(PREFILLS):
        batch = Batch(seed, q_lens, kv_lens, device=device)
        share(mine, batch)
        indices[: len(batch.indices)] = batch.indices.to(device)
        padded = torch.cat([batch.qo_indptr, batch.qo_indptr[-1:]])  # a request without tokens
        kv_len_arr = torch.tensor([*kv_lens, 0], dtype=torch.int32)
        indptr = torch.cat([batch.indptr, batch.indptr[-1:]])
        if seed == 0:
            padded[-1], kv_len_arr[-1] = 9, 0  # every row of q has a request, if one without keys
        wrapper.plan(padded, indptr, indices, kv_len_arr, 4, 2, 64, 64, 4, causal=True)
        if seed == 0:
            wrapper.run(*mine, out, lse)
            with graph[0]:
                wrapper.run(*mine, out, lse)
        out.fill_(9)
        graph[1]()
        check(out[: sum(q_lens)], batch.expected(causal=True))


def test_cascade_has_a_graph_for_all_levels():
    buffers = [
        [int32(n + 1, "cpu") for n in (1, 2)],
        [int32(n + 1, "cpu") for n in (1, 2)],
        [int32(20, "cpu")] * 2,
        [int32(1, "cpu"), int32(2, "cpu")],
    ]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), "NHD", True, *buffers)
    assert wrapper.is_cuda_graph_enabled and all(level.is_cuda_graph_enabled for level in wrapper._levels)
    with pytest.raises(ValueError, match="expected 2 of each kind"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace("cpu"), "NHD", True, *buffers[:3])


def test_limits_are_errors():
    batch = Batch(1, [1] * 4, [5, 9, 0, 1])
    buffers = int32(5, "cpu"), int32(6, "cpu"), int32(4, "cpu")
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), *buffers)
    types = dict(q_data_type=torch.bfloat16)
    wrapper.plan(*batch.arrays("cpu"), 4, 2, 64, 4, **types)
    assert {made.limits for made in wrapper._plans._made.values()} == {_plans.Limits(4, 4, 24, 1)}
    with pytest.raises(ValueError, match="kv_indices: expected at most 6 values.*got 10"):
        wrapper.plan(*Batch(1, [1] * 4, [5, 9, 0, 17]).arrays("cpu"), 4, 2, 64, 4, **types)
    with pytest.raises(ValueError, match="last_page_len: expected 4 values"):
        wrapper.plan(*Batch(1, [1] * 3, [5, 9, 0]).arrays("cpu"), 4, 2, 64, 4, **types)
    with pytest.raises(ValueError, match="kv_indptr: expected a buffer of 5"):
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), buffers[0][:4], *buffers[1:])
    with pytest.raises(ValueError, match="kv_indices: expected a tensor with use_cuda_graph=True"):
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), buffers[0], None, buffers[2])
    with pytest.raises(ValueError, match="kv_indices: expected contiguous torch.int32"):
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), buffers[0], buffers[1].long(), buffers[2])

    prefill, _ = prefill_wrapper("cpu", 3, masked=False)
    small, large = Batch(2, [1, 2, 0], [5, 6, 0]), Batch(2, [1, 2, 1], [5, 6, 7])
    prefill.plan(small.qo_indptr, *small.arrays("cpu"), 4, 2, 64, 4, **types)
    with pytest.raises(ValueError, match="qo_indptr: expected at most 3 tokens"):
        prefill.plan(large.qo_indptr, *large.arrays("cpu"), 4, 2, 64, 4, **types)
    with pytest.raises(ValueError, match="custom_mask_buf and mask_indptr_buf: expected tensors"):
        prefill.plan(small.qo_indptr, *small.arrays("cpu"), 4, 2, 64, 4, custom_mask=flat(small.masks()), **types)
    masked, _ = prefill_wrapper("cpu", 3, masked=True)
    long = Batch(3, [40, 1, 1], [50, 1, 1])
    with pytest.raises(ValueError, match="expected at most 200 bytes"):
        masked.plan(long.qo_indptr, *long.arrays("cpu"), 4, 2, 64, 4, custom_mask=flat(long.masks()), **types)


def test_keys_of_a_request_have_a_limit():
    """Scratch grows with it, and buffers say no more than how many keys all requests have together."""
    buffers = int32(3, "cpu"), int32(100, "cpu"), int32(2, "cpu")
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), *buffers)
    assert wrapper.max_seq_len == 131072
    wrapper.max_seq_len = 40
    short, long = Batch(1, [1, 1], [5, 40]), Batch(1, [1, 1], [5, 41])
    wrapper.plan(*short.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)
    with pytest.raises(imbrex.Error) as error:
        wrapper.plan(*long.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)
    assert error.value.code == "batch.seq_len.limit"


def test_what_a_capture_cannot_hold(monkeypatch):
    batch, kept = Batch(1, [1, 1], [5, 40]), []
    monkeypatch.setattr(_plans.Plan, "keep_for_capture", lambda plan, stream: kept.append(plan))
    monkeypatch.setattr(_plans.Plan, "num_graphs", property(kept.count))
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    plan = [*batch.arrays("cpu"), 4, 2, 64, 4]
    wrapper.plan(*plan, q_data_type=torch.bfloat16)
    with monkeypatch.context() as capture:
        for module in (_plans, flashinfer._single):
            capture.setattr(module, "is_capturing", lambda device: True)
        capture.setattr(_plans._core, "capture_of", lambda stream: 1)
        with pytest.raises(RuntimeError, match="no part of a CUDA graph"):
            wrapper.plan(*plan, q_data_type=torch.bfloat16)
        with pytest.raises(RuntimeError, match="once before a CUDA graph"):
            wrapper.run(batch.q, batch.cache(), sinks=torch.zeros(4))
        with pytest.raises(RuntimeError, match="cannot be captured"):
            flashinfer.single_decode_with_kv_cache(batch.q[0], *batch.ragged())
        for _ in range(3):  # the layers of one graph, which keeps the plan once
            wrapper.run(batch.q, batch.cache())
    assert len(kept) == 1
    long = Batch(1, [1, 1], [5, 2000])
    with pytest.raises(RuntimeError, match="a CUDA graph holds a plan"):
        wrapper.plan(*long.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)
    for window_left in range(6):  # others come and go, it stays
        wrapper.plan(*plan, window_left=window_left, q_data_type=torch.bfloat16)
    assert any(made.captured for made in wrapper._plans._made.values())
    kept.clear()  # the graph is gone
    wrapper.plan(*long.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)
    assert not any(made.captured for made in wrapper._plans._made.values())
