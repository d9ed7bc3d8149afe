"""CUDA graphs of the functions without a plan, on a GPU: beside eager calls, beside each other, over streams and threads, and when they go."""
import gc
import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import imbrex  # noqa: E402
import imbrex.torch  # noqa: E402
from imbrex import _core, _torch_attention  # noqa: E402
from torch_reference import near, paged, reference  # noqa: E402

CUDA = torch.device("cuda", 0)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


class Paged:
    """Decode of two requests, with lengths on the GPU that a test may change."""

    def __init__(self, seq_len, seed, heads=8):
        torch.manual_seed(seed)
        self.q = torch.randn(2, heads, 128, device=CUDA).bfloat16()
        self.k, self.v = (torch.randn(2, 2, 1024, 128, device=CUDA).bfloat16() for _ in range(2))
        self.k_cache, self.table = paged(self.k.transpose(1, 2), 16)
        self.v_cache = torch.full_like(self.k_cache, float("nan"))
        for r in range(2):
            for page in range(64):
                self.v_cache[self.table[r, page]] = self.v[r, :, 16 * page : 16 * page + 16].transpose(0, 1)
        self.starts, self.lens, self.out = int32(0, 1, 2), int32(seq_len, seq_len), torch.zeros_like(self.q)

    def call(self):
        return imbrex.torch.paged_attention(self.q, self.k_cache, self.v_cache, self.starts, self.lens, self.table, 1, 1024)

    def check(self, out):
        for r, n in enumerate(self.lens.tolist()):
            expected = reference(self.q[r][None, :, None], self.k[r, None, :, :n], self.v[r, None, :, :n])
            near(out[r], expected[0][0, :, 0])


class Dense:
    """Equal lengths, which the host plans in an eager call and the GPU in a graph."""

    def __init__(self, seq_len, seed):
        torch.manual_seed(seed)
        self.q = torch.randn(2, 8, 1, 128, device=CUDA).bfloat16()
        self.k, self.v = (torch.randn(2, 2, seq_len, 128, device=CUDA).bfloat16() for _ in range(2))

    def call(self):
        return imbrex.torch.attention(self.q, self.k, self.v)

    def check(self, out):
        near(out, reference(self.q, self.k, self.v)[0])


def capture(call, stream=None):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = call()
    return graph, out


@pytest.mark.parametrize("order", ["eager replay eager", "replay eager replay", "eager eager replay replay eager"])
@pytest.mark.parametrize("problems", [(Dense, 1000, 900), (Dense, 900, 1000), (Paged, 1000, 60), (Paged, 60, 1000)], ids=str)
def test_eager_beside_replay(problems, order):
    """Both fall into one bucket of lengths, so that they would find the same plan."""
    kind, captured_len, eager_len = problems
    captured, eager = kind(captured_len, 1), kind(eager_len, 2)
    captured.call(), eager.call()
    graph, out = capture(captured.call)
    for step in order.split() * 3:
        if step == "replay":
            out.fill_(9)
            graph.replay()
            torch.cuda.synchronize()
            captured.check(out)
        else:
            eager.check(eager.call())


def test_an_eager_call_after_a_capture_may_move_its_arrays():
    captured = Paged(500, 3)
    captured.call()
    graph, out = capture(captured.call)
    for seed in range(3):
        other = Paged(300 + seed, seed)
        other.check(other.call())
        graph.replay()
        torch.cuda.synchronize()
        captured.check(out)


def test_masks_in_turns():
    torch.manual_seed(4)
    q, k, v = (torch.randn(2, 8, s, 128, device=CUDA).bfloat16() for s in (5, 60, 60))
    masks = [torch.rand(2, 1, 5, 60, device=CUDA) > 0.4 for _ in range(3)]
    imbrex.torch.attention(q, k, v, masks[0])
    graph, out = capture(lambda: imbrex.torch.attention(q, k, v, masks[0]))
    for mask in masks[1:] * 2:
        near(imbrex.torch.attention(q, k, v, mask), reference(q, k, v, mask=mask)[0])
        graph.replay()
        torch.cuda.synchronize()
        near(out, reference(q, k, v, mask=masks[0])[0])


def test_layers_of_a_graph_with_tables_of_their_own():
    layers = [Paged(700, seed) for seed in range(4)]
    layers[0].call()
    graph, outs = capture(lambda: [layer.call() for layer in layers])
    for n in (700, 16, 1024):
        for layer in layers:
            layer.lens.fill_(n)
        graph.replay()
        torch.cuda.synchronize()
        for layer, out in zip(layers, outs):
            layer.check(out)


def test_two_graphs_of_the_same_shapes():
    """The second makes its plan while it is captured."""
    problems = [Paged(500, 5), Paged(77, 6), Paged(1000, 7)]
    problems[0].call()
    graphs = [capture(problem.call) for problem in problems]
    for turn in range(3):
        for _, out in graphs:
            out.fill_(9)
        streams = [torch.cuda.Stream() for _ in graphs]
        torch.cuda.synchronize()
        for (graph, _), stream in zip(graphs, streams):  # at the same time
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for problem, (_, out) in zip(problems, graphs):
            problem.check(out)


def test_branches_of_a_graph():
    problems = [Paged(500, 8), Paged(1000, 9)]
    problems[0].call()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside = problems[1].call()
        out = problems[0].call()
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(20):
        out.fill_(9), beside.fill_(9)
        graph.replay()
        torch.cuda.synchronize()
        problems[0].check(out), problems[1].check(beside)


def test_eager_calls_on_many_streams():
    problems = [Dense(900 + 20 * i, i) for i in range(6)]
    problems[0].call()
    torch.cuda.synchronize()
    outs = []
    for turn in range(4):
        for problem in problems:
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(2_000_000)
                outs.append((problem, problem.call()))
                host = [x[0].transpose(0, 1).contiguous() for x in (problem.q, problem.k, problem.v)]
                rows = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, len(host[1])], dtype=torch.int32)
                outs.append((problem, imbrex.attention_varlen(*host, *rows)))
    torch.cuda.synchronize()
    for problem, out in outs:
        expected = reference(problem.q, problem.k, problem.v)[0]
        near(out, expected if out.dim() == 4 else expected[0].transpose(0, 1))


def test_threads_beside_a_capture():
    """Other threads make, use and free plans while one captures, in PyTorch's strictest mode."""
    captured = Paged(800, 10)
    captured.call()
    stop, errors = threading.Event(), []

    def work(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                heads = 2
                while not stop.is_set():
                    heads = heads % 16 + 2
                    problem = Paged(100 + seed, seed, heads)
                    torch.cuda.current_stream().synchronize()
                    problem.check(problem.call())
        except Exception as error:  # noqa: BLE001: whatever it is, the test has failed
            errors.append(error)

    def short(seed):
        """imbrex alone: what PyTorch itself may not do beside a capture is done before."""
        try:
            begin.wait()
            for _ in range(20):
                plan = imbrex.Plan(
                    imbrex.AttentionSpec(8, 2, 128), "cuda:0", max_num_reqs=4, max_num_tokens=8, max_seq_len=512 << seed, on_device=True
                )
                plan.update(
                    torch.tensor([0, 1], dtype=torch.int32), torch.tensor([9], dtype=torch.int32), block_table=tables[seed], stream=streams[seed]
                )
                del plan
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    imbrex.Plan(imbrex.AttentionSpec(8, 2, 128), "cuda:0", on_device=True)  # compiles
    begin = threading.Barrier(3)
    tables, streams = [int32(0)[None] for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    threads = [threading.Thread(target=short, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        begin.wait()
        out = captured.call()
        for thread in threads:
            thread.join()
    graph.replay()
    torch.cuda.synchronize()
    captured.check(out)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        graph.replay()
        captured.check(captured.call())
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    torch.cuda.synchronize()
    captured.check(out)


def used():
    """Device memory that PyTorch's allocator does not have."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def big():
    """A call whose plan has scratch of many megabytes."""
    q = torch.randn(64, 32, 128, device=CUDA).bfloat16()
    cache = torch.randn(64, 16, 8, 128, device=CUDA).bfloat16()
    starts, lens = torch.arange(65, dtype=torch.int32, device=CUDA), torch.full((64,), 900, dtype=torch.int32, device=CUDA)
    table = torch.arange(64, dtype=torch.int32, device=CUDA).repeat(64, 1)
    return lambda: imbrex.torch.paged_attention(q, cache, cache, starts, lens, table, 1, 65536)


def test_plans_go_with_their_graphs():
    call = big()
    call()
    graph, _ = capture(call)  # takes the plan of the call before
    before = used()
    graphs = [capture(call)[0] for _ in range(4)]
    with_graphs = used()
    assert with_graphs - before > 4 << 20
    for one in graphs:
        one.replay()
    torch.cuda.synchronize()
    del graphs, one
    gc.collect()
    small = Dense(16, 1)
    for _ in range(100):  # the driver tells of the end of a graph on a thread of its own
        small.call()
        _core.release_captured()
        if used() - before < (with_graphs - before) // 4:
            break
        threading.Event().wait(0.05)
    assert used() - before < (with_graphs - before) // 4
    graph.replay()
    torch.cuda.synchronize()


def test_a_failed_capture_leaves_nothing_behind():
    call, problem = big(), Paged(300, 11)
    call(), problem.call()
    with pytest.raises(RuntimeError):
        capture(lambda: (call(), torch.cuda.synchronize()))
    problem.check(problem.call())
    graph, out = capture(problem.call)
    graph.replay()
    torch.cuda.synchronize()
    problem.check(out)


def test_the_first_call_of_a_kind_is_refused_in_a_capture():
    problem = Paged(300, 12, heads=10)
    with pytest.raises(RuntimeError, match="once like this before a CUDA graph"):
        capture(problem.call)
    problem.call()
    graph, out = capture(problem.call)
    graph.replay()
    torch.cuda.synchronize()
    problem.check(out)


def test_a_call_with_lengths_on_the_host_is_refused_in_a_capture():
    problem = Dense(64, 13)
    rows = [x[0].transpose(0, 1).contiguous() for x in (problem.q, problem.k, problem.v)]
    host = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 64], dtype=torch.int32)
    imbrex.attention_varlen(*rows, *host)
    with pytest.raises(RuntimeError, match="lengths are on the host"):
        capture(lambda: imbrex.attention_varlen(*rows, *host))
    imbrex.attention_varlen(*rows, *host)


def test_plans_go_with_their_threads():
    call = big()
    call()

    def threads(count):
        for _ in range(count):
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

    threads(3)
    before = used()
    threads(12)
    assert used() - before < 16 << 20


def test_the_default_device_does_not_matter():
    problem = Dense(900, 14)
    _torch_attention._equal_on_host.cache_clear(), _torch_attention._equal_starts_on_host.cache_clear()
    torch.set_default_device("cuda")
    try:
        problem.check(problem.call())
        mask = torch.rand(2, 1, 1, 900) > 0.3
        near(imbrex.torch.attention(problem.q, problem.k, problem.v, mask), reference(problem.q, problem.k, problem.v, mask=mask)[0])
    finally:
        torch.set_default_device(None)
