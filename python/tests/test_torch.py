"""The package on PyTorch's tensors: the host's, and where there is a GPU its own, on its streams and in its graphs."""
import numpy as np
import pytest

import imbrex

torch = pytest.importorskip("torch")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def expected_of(q, k, v, starts, seq_starts, causal=True):
    """In float64, request by request."""
    outs = []
    for a, b, c, d in zip(starts, starts[1:], seq_starts, seq_starts[1:]):
        group = q.shape[1] // k.shape[1]
        x, y, z = (t.double().transpose(0, 1) for t in (q[a:b], k[c:d].repeat_interleave(group, 1), v[c:d].repeat_interleave(group, 1)))
        logits = x @ y.transpose(1, 2) * q.shape[2] ** -0.5
        seen = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril((d - c) - (b - a))
        outs.append((logits.masked_fill(~seen, float("-inf")) if causal else logits).softmax(-1).matmul(z).transpose(0, 1))
    return torch.cat(outs)


class Step:
    def __init__(self, device, block_size=16, dtype=torch.bfloat16):
        torch.manual_seed(5)
        self.q_lens, seq_lens = np.array([33, 1, 4], np.int32), np.array([33, 70, 100], np.int32)
        self.starts, self.seq_lens = np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32), seq_lens
        self.seq_starts = np.concatenate([[0], np.cumsum(seq_lens)]).astype(np.int32)
        self.q = torch.randn(38, 8, 128, device=device).to(dtype)
        self.k, self.v = (torch.randn(int(self.seq_starts[-1]), 2, 128, device=device).to(dtype) for _ in range(2))
        columns = -(-int(seq_lens.max()) // block_size)
        table = np.random.default_rng(1).permutation(3 * columns).reshape(3, columns)
        slots = np.concatenate([table[r, np.arange(n) // block_size] * block_size + np.arange(n) % block_size for r, n in enumerate(seq_lens)])
        self.table, self.slots = torch.tensor(table, dtype=torch.int32, device=device), torch.tensor(slots, device=device)
        self.num_blocks, self.block_size = 3 * columns, block_size

    def pages(self, rows):
        cache = torch.full((self.num_blocks * self.block_size, *rows.shape[1:]), float("nan"), dtype=rows.dtype, device=rows.device)
        cache[self.slots] = rows
        return cache.view(self.num_blocks, self.block_size, *rows.shape[1:])

    def expected(self):
        return expected_of(self.q, self.k, self.v, self.starts, self.seq_starts)


def check(out, expected, tolerance=2e-2):
    assert out.dtype == torch.bfloat16 and out.device == expected.device
    assert (out.double() - expected).abs().max() < tolerance


def run_paged(device):
    step = Step(device)
    out = imbrex.attention_paged(step.q, step.pages(step.k), step.pages(step.v), step.starts, step.seq_lens, step.table)
    check(out, step.expected())


def run_varlen(device, causal):
    step = Step(device)
    starts = step.seq_starts if device == "cpu" else torch.tensor(step.seq_starts, device=device)
    spec = imbrex.AttentionSpec(8, 2, 128, block_size=0, causal=causal)
    plan = imbrex.Plan(spec, device, max_num_reqs=4, max_num_tokens=64, max_seq_len=128)
    plan.update(step.starts, step.seq_lens, kv_start_loc=starts)
    check(plan.run(step.q, (step.k, step.v)), expected_of(step.q, step.k, step.v, step.starts, step.seq_starts, causal))


@pytest.mark.parametrize("causal", [False, True])
def test_varlen_on_the_host(causal):
    run_varlen("cpu", causal)


def test_paged_on_the_host():
    run_paged("cpu")


def test_tensors_of_a_cache():
    cache = imbrex.KvCache(imbrex.AttentionSpec(8, 2, 128), 1, 4)
    k = torch.from_dlpack(cache.layer(0).k)
    assert k.dtype == torch.bfloat16 and k.shape == (4, 16, 2, 128) and not k.any()


@on_gpu
@pytest.mark.parametrize("causal", [False, True])
def test_varlen_on_a_gpu(causal):
    run_varlen("cuda:0", causal)


@on_gpu
def test_paged_on_a_gpu():
    run_paged("cuda:0")


@on_gpu
def test_work_goes_to_the_current_stream():
    step = Step("cuda:0")
    expected = step.expected()
    k, v = step.pages(step.k), step.pages(step.v)
    q = torch.zeros_like(step.q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what follows waits for it, on this stream only
        q.copy_(step.q)
        out = imbrex.attention_paged(q, k, v, step.starts, step.seq_lens, step.table)
    assert not stream.query()
    stream.synchronize()
    check(out, expected)


@on_gpu
def test_starts_on_the_host_follow_the_stream():
    """Calls that share a plan, queued behind something slow on a stream of their own: each has its own batch."""
    step = Step("cuda:0")
    steps = [(step.starts, step.seq_starts), tuple(x[-1] - x[::-1] for x in (step.starts, step.seq_starts))]
    expected = [expected_of(step.q, step.k, step.v, *starts) for starts in steps]

    def calls():
        return [imbrex.attention_varlen(step.q, step.k, step.v, *map(np.ascontiguousarray, starts), causal=True) for starts in steps]

    calls()  # compiles
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        outs = calls()
    assert not stream.query()
    stream.synchronize()
    for out, wanted in zip(outs, expected):
        check(out, wanted)


@on_gpu
def test_a_graph_replays_later_steps():
    step = Step("cuda:0")
    spec = imbrex.AttentionSpec(8, 2, 128)
    plan = imbrex.Plan(spec, "cuda:0", max_num_reqs=4, max_num_tokens=64, max_seq_len=128)
    cache = imbrex.KvCache(spec, 1, step.num_blocks, device="cuda:0")
    k, v = (torch.from_dlpack(x) for x in cache.layer(0)[:2])
    k.copy_(step.pages(step.k)), v.copy_(step.pages(step.v))
    q, out = torch.zeros(64, 8, 128, dtype=torch.bfloat16, device="cuda:0"), torch.zeros(64, 8, 128, dtype=torch.bfloat16, device="cuda:0")
    first = np.array([0, 1], np.int32), np.array([16], np.int32)
    plan.update(*first, block_table=step.table)
    plan.run(q, cache.layer(0), out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(q, cache.layer(0), out)
    plan.update(step.starts, step.seq_lens, block_table=step.table)
    q[:38] = step.q
    graph.replay()
    torch.cuda.synchronize()
    check(out[:38], step.expected())


@on_gpu
def test_fp8_pages():
    step = Step("cuda:0")
    k8, v8 = ((x.float() * 2).to(torch.float8_e4m3fn) for x in (step.k, step.v))
    step.k, step.v = (x.to(torch.bfloat16) / 2 for x in (k8, v8))
    half = torch.full((1,), 0.5, device="cuda:0")
    pages = [step.pages(x.view(torch.uint8).float()).nan_to_num(127).to(torch.uint8) for x in (k8, v8)]
    spec = imbrex.AttentionSpec(8, 2, 128, kv_dtype="fp8_e4m3")
    plan = imbrex.Plan(spec, "cuda:0", max_num_reqs=4, max_num_tokens=64, max_seq_len=128)
    plan.update(step.starts, step.seq_lens, block_table=step.table)
    check(plan.run(step.q, (*pages, half, half)), step.expected())


def test_merge_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(0)
    outs, lses = [torch.randn(5, 3, 64) for _ in range(3)], [torch.randn(5, 3) for _ in range(3)]
    expected, expected_lse = imbrex.merge_states(outs, lses)
    out, lse = imbrex.merge_states([o.cuda() for o in outs], [x.cuda() for x in lses])
    torch.testing.assert_close(out.cpu(), expected)
    torch.testing.assert_close(lse.cpu(), expected_lse)
