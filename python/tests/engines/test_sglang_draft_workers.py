"""Draft workers of SGLang with imbrex, against a stand-in of it: the steps that decode branches of drafts, and the extend in front of them."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from serving import check  # noqa: E402
from sglang_runner import Runner, prefilled  # noqa: E402
from test_sglang import MODELS, on  # noqa: E402

pytestmark = pytest.mark.usefixtures("sglang")

LENGTHS = (37, 61, 20)


def draft_runner(device, layers, **changes):
    runner = Runner(device, on(device, layers), is_draft_worker=True, draft_attention_backend="imbrex", speculative=True, **changes)
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    return runner


def factory_of(runner, topk=1, num_steps=3):
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    return DraftBackendFactory(runner, topk, num_steps)


class Branches:
    """Rounds of a draft model's steps, in the order of SGLang's worker. graph_reqs: of so many requests, in a graph."""

    def __init__(self, runner, topk, num_steps, graph_reqs=0):
        self.runner, self.topk, self.num_steps, self.graph_reqs = runner, topk, num_steps, graph_reqs
        self.steps = factory_of(runner, topk, num_steps).create_decode_backend()
        assert len(self.steps.attn_backends) == num_steps - 1
        assert {x.decode_attention_backend_str for x in (self.steps, *self.steps.attn_backends)} == {"imbrex"}
        if graph_reqs:
            self._capture()

    def places(self, request):
        """Positions in the request's row of each branch's drafts, [topk, num_steps], behind the committed tokens; their slots are in the row."""
        size, length = self.runner.page_size, request.computed
        if size == 1 or self.topk == 1:
            self.runner.slots(request, self.topk * self.num_steps)
            return length + torch.arange(self.topk * self.num_steps).view(self.topk, self.num_steps)
        last, whole = length % size, length // size * size
        own = -(-(last + self.num_steps) // size) * size
        self.runner.slots(request, whole + self.topk * own - length)
        row = self.runner.req_to_token_pool.req_to_token[self.runner.rows[request.name]].tolist()
        for branch in range(1, self.topk):  # the worker copies committed tokens of the last page in front of each branch's drafts
            for offset in range(last):
                for buffer in self.runner.token_to_kv_pool.k_buffer + self.runner.token_to_kv_pool.v_buffer:
                    buffer[row[whole + branch * own + offset]] = buffer[row[whole + offset]]
        return whole + own * torch.arange(self.topk)[:, None] + last + torch.arange(self.num_steps)

    def batch(self, rows, lens, slots):
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        info = SimpleNamespace(num_tokens_per_req=self.topk)
        return ForwardBatch(ForwardMode.DECODE, len(rows), None, rows, lens, slots, None, seq_lens_cpu=lens.cpu(), spec_info=info)

    def inputs(self, num_reqs):
        """For each step and layer q, k and v of all branches."""
        n, device, dtype = num_reqs * self.topk, self.runner.device, self.runner.dtype

        def tensor(heads, dim):
            return torch.randn(n, heads, dim, device=device).to(dtype)

        shapes = [((x.tp_q_head_num, x.qk_head_dim), (x.tp_k_head_num, x.qk_head_dim), (x.tp_v_head_num, x.v_head_dim)) for x in self.runner.layers]
        return [[tuple(tensor(*shape) for shape in of_layer) for of_layer in shapes] for _ in range(self.num_steps - 1)]

    def forward(self, batch, slots, inputs):
        """All steps; slots [requests, topk, num_steps]."""
        outputs = []
        for i, (backend, of_step) in enumerate(zip(self.steps.attn_backends, inputs)):
            batch.out_cache_loc = slots.permute(2, 0, 1).reshape(self.num_steps, -1)[i]
            sinks = [{} if o.get("sinks") is None else {"sinks": o["sinks"]} for o in self.runner.options]
            outputs.append([x(q.flatten(1), k, v, batch, backend, **s) for x, s, (q, k, v) in zip(self.runner.layers, sinks, of_step)])
        return outputs

    def _capture(self):
        n, device = self.graph_reqs, self.runner.device
        self.steps.init_cuda_graph_state(n, n * self.topk)
        fill = self.steps.attn_backends[0].get_cuda_graph_seq_len_fill_value()
        self.rows, self.lens = torch.zeros(n, dtype=torch.int64, device=device), torch.full((n,), fill, dtype=torch.int64, device=device)
        self.slots = torch.zeros(n, self.topk, self.num_steps, dtype=torch.int64, device=device)
        self.static = self.inputs(n)
        batch = self.batch(self.rows, self.lens, self.slots.view(-1))
        if device == "cpu" and not self.steps.on_device:
            batch.seq_lens_cpu = None  # the host does not know what a replay will have

        def run():
            self.steps.init_forward_metadata_in_graph(batch)
            return self.forward(batch, self.slots, self.static)

        self.steps.init_forward_metadata_out_graph(batch, in_capture=True)
        run(), run()
        self.run, self.graph = run, None
        if device == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = run()

    def _replay(self, batch, slots, inputs):
        """Buffers and padding are filled; the batch itself has tensors of its own where there is no padding."""
        n = batch.batch_size
        self.rows.zero_(), self.slots.zero_(), self.lens.fill_(1)
        self.rows[:n], self.lens[:n], self.slots[:n] = batch.req_pool_indices, batch.seq_lens, slots
        for of_step, fresh in zip(self.static, inputs):
            for static, tensors in zip(of_step, fresh):
                for a, b in zip(static, tensors):
                    a[: len(b)] = b
        padding = self.graph_reqs - n
        if padding:
            batch.batch_size, batch.req_pool_indices, batch.seq_lens = self.graph_reqs, self.rows, self.lens
        self.steps.init_forward_metadata_out_graph(SimpleNamespace(**vars(batch), num_padding=padding))
        if self.graph is None:
            return self.run()
        self.graph.replay()
        return self.outputs

    def round(self, requests, **changes):
        """Drafts behind what each request has; they are not committed."""
        runner, device = self.runner, self.runner.device
        places = [self.places(r) for r in requests]
        rows = torch.tensor([runner.rows[r.name] for r in requests], device=device)
        lens = torch.tensor([r.computed for r in requests], device=device)
        slots = torch.stack([runner.req_to_token_pool.req_to_token[row][p.to(device)] for row, p in zip(rows, places)]).long()
        inputs, batch = self.inputs(len(requests)), self.batch(rows, lens, slots.view(-1))
        for name, value in changes.items():
            setattr(batch, name, value)
        if self.graph_reqs:
            outputs = self._replay(batch, slots, inputs)
        else:
            self.steps.init_forward_metadata(batch)
            outputs = self.forward(batch, slots, inputs)
        recent, first = getattr(runner, "draft_window", (0, 0))
        for i, of_step in enumerate(outputs):
            for index, (layer, out) in enumerate(zip(runner.layers, of_step)):
                out, options = out.view(out.shape[0], layer.tp_q_head_num, -1), runner.options[index]
                for row in range(len(requests) * self.topk):
                    request = requests[row // self.topk]
                    own = [torch.stack([inputs[s][index][side][row] for s in range(i + 1)]) for side in (1, 2)]
                    keys, values = (torch.cat([x[: request.computed], y]) for x, y in zip((request.keys[index], request.values[index]), own))
                    if recent and request.computed > recent + first:
                        seen = [*range(first), *range(request.computed - recent, len(keys))]
                        keys, values = keys[seen], values[seen]
                    check(
                        out[row : row + 1],
                        inputs[i][index][0][row : row + 1],
                        keys,
                        values,
                        runner.dtype,
                        f"step {i}, layer {index}, branch {row}",
                        causal=True,
                        scale=layer.scaling,
                        window_left=options.get("sliding_window_size", -1),
                        soft_cap=options.get("logit_cap", 0.0),
                        sinks=None if options.get("sinks") is None else options["sinks"].float().cpu().numpy(),
                    )


def rounds(branches, requests):
    """The target keeps some drafts between rounds, so that requests grow."""
    branches.round(requests)
    branches.runner.step([(r, n) for r, n in zip(requests, (1, 3, 2))])
    branches.round(requests[:2])
    branches.runner.step([(r, 4) for r in requests])
    branches.round(requests)


@pytest.mark.parametrize("graph_reqs", [0, 3])
@pytest.mark.parametrize("topk, num_steps", [(1, 4), (3, 3), (2, 6)])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_branches(device, page_size, topk, num_steps, graph_reqs):
    runner = draft_runner(device, [{}, {}], page_size=page_size)
    requests = prefilled(runner, LENGTHS)
    rounds(Branches(runner, topk, num_steps, graph_reqs), requests)


@pytest.mark.parametrize("graph_reqs", [0, 3])
@pytest.mark.parametrize("topk, page_size", [(1, 16), (3, 4), (2, 1)])
def test_branches_planned_on_the_gpu(device, on_device, topk, page_size, graph_reqs):
    """A graph holds the plans of all steps; between replays tables alone are filled, as far as lengths may go."""
    runner = draft_runner(device, [{}, {}], page_size=page_size)
    requests = prefilled(runner, LENGTHS)
    branches = Branches(runner, topk, 4, graph_reqs)
    assert branches.steps.on_device and not branches.steps.needs_cpu_seq_lens
    rounds(branches, requests)
    branches.round(requests, max_seq_len_host=max(r.computed for r in requests))


@pytest.mark.parametrize("name", ["soft cap", "sinks", "windows", "all together"])
def test_masks_of_branches(device, name):
    runner = draft_runner(device, MODELS[name], page_size=4)
    rounds(Branches(runner, 2, 4), prefilled(runner, LENGTHS))


@pytest.mark.parametrize("window", [(16, 0), (16, 4), (30, 10)])
def test_a_window_over_committed_tokens(device, window):
    runner = draft_runner(device, [{}], draft_window=window)
    rounds(Branches(runner, 2, 4), prefilled(runner, LENGTHS))


def extends(runner, requests, width, seed=0):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    info = SimpleNamespace(num_tokens_per_req=width, num_front_tokens=0)
    runner.step([(r, width) for r in requests], mode=ForwardMode.DRAFT_EXTEND_V2, spec_info=info)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["plain", "windows", "all together"])
@pytest.mark.parametrize("graph", [False, True])
def test_extend(device, name, page_size, graph):
    run_extend(device, name, page_size, graph)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("graph", [False, True])
def test_extend_planned_on_the_gpu(device, on_device, page_size, graph):
    runner = run_extend(device, "windows", page_size, graph)
    assert runner.attn_backend.draft_extend_metadata_captured_in_graph()


def run_extend(device, name, page_size, graph):
    """A graph's padding is requests of one token, which extend by as many as the others."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = draft_runner(device, MODELS[name], page_size=page_size)
    runner.attn_backend = factory_of(runner).create_draft_extend_backend()
    requests = prefilled(runner)
    if graph:
        runner.capture(4, mode=ForwardMode.DRAFT_EXTEND_V2, width=5, spec_info=SimpleNamespace(num_tokens_per_req=5, num_front_tokens=0))
    extends(runner, requests, 5)
    extends(runner, requests[1:], 5)
    runner.step([(requests[0], 2)])
    extends(runner, requests, 5)
    return runner


def test_sglang_makes_the_backends(device):
    """Of other names as before; of a step that samples alone there is none."""
    from sglang.srt.server_args import DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.speculative import eagle_worker_v2

    runner = draft_runner(device, [{}])
    assert DRAFT_ATTENTION_BACKEND_CHOICES.count("imbrex") == 1
    worker = eagle_worker_v2.EagleDraftWorker()
    assert factory_of(runner, 1, 1).create_decode_backend() is None
    for _ in range(2):
        extend = factory_of(runner).create_draft_extend_backend()
        assert type(extend).__name__ == "Backend" and extend.decode_attention_backend_str == "imbrex" and worker.captures_draft_extend(extend)
    assert not worker.captures_draft_extend(runner) and worker.captures_draft_extend(eagle_worker_v2.TritonAttnBackend[0]())
    runner.draft_attention_backend = "another"
    with pytest.raises(ValueError, match="EAGLE is not supported in another"):
        factory_of(runner).create_decode_backend()


def test_trees_over_pages_are_admitted(sglang):
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.arg_groups.resolution_hooks import run_hook

    import imbrex.sglang

    def resolved(algorithm, backend="imbrex"):
        args = SimpleNamespace(speculative_algorithm=algorithm, speculative_eagle_topk=4, page_size=16, attention_backend=backend)
        run_hook(speculative_hook.handle_speculative_decoding, args)
        return args

    with pytest.raises(ValueError, match="got 'imbrex'"):
        resolved("EAGLE")
    imbrex.sglang.register()
    plain = speculative_hook.resolved_view, speculative_hook._handle_eagle_family
    assert resolved("EAGLE").attention_backend == "imbrex" and resolved("DFLASH").draft == "imbrex"
    with pytest.raises(ValueError, match="got 'flashmla'"):
        resolved("EAGLE", "flashmla")
    assert plain == (speculative_hook.resolved_view, speculative_hook._handle_eagle_family)


def test_uno_may_have_imbrex(sglang):
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.arg_groups.resolution_hooks import run_hook

    import imbrex.sglang

    def resolved(prefill, decode):
        backends = dict(attention_backend="imbrex", prefill_attention_backend=prefill, decode_attention_backend=decode)
        run_hook(speculative_hook.handle_speculative_decoding, SimpleNamespace(speculative_algorithm="UNO", **backends))

    with pytest.raises(ValueError, match="prefill='imbrex', decode='imbrex'"):
        resolved(None, None)
    imbrex.sglang.register()
    plain = speculative_hook.attention_backends_of, speculative_hook._handle_uno
    resolved(None, None), resolved("fa3", None), resolved(None, "fa3")
    with pytest.raises(ValueError, match="decode='triton'"):
        resolved(None, "triton")
    assert plain == (speculative_hook.attention_backends_of, speculative_hook._handle_uno)


def test_what_may_be_glued(device, on_device):
    """SGLang may capture what comes before a replay where all of it is on the GPU; tables are then as wide as they may become."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_spec

    chain = SimpleNamespace(draft_token_num=4, custom_mask=None, topk=1)
    runner = Runner(device, [{}], speculative=True)
    requests = prefilled(runner)
    backend = runner.attn_backend
    get_spec().speculative_eagle_topk = 4
    assert "links between the drafts of a tree" in backend.glue_target_verify_metadata()
    get_spec().speculative_eagle_topk = None

    def table(**changes):
        runner.capture(3, mode=ForwardMode.TARGET_VERIFY, width=4, spec_info=chain)
        runner.step([(r, 4) for r in requests], mode=ForwardMode.TARGET_VERIFY, spec_info=chain, **changes)
        return backend.forward_metadata.table.shape[1]

    assert table(max_seq_len_host=100) == 104
    assert backend.glue_draft_metadata() == backend.glue_target_verify_metadata() == ""
    assert table(max_seq_len_host=100) == backend.max_keys
    backend.on_device = False
    assert backend.glue_draft_metadata() == "imbrex plans from lengths on the host"
