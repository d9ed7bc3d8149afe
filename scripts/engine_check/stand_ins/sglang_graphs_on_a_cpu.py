"""A plug-in of SGLang for the engine checks, where GRAPHS_ON_A_CPU is set: SGLang's own runners of CUDA graphs, on a CPU. A graph is the function that was
captured, and a replay calls it again over the same buffers. imbrex plans from lengths on the device, as it does on GPUs. The file that the variable names
tells how many graphs each runner has captured and replayed.
"""

import collections
import contextlib
import os
import types

import torch

counts = collections.Counter()


def _count(what, runner):
    counts[f"{what} {type(runner).__name__}"] += 1
    with open(os.environ["GRAPHS_ON_A_CPU"], "w") as file:
        file.write("\n".join(f"{name}: {count}" for name, count in sorted(counts.items())))


@contextlib.contextmanager
def _set(owner, name, value):
    before = getattr(owner, name, None)
    if owner is not None:
        setattr(owner, name, value)
    try:
        yield
    finally:
        if owner is not None:
            setattr(owner, name, before)


def _graphs(contexts):
    class Graphs:
        """In the place of SGLang's FullCudaGraphBackend."""

        def __init__(self, runner):
            self.runner, self.captured = runner, {}

        @contextlib.contextmanager
        def capture_session(self, stream):
            yield

        @contextlib.contextmanager
        def replay_session(self):
            yield

        def capture_one(self, key, function, capture_inputs=None, post_warmup_hook=None):
            for _ in range(3):  # twice to warm up
                function()
                if post_warmup_hook is not None:
                    post_warmup_hook()
            self.captured[key] = function, contexts._current, getattr(self._adapters(), "batch_info", None)
            _count("captured", self.runner)

        def _adapters(self):
            """What says which rows go through an adapter (UNO's): a graph goes on doing what that said when it was captured."""
            return getattr(getattr(self.runner.model_runner, "lora_manager", None), "lora_backend", None)

        def can_run(self, batch, key):
            return key in self.captured

        def replay(self, key, batch, **ignored):
            _count("replayed", self.runner)
            function, context, rows = self.captured[key]
            model = getattr(self.runner, "layer_model", None)
            replaced = None if model is None else model.__dict__.pop("forward", None)  # by a call of replay(), in graphs of prefill
            before = contexts.set_forward_context(context)
            try:
                with _set(self._adapters(), "batch_info", rows):
                    return function()
            finally:
                contexts.set_forward_context(before)
                if replaced is not None:
                    model.forward = replaced

        def cleanup(self):
            self.captured.clear()

    return Graphs


def _put_graphs(decode, draft, extend, prefill, frozen):
    from sglang.srt.model_executor import forward_context
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend, enable_breakable_cuda_graph

    graphs = _graphs(forward_context)

    class Breakable(graphs, BreakableCudaGraphBackend):
        """In the place of graphs of prefill, between which attention runs."""

        def capture_session(self, stream):
            return enable_breakable_cuda_graph()

        def replay_session(self):
            return enable_breakable_cuda_graph()

    for module in (decode, draft, extend, frozen):
        module.resolve_decode_backend = graphs
    prefill.resolve_prefill_backend = Breakable
    for module in (decode, draft, extend, prefill):
        module.get_or_create_global_graph_capture_stream = torch.cpu.Stream
        module.graph_capture = lambda stream=None: contextlib.nullcontext(types.SimpleNamespace(stream=stream))
    torch.cpu.is_current_stream_capturing = lambda: False


def _admit_cpus(draft, extend):
    """What keeps SGLang's runners of graphs from CPUs."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup
    from sglang.srt.speculative import eagle_worker_v2, frozen_kv_mtp_worker_v2

    flags = cuda_graph_setup.get_flags

    def flags_seen():
        capture = types.SimpleNamespace(**{**vars(_fields(flags().capture)), "enable_torch_compile": True})
        return types.SimpleNamespace(**{**vars(_fields(flags())), "capture": capture})

    cuda_graph_setup.get_flags = flags_seen
    cuda_graph_setup.CPUGraphRunner = lambda runner: runner._decode_cuda_graph_runner_cls()(runner)
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    runners = iter([draft.EAGLEDraftCudaGraphRunner, extend.EAGLEDraftExtendCudaGraphRunner])  # as the worker asks for them
    eagle_worker_v2._select_spec_graph_runner_cls = lambda **ignored: next(runners)
    eagle_worker_v2._is_cpu = False
    frozen = frozen_kv_mtp_worker_v2.FrozenKVMTPDraftWorker
    frozen._capture_cuda_graphs = _seen_on_a_gpu(frozen._capture_cuda_graphs)


def _seen_on_a_gpu(capture):
    def seen(worker):
        with _set(worker.target_worker, "device", "cuda"):
            capture(worker)

    return seen


def _fields(view):
    return types.SimpleNamespace(**{name: getattr(view, name) for name in dir(view) if not name.startswith("_")})


def _keep_off_padding():
    """As SGLang's kernel for new keys on GPUs, which does not write to slot 0."""
    from sglang.srt.mem_cache import memory_pool

    write = memory_pool._set_kv_buffer_impl

    def keeping_off(k, v, k_cache, v_cache, slots, *rest, **options):
        kept = slots != 0
        write(k[kept], v[kept], k_cache, v_cache, slots[kept], *rest, **options)

    memory_pool._set_kv_buffer_impl = keeping_off


def _plan_on_the_device():
    """As imbrex does on GPUs with drafts."""
    import imbrex
    from imbrex.sglang import backend

    plain, make_plan = backend.Backend.__init__, backend.make_plan

    def update_on_device(plan, starts, lens, *, max_num_tokens, **arrays):
        assert starts.dtype == lens.dtype == torch.int32 and max_num_tokens >= int(starts[-1])
        plan.update(starts, lens, **arrays)

    def init(self, runner):
        plain(self, runner)
        self.on_device, self.needs_cpu_seq_lens = True, False

    imbrex.Plan.update_on_device = update_on_device
    backend.Backend.__init__ = init
    backend.make_plan = lambda *arguments, on_device, **limits: make_plan(*arguments, **limits)


def register():
    if not os.environ.get("GRAPHS_ON_A_CPU"):
        return
    from sglang.srt.model_executor.runner import decode_cuda_graph_runner as decode
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as prefill
    from sglang.srt.speculative import eagle_draft_cuda_graph_runner as draft
    from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as extend
    from sglang.srt.speculative import frozen_kv_mtp_cuda_graph_runner as frozen

    _put_graphs(decode, draft, extend, prefill, frozen)
    _admit_cpus(draft, extend)
    _keep_off_padding()
    _plan_on_the_device()
