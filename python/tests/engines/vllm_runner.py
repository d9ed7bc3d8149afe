"""A small model runner in the order of vLLM's: layers, weights, profiling, groups, builders, pages, then steps with persistent buffers."""

import torch
from serving import Request, check, rounded

NULL_BLOCK = 0


class Group:
    def __init__(self, names, layers, spec):
        self.names, self.layers, self.spec = names, layers, spec
        self.window = getattr(spec, "sliding_window", None)
        self.free, self.tables = [], {}


class Runner:
    """`layers`: arguments of Attention, one dict each; `scales`: (k, v) of fp8 caches."""

    def __init__(
        self,
        device,
        layers,
        *,
        dtype=torch.bfloat16,
        kv_dtype="auto",
        layout=None,
        one_group=False,
        num_blocks=40,
        padding=0,
        block_size=16,
        scales=(1.0, 1.0),
        speculative=None,
        settings=None,
        backend=None,
        bind=True,
        heads=(8, 2, 64),
        cudagraph_mode="NONE",
        model=None,
    ):
        import vllm.config
        import vllm.platforms
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        from vllm.v1.kv_cache_layout import KVCacheLayout

        import imbrex.vllm

        imbrex.vllm.register()
        vllm.platforms.current_platform.kind = device
        self.device, self.dtype, self.kv_dtype, self.num_blocks, self.scales = torch.device(device), dtype, kv_dtype, num_blocks, scales
        self.config = vllm.config.VllmConfig(
            model_config=vllm.config.ModelConfig(*heads, dtype=dtype, **model or {}),
            cache_config=vllm.config.CacheConfig(block_size=block_size, cache_dtype=kv_dtype),
            compilation_config=vllm.config.CompilationConfig(cudagraph_mode=vllm.config.CUDAGraphMode[cudagraph_mode]),
            speculative_config=speculative,
            additional_config={} if settings is None else {"imbrex": settings},
            attention_config=vllm.config.AttentionConfig(backend=backend or AttentionBackendEnum.CUSTOM),
        )
        torch.set_default_dtype(dtype)
        try:
            with vllm.config.set_current_vllm_config(self.config), torch.device(self.device):
                self.layers = []
                for index, options in enumerate(layers):
                    options = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_size": heads[2], "scale": heads[2] ** -0.5, **options}
                    self.layers.append(Attention(prefix=f"layers.{index}", **options))
        finally:
            torch.set_default_dtype(torch.float32)
        self.options = layers
        for layer in self.layers:
            layer._k_scale.data = torch.as_tensor(scales[0], dtype=torch.float32, device=self.device)
            layer._v_scale.data = torch.as_tensor(scales[1], dtype=torch.float32, device=self.device)
            layer.process_weights_after_loading(dtype)
        self._profile()
        layouts = self.layers[0].attn_backend.supported_kv_cache_layouts() or tuple(KVCacheLayout)
        self.layout = KVCacheLayout[layout] if layout else layouts[0]
        assert self.layout in layouts
        self.config.cache_config.kv_cache_layout = self.layout.name
        self._make_groups(one_group)
        self.builders = [g.layers[0].attn_backend.get_builder_cls()(g.spec, g.names, self.config, self.device) for g in self.groups]
        limits = self.config.scheduler_config
        width = -(-self.config.model_config.max_model_len // block_size)
        self.query_start_loc = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int32, device=self.device)
        self.seq_lens = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=self.device)
        self.tables = [torch.zeros(limits.max_num_seqs, width, dtype=torch.int32, device=self.device) for _ in self.groups]
        self.slots = [torch.zeros(limits.max_num_batched_tokens, dtype=torch.int64, device=self.device) for _ in self.groups]
        self.graph, self.num_steps = None, 0
        if bind:
            self.bind(padding)

    def _profile(self):
        """Before there are pages: no metadata, no slots."""
        for layer in self.layers:
            q = torch.randn(4, layer.num_heads * layer.head_size, device=self.device, dtype=self.dtype)
            k = torch.randn(4, layer.num_kv_heads * layer.head_size, device=self.device, dtype=self.dtype)
            v = torch.randn(4, layer.num_kv_heads * layer.head_size_v, device=self.device, dtype=self.dtype)
            assert (self.forward(layer, q, k, v, None, None) == 0).all()

    def forward(self, layer, q, k, v, metadata, slots):
        from vllm.forward_context import set_forward_context

        with set_forward_context(metadata, self.config, slots):
            return layer(q, k, v)

    def _make_groups(self, one_group):
        from vllm.model_executor.layers.attention import encoder_only_spec
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        found = {}
        owners = {layer.layer_name: layer for layer in self.layers}
        for layer in self.layers:
            owner = owners.get(layer.kv_sharing_target_layer_name, layer)
            spec = owner.get_kv_cache_spec(self.config) or encoder_only_spec(owner, self.config)
            if one_group:  # as vLLM without its hybrid cache manager
                spec = FullAttentionSpec(spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype, spec.head_size_v)
            found.setdefault((spec, layer.num_heads), []).append(layer)
        self.groups = [Group([x.layer_name for x in layers], layers, spec) for (spec, _), layers in found.items()]

    def pages(self, group, padding=0):
        from vllm.v1.kv_cache_interface import create_kv_cache_views

        poison = 0x7F if group.spec.dtype == torch.uint8 else float("nan")
        owners = [x for x in group.layers if x.kv_sharing_target_layer_name is None]
        return owners, create_kv_cache_views(group.spec, self.num_blocks, len(owners), self.layout, self.device, poison, padding)

    def bind(self, padding=0):
        for group in self.groups:
            if "Encoder" in type(group.spec).__name__:
                continue
            group.free = list(torch.randperm(self.num_blocks - 1).add(1).tolist())
            owners, views = self.pages(group, padding)
            for layer, view in zip(owners, views):
                layer.bind_kv_cache(view)
        by_name = {x.layer_name: x for x in self.layers}
        for layer in self.layers:
            if layer.kv_sharing_target_layer_name is not None:
                layer.bind_kv_cache(by_name[layer.kv_sharing_target_layer_name].kv_cache)

    def request(self, name, length):
        shapes = [(x.num_kv_heads, x.head_size, x.head_size_v) for x in self.layers]
        return Request(name, length, shapes, self.dtype, self.device)

    def release(self, request):
        """A request that has ended, or was preempted: its blocks are poisoned for whoever gets them next."""
        request.computed = 0
        for group in self.groups:
            self._give_back(group, group.tables.pop(request.name, []))

    def _give_back(self, group, blocks):
        for block in blocks:
            if block != NULL_BLOCK:
                for layer in group.layers:
                    layer.kv_cache[block] = 0x7F if layer.kv_cache.dtype == torch.uint8 else float("nan")
                group.free.append(block)

    def _place(self, index, requests, counts, total):
        """Block tables and slots of a group, in the persistent buffers; the rest of them is what some earlier step left."""
        group = self.groups[index]
        size, slots = group.spec.block_size, []
        if "Encoder" in type(group.spec).__name__:
            self.tables[index].zero_()
            return self.slots[index].zero_()
        for row, (request, count) in enumerate(zip(requests, counts)):
            table = group.tables.setdefault(request.name, [])
            if group.window is not None:
                gone = max(0, request.computed - group.window + 1) // size
                self._give_back(group, [b for b in table[:gone]])
                table[:gone] = [NULL_BLOCK] * len(table[:gone])
            while len(table) * size < request.computed + count:
                table.append(group.free.pop())
            slots += [table[p // size] * size + p % size for p in range(request.computed, request.computed + count)]
            self.tables[index][row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        self.tables[index][len(requests) :] = NULL_BLOCK
        self.slots[index][: len(slots)] = torch.tensor(slots, dtype=torch.int64)
        self.slots[index][len(slots) : total] = -1

    def common(self, index, counts, lengths, total, rows):
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.zeros(rows + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(counts + [0] * (rows - len(counts))).cumsum(0)
        host = torch.tensor(lengths + [0] * (rows - len(lengths)), dtype=torch.int32)
        self.query_start_loc[: rows + 1] = starts.to(self.device)
        self.seq_lens[:rows] = host.to(self.device)
        upper = host + (host > 0) * 3 if self.config.speculative_config is not None else host  # optimistic, as with asynchronous drafts
        return CommonAttentionMetadata(
            query_start_loc=self.query_start_loc[: rows + 1],
            query_start_loc_cpu=starts,
            seq_lens=self.seq_lens[:rows],
            num_reqs=rows,
            num_actual_tokens=total,
            max_query_len=max(counts),
            max_seq_len=int(upper.max()),
            block_table_tensor=self.tables[index][:rows],
            slot_mapping=self.slots[index][:total],
            seq_lens_cpu_upper_bound=upper,
        )

    def inputs(self, total, requests, counts):
        """q, k, v of each layer; rows of padding are poisoned."""
        made = []
        for index, layer in enumerate(self.layers):
            q = torch.full((total, layer.num_heads, layer.head_size), float("nan"), dtype=self.dtype, device=self.device)
            k = torch.full((total, layer.num_kv_heads, layer.head_size), float("nan"), dtype=self.dtype, device=self.device)
            v = torch.full((total, layer.num_kv_heads, layer.head_size_v), float("nan"), dtype=self.dtype, device=self.device)
            at = 0
            for request, count in zip(requests, counts):
                q[at : at + count] = torch.randn(count, layer.num_heads, layer.head_size, device=self.device).to(self.dtype)
                k[at : at + count] = request.keys[index][request.computed : request.computed + count]
                v[at : at + count] = request.values[index][request.computed : request.computed + count]
                at += count
            made.append((q, k, v))
        return made

    def _metadata(self, counts, lengths, total, rows, capture=False):
        metadata, slots = {}, {}
        for index, (group, builder) in enumerate(zip(self.groups, self.builders)):
            cam = self.common(index, counts, lengths, total, rows)
            made = builder.build_for_cudagraph_capture(cam) if capture else builder.build(common_prefix_len=0, common_attn_metadata=cam)
            metadata.update(dict.fromkeys(group.names, made))
            slots.update(dict.fromkeys(group.names, self.slots[index][:total]))
        return metadata, slots

    def step(self, scheduled, pad_tokens=0, pad_reqs=0):
        """Runs [(request, number of new tokens)] through every layer and checks every output."""
        requests, counts = [r for r, _ in scheduled], [n for _, n in scheduled]
        total, rows = sum(counts) + pad_tokens, len(requests) + pad_reqs
        self.requests = requests
        replays = self.graph is not None and max(counts) == 1
        if replays:
            total, rows = self.graph_rows, self.graph_rows
        for index in range(len(self.groups)):
            self._place(index, requests, counts, total)
        metadata, slots = self._metadata(counts, [r.computed + n for r, n in scheduled], total, rows)
        inputs = self.inputs(total, requests, counts)
        if replays:
            for static, live in zip(self.graph_inputs, inputs):
                for a, b in zip(static, live):
                    a.copy_(b)
            self.graph.replay()
            outputs = self.graph_outputs
        else:
            outputs = [self.forward(layer, *(x.reshape(total, -1) for x in each), metadata, slots) for layer, each in zip(self.layers, inputs)]
        for index, (layer, out) in enumerate(zip(self.layers, outputs)):
            self._check(index, layer, out.view(total, layer.num_heads, layer.head_size_v), inputs[index][0], scheduled)
        for request, count in scheduled:
            request.computed += count
        self.num_steps += 1

    def draft(self, requests, num_steps):
        """Steps of a draft model with a token a request: vLLM builds metadata for the first of them, and has those of others updated in place."""
        made = None
        for _ in range(num_steps):
            counts, lengths = [1] * len(requests), [r.computed + 1 for r in requests]
            for index in range(len(self.groups)):
                self._place(index, requests, counts, len(requests))
            if made is None:
                self.requests = requests
                made = self._metadata(counts, lengths, len(requests), len(requests))
            else:
                self.seq_lens[: len(requests)] += 1
                for group, builder in zip(self.groups, self.builders):
                    assert builder.supports_draft_decode_metadata_update
                    builder.update_draft_decode_metadata(made[0][group.names[0]])
            inputs = self.inputs(len(requests), requests, counts)
            for index, (layer, each) in enumerate(zip(self.layers, inputs)):
                out = self.forward(layer, *(x.reshape(len(requests), -1) for x in each), *made)
                self._check(index, layer, out.view(len(requests), layer.num_heads, layer.head_size_v), each[0], [(r, 1) for r in requests])
            for request in requests:
                request.computed += 1
            self.num_steps += 1

    def mask_of(self, options, request, count):
        """What count new tokens of a request see, as arguments of reference.attention(), where that is not what the layer's options say."""

    def _check(self, index, layer, out, q, scheduled):
        options, at = self.options[index], 0
        window = options.get("per_layer_sliding_window")
        encoder = str(options.get("attn_type", "decoder")).endswith(("ENCODER_ONLY", "encoder_only"))
        owner = index
        if layer.kv_sharing_target_layer_name is not None:
            owner = [x.layer_name for x in self.layers].index(layer.kv_sharing_target_layer_name)
        lookback = options.get("chunk_lookback", -1)
        if window is not None and lookback >= 0:
            span = dict(chunk=window // (lookback + 1), chunk_lookback=lookback)
        elif "attention_chunk_size" in options:
            span = dict(chunk=options["attention_chunk_size"])
        else:
            span = dict(window_left=-1 if window is None else window - 1, window_right=window - 1 if encoder and window is not None else -1)
        for request, count in scheduled:
            seen = request.computed + count
            check(
                out[at : at + count],
                q[at : at + count],
                rounded(request.keys[owner][:seen], self.kv_dtype, self.scales[0]),
                rounded(request.values[owner][:seen], self.kv_dtype, self.scales[1]),
                self.dtype,
                f"step {self.num_steps}, {layer.layer_name}, {request.name}",
                scale=options.get("scale"),
                **(self.mask_of(options, request, count) or dict(causal=not encoder, **span)),
                soft_cap=options.get("logits_soft_cap") or 0.0,
                sinks=None if options.get("sinks") is None else options["sinks"].float().cpu().numpy(),
                alibi_slopes=options.get("alibi_slopes"),
                alibi_sqrt=bool(options.get("use_alibi_sqrt")),
            )
            at += count

    def capture(self, rows):
        """A full graph of steps with one token a request, captured on a dummy batch whose slots are all -1."""
        for slots in self.slots:
            slots.fill_(-1)
        for table in self.tables:
            table.fill_(NULL_BLOCK)
        metadata, slots = self._metadata([1] * rows, [1] * rows, rows, rows, capture=True)
        self.graph_inputs, self.graph_rows = [tuple(x.nan_to_num() for x in each) for each in self.inputs(rows, [], [])], rows

        def run():
            return [self.forward(layer, *(x.view(rows, -1) for x in each), metadata, slots) for layer, each in zip(self.layers, self.graph_inputs)]

        run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.graph_outputs = run()


def serve(runner):
    """Prefill, a chunked prompt, decode, mixed and padded steps, a preempted request that begins anew, one that ends."""
    a, b, c, d = (runner.request(name, length) for name, length in zip("abcd", (60, 150, 24, 33)))
    runner.step([(a, 37)])
    runner.step([(a, 1), (b, 50)])
    runner.step([(b, 40), (a, 1), (c, 17)], pad_tokens=5, pad_reqs=2)
    runner.step([(a, 1), (c, 1), (b, 30)])
    runner.step([(a, 1), (c, 1), (b, 1)])
    runner.step([(a, 1), (c, 1), (b, 1)], pad_tokens=5, pad_reqs=5)
    runner.release(c)
    runner.step([(d, 33), (a, 1)])
    runner.step([(c, 20), (b, 4)])
    runner.step([(a, 1), (b, 1), (c, 1)], pad_tokens=1, pad_reqs=1)
    runner.release(a)
    runner.step([(b, 2)])
    assert runner.num_steps == 10


def first_step(runner):
    runner.step([(runner.request("a", 20), 20)])
