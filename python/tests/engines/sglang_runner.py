"""A small model runner in the order of SGLang's: pools, backend, metadata once a step, layers; graphs with buffers of their own."""

from types import SimpleNamespace

import numpy as np
import torch
from serving import Request, check, rounded


class Translator:
    is_translating = False


class Runner:
    """What a backend's factory is given, and the loop around it. `layers`: arguments of RadixAttention, one dict each; sinks among them."""

    def __init__(
        self,
        device,
        layers,
        *,
        dtype=torch.bfloat16,
        kv_dtype="auto",
        page_size=1,
        layout="nhd",
        scales=None,
        heads=(8, 2, 64),
        v_head_dim=None,
        speculative=False,
        pool=None,
        **changes,
    ):
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

        import imbrex.sglang

        imbrex.sglang.register()
        assert "imbrex" in ATTENTION_BACKEND_CHOICES
        self.device, self.gpu_id, self.dtype, self.page_size, self.kv_dtype = device, 0, dtype, page_size, kv_dtype
        self.scales, self.options = scales or (1.0, 1.0), layers
        stored = dtype if kv_dtype == "auto" else {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kv_dtype]
        self.req_to_token_pool = ReqToTokenPool(12, 320, device)
        self.token_to_kv_pool = pool or MHATokenToKVPool(
            48 * 16, page_size, stored, heads[1], heads[2], len(layers), device, v_head_dim, kv_cache_layout=layout
        )
        self.model_config = SimpleNamespace(is_encoder_decoder=False, context_len=256)
        self.use_mla_backend = self.is_draft_worker = self.prompts = False
        self.attention_chunk_size = None
        self.spec_algorithm = SimpleNamespace(is_speculative=lambda: speculative)
        self.kv_index_translator = Translator()
        for name, value in changes.items():
            setattr(self, name, value)
        self.layers = []
        for index, options in enumerate(layers):
            options = {**dict(num_heads=heads[0], head_dim=heads[2], scaling=heads[2] ** -0.5, num_kv_heads=heads[1]), **options}
            options.pop("sinks", None)
            temperature = options.pop("xai_temperature_len", -1)  # models set it behind
            layer = RadixAttention(layer_id=index, v_head_dim=v_head_dim or -1, **options)
            layer.xai_temperature_len = temperature
            if scales is not None:
                layer.k_scale, layer.v_scale = (torch.tensor([x], device=device) for x in scales)
                layer.k_scale_float, layer.v_scale_float = scales
            self.layers.append(layer)
        self.attn_backend = ATTENTION_BACKENDS["imbrex"](self)
        self.free_rows = list(range(1, 13))
        pages = torch.randperm(48 * 16 // page_size).add(1)  # page 0 is for padding
        self.free_pages, self.rows, self.pages, self.num_steps, self.graph = pages.tolist(), {}, {}, 0, None
        self.req_to_token_pool.req_to_token[1:] = 48 * 16 + page_size - 1  # a slot that is there, but nobody's

    def request(self, name, length):
        request = Request(name, length, [(x.tp_k_head_num, x.qk_head_dim, x.v_head_dim) for x in self.layers], self.dtype, self.device)
        self.rows[name], self.pages[name] = self.free_rows.pop(0), []
        return request

    def release(self, request):
        """Its slots are poisoned for whoever gets them next; the request may begin anew."""
        for page in self.pages[request.name]:
            for buffer in self.token_to_kv_pool.k_buffer + self.token_to_kv_pool.v_buffer:
                at = page if buffer.dim() == 4 else slice(page * self.page_size, (page + 1) * self.page_size)
                buffer[at] = 0x7F if buffer.dtype == torch.uint8 else float("nan")
        self.free_pages += self.pages[request.name]
        self.pages[request.name], request.computed = [], 0

    def slots(self, request, count):
        """Of the next tokens; they enter the request's row."""
        pages, size = self.pages[request.name], self.page_size
        while len(pages) * size < request.computed + count:
            pages.append(self.free_pages.pop(0))
        slots = [pages[p // size] * size + p % size for p in range(request.computed, request.computed + count)]
        row = self.rows[request.name]
        self.req_to_token_pool.write(
            (row, slice(request.computed, request.computed + count)), torch.tensor(slots, dtype=torch.int32, device=self.device)
        )
        return slots

    def batch(self, mode, scheduled, pad_reqs=0, **changes):
        """pad_reqs: requests of padding, in row 0 and slot 0, one token each."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        verify = mode == ForwardMode.TARGET_VERIFY
        counts = [n for _, n in scheduled]
        lens = [r.computed + (0 if verify else n) for r, n in scheduled] + [1] * pad_reqs
        slots = [s for r, n in scheduled for s in self.slots(r, n)] + [0] * pad_reqs
        fields = dict(
            forward_mode=mode,
            batch_size=len(lens),
            input_ids=None,
            req_pool_indices=torch.tensor([self.rows[r.name] for r, _ in scheduled] + [0] * pad_reqs, device=self.device),
            seq_lens=torch.tensor(lens, dtype=torch.int64, device=self.device),
            seq_lens_cpu=torch.tensor(lens, dtype=torch.int64),
            out_cache_loc=torch.tensor(slots, dtype=torch.int64, device=self.device),
            seq_lens_sum=sum(lens),
        )
        if mode in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL):
            fields.update(
                extend_num_tokens=sum(counts),
                extend_seq_lens=torch.tensor(counts, dtype=torch.int32, device=self.device),
                extend_prefix_lens=torch.tensor([r.computed for r, _ in scheduled], dtype=torch.int32, device=self.device),
                extend_seq_lens_cpu=counts,
                extend_prefix_lens_cpu=[r.computed for r, _ in scheduled],
            )
        return ForwardBatch(**{**fields, **changes})

    def inputs(self, scheduled, padding=0):
        made, total = [], sum(n for _, n in scheduled) + padding
        for index, layer in enumerate(self.layers):
            q = torch.randn(total, layer.tp_q_head_num, layer.qk_head_dim, device=self.device).to(self.dtype)
            k = torch.zeros(total, layer.tp_k_head_num, layer.qk_head_dim, dtype=self.dtype, device=self.device)
            v = torch.zeros(total, layer.tp_v_head_num, layer.v_head_dim, dtype=self.dtype, device=self.device)
            at = 0
            for request, count in scheduled:
                k[at : at + count] = request.keys[index][request.computed : request.computed + count]
                v[at : at + count] = request.values[index][request.computed : request.computed + count]
                at += count
            made.append((q, k, v))
        return made

    def forward(self, batch, inputs):
        outputs = []
        for layer, options, (q, k, v) in zip(self.layers, self.options, inputs):
            given = {} if options.get("sinks") is None else {"sinks": options["sinks"]}
            before = k.clone(), v.clone()
            outputs.append(layer(q.reshape(q.shape[0], -1), k, v, batch, self.attn_backend, **given))
            assert torch.equal(k, before[0]) and torch.equal(v, before[1])  # the model's own tensors
        return outputs

    def step(self, scheduled, mode=None, pad_reqs=0, masks=None, depths=None, **changes):
        """Runs [(request, number of new tokens)] through every layer and checks every output. masks: [new, keys] of each request. depths: of
        each request's new tokens in a tree, by which windows go."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        counts = [n for _, n in scheduled]
        if mode is None:
            mode = ForwardMode.DECODE if max(counts) == 1 else ForwardMode.MIXED if min(counts) == 1 else ForwardMode.EXTEND
        if self.graph is not None and mode == self.graph.mode:
            outputs, inputs = self._replay(scheduled, mode, **changes)
        else:
            batch, inputs = self.batch(mode, scheduled, pad_reqs, **changes), self.inputs(scheduled, pad_reqs)
            self.attn_backend.init_forward_metadata(batch)
            outputs = self.forward(batch, inputs)
        self.prompts = mode.is_extend() and mode != ForwardMode.TARGET_VERIFY
        for index, (layer, out) in enumerate(zip(self.layers, outputs)):
            self._check(index, layer, out.view(out.shape[0], layer.tp_q_head_num, layer.v_head_dim), inputs[index][0], scheduled, masks, depths)
        for request, count in scheduled:
            request.computed += count
        self.num_steps += 1

    def _check(self, index, layer, out, q, scheduled, masks, depths=None):
        options, at = self.options[index], 0
        for row, (request, count) in enumerate(scheduled):
            seen = request.computed + count
            window, mask = options.get("sliding_window_size", -1), None if masks is None else masks[row]
            if depths is not None and window >= 0:
                position = np.concatenate([np.arange(request.computed), request.computed + np.asarray(depths[row])])
                mask = mask & (position >= position[request.computed :, None] - window)
                window = -1
            kind, length = layer.attn_type.value, layer.xai_temperature_len
            causal = kind == "decoder" or (kind == "decoder_bidirectional" and not self.prompts)
            position = request.computed + np.arange(count)
            check(
                out[at : at + count],
                q[at : at + count],
                rounded(request.keys[index][:seen], self.kv_dtype, self.scales[0]),
                rounded(request.values[index][:seen], self.kv_dtype, self.scales[1]),
                self.dtype,
                f"step {self.num_steps}, layer {index}, {request.name}",
                causal=causal,
                scale=layer.scaling,
                window_left=window,
                window_right=-1 if causal else window,
                chunk=self.attention_chunk_size if layer.use_irope else 0,
                temperature=np.where(position > length, np.log2(np.maximum(position, 1)) / np.log2(length), 1.0) if length > 1 else None,
                soft_cap=options.get("logit_cap", 0.0),
                sinks=None if options.get("sinks") is None else options["sinks"].float().cpu().numpy(),
                mask=mask,
            )
            at += count

    # Graphs.

    def capture(self, max_bs, mode=None, width=1, spec_info=None, encoder_lens=None):
        """As SGLang's runner: a batch of padding, metadata out of the graph, two runs to warm up, and the capture."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        backend, device = self.attn_backend, self.device
        backend.init_cuda_graph_state(max_bs, max_bs * width)
        fill = backend.get_cuda_graph_seq_len_fill_value()
        mode, tokens = mode or ForwardMode.DECODE, max_bs * width
        buffers = SimpleNamespace(
            rows=torch.zeros(max_bs, dtype=torch.int64, device=device),
            lens=torch.full((max_bs,), fill, dtype=torch.int64, device=device),
            lens_cpu=torch.full((max_bs,), fill, dtype=torch.int64),
            slots=torch.zeros(tokens, dtype=torch.int64, device=device),
        )
        batch = ForwardBatch(
            mode, max_bs, None, buffers.rows, buffers.lens, buffers.slots, max_bs * fill, seq_lens_cpu=buffers.lens_cpu, spec_info=spec_info
        )
        batch.encoder_lens = encoder_lens
        inputs = self.inputs([], tokens)

        def run():
            backend.init_forward_metadata_in_graph(batch)
            return [
                layer(q.view(tokens, -1), k, v, batch, backend, **({} if o.get("sinks") is None else {"sinks": o["sinks"]}))
                for layer, o, (q, k, v) in zip(self.layers, self.options, inputs)
            ]

        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        run(), run()
        backend.on_after_cuda_graph_warmup()
        graph, outputs = None, None
        if device == "cuda":
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = run()
        self.graph = SimpleNamespace(
            graph=graph, run=run, outputs=outputs, inputs=inputs, buffers=buffers, mode=mode, max_bs=max_bs, width=width, fill=fill
        )

    def _replay(self, scheduled, mode, **changes):
        """Buffers are filled, the rest of them with padding; metadata is made of a view of them, and the graph replayed."""
        g = self.graph
        live, count = self.batch(mode, scheduled, **changes), len(scheduled)
        g.buffers.rows.zero_(), g.buffers.slots.zero_(), g.buffers.lens.fill_(g.fill), g.buffers.lens_cpu.fill_(g.fill)
        g.buffers.rows[:count] = live.req_pool_indices
        g.buffers.lens[:count] = live.seq_lens
        g.buffers.slots[: count * g.width] = live.out_cache_loc
        if live.seq_lens_cpu is not None:
            g.buffers.lens_cpu[:count] = live.seq_lens_cpu
        view = SimpleNamespace(
            batch_size=g.max_bs,
            forward_mode=mode,
            req_pool_indices=g.buffers.rows,
            seq_lens=g.buffers.lens,
            seq_lens_cpu=None if live.seq_lens_cpu is None else g.buffers.lens_cpu,
            out_cache_loc=live.out_cache_loc,
            encoder_lens=live.encoder_lens,
            spec_info=live.spec_info,
            num_padding=g.max_bs - count,
            max_seq_len_host=live.max_seq_len_host,
        )
        inputs = self.inputs(scheduled, (g.max_bs - count) * g.width)
        for static, fresh in zip(g.inputs, inputs):
            for a, b in zip(static, fresh):
                if b is not None:
                    a.copy_(b)
        self.attn_backend.init_forward_metadata_out_graph(view)
        if g.graph is None:  # a CPU has no graphs: the same launches again
            return g.run(), inputs
        g.graph.replay()
        return g.outputs, inputs


def serve(runner):
    """Prefill, a chunked prompt, decode, mixed and padded steps, idle ones, a preempted request that begins anew, one that ends."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    a, b, c, d = (runner.request(name, length) for name, length in zip("abcd", (60, 150, 24, 33)))
    runner.step([(a, 37)])
    runner.step([(a, 1), (b, 50)])
    runner.step([(b, 40), (a, 1), (c, 17)])
    idle(runner)
    runner.step([(a, 1), (c, 1), (b, 30)])
    runner.step([(a, 1), (c, 1), (b, 1)])
    runner.step([(a, 1), (c, 1), (b, 1)], **({} if runner.graph else {"pad_reqs": 5}))
    runner.release(c)
    runner.step([(d, 32)], mode=ForwardMode.SPLIT_PREFILL)
    runner.step([(d, 1), (a, 1)])
    runner.step([(c, 20), (b, 4)])
    runner.step([(a, 1), (b, 1), (c, 1)])
    runner.release(a)
    runner.step([(b, 2)])
    assert runner.num_steps == 11


def idle(runner):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = runner.batch(ForwardMode.IDLE, [])
    runner.attn_backend.init_forward_metadata(batch)
    for layer, (q, k, v) in zip(runner.layers, runner.inputs([])):
        out = layer(q.view(0, -1) if q.numel() else q.reshape(0, layer.tp_q_head_num * layer.qk_head_dim), k, v, batch, runner.attn_backend)
        assert out.shape == (0, layer.tp_q_head_num * layer.v_head_dim)


class VerifyInput:
    """As EagleVerifyInput: links between the tokens of trees [requests, width], and a mask. Without trees it has no links, as other
    plug-ins' may, and a mask of all keys for each draft token, request after request."""

    def __init__(self, width, mask=None, topk=4, trees=None, device="cpu"):
        self.draft_token_num, self.custom_mask, self.tree_topk = width, mask, topk
        if trees is not None:
            self.retrieve_next_token, self.retrieve_next_sibling = links_of(trees, device)
            self.custom_mask = torch.ones(len(trees) * width * width, dtype=torch.bool, device=device)  # not to be read


def links_of(trees, device):
    """As SGLang's kernel makes them of parents [requests, width], 0 for the first token: each token's first child and next sibling, or -1."""
    child, sibling = (torch.full((len(trees), len(trees[0])), -1) for _ in range(2))
    for r, parents in enumerate(trees):
        for token in range(len(parents) - 1, 0, -1):
            sibling[r, token] = child[r, parents[token]]
            child[r, parents[token]] = token
    return child.to(device), sibling.to(device)


def random_trees(count, width, seed=3):
    """Parents [count, width] of each token, 0 of the first."""
    generator = torch.Generator().manual_seed(seed)
    return [[0] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, width)] for _ in range(count)]


def seen_in(parents):
    """Which tokens of a tree are ancestors of which, the token itself included."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for i in range(1, len(parents)):
        seen[i] |= seen[parents[i]]
    return seen


def depths_of(trees):
    return [(seen_in(parents).sum(1) - 1).numpy() for parents in trees]


def masks_of(requests, width, device, tail=0, trees=None):
    """For each request, and flat as SGLang has them, with `tail` bytes behind."""
    trees = trees or random_trees(len(requests), width)
    rows = [torch.cat([torch.ones(width, r.computed, dtype=torch.bool), seen_in(parents)], 1) for r, parents in zip(requests, trees)]
    flat = torch.cat([m.reshape(-1) for m in rows] + [torch.ones(tail, dtype=torch.bool)])
    return [m.numpy() for m in rows], flat.to(device)


def prefilled(runner, lengths=(37, 61, 20)):
    requests = [runner.request(n, s + 20) for n, s in zip("abc", lengths)]
    runner.step([(r, s) for r, s in zip(requests, lengths)])
    return requests


def first_step(runner):
    runner.step([(runner.request("a", 20), 20)])
