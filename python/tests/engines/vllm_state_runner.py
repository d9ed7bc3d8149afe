"""A small model runner for vLLM's layers with a state: pages of bytes, a block of a page for each request or with "align" for each of its blocks, then steps."""

from math import prod

import torch
from recurrent_reference import FLOAT

NULL_BLOCK = 0


class Runner:
    """`make` makes one layer by the name that vLLM has for its class; `reference` takes that layer and all inputs of a request, and returns its outputs."""

    def __init__(
        self, make, reference, *, dtype=torch.float32, device="cpu", mode="none", block_size=16, settings=None, speculative=None, ubatching=False
    ):
        import vllm.config
        import vllm.platforms

        import imbrex.vllm

        imbrex.vllm.register()
        vllm.platforms.current_platform.kind = device
        self.device, self.reference, self.mode, self.block_size = torch.device(device), reference, mode, block_size
        self.config = vllm.config.VllmConfig(
            model_config=vllm.config.ModelConfig(dtype=dtype),
            parallel_config=vllm.config.ParallelConfig(use_ubatching=ubatching),
            cache_config=vllm.config.CacheConfig(mamba_cache_mode=mode, mamba_block_size=block_size if mode == "align" else 512),
            speculative_config=speculative,
            additional_config={} if settings is None else {"imbrex": settings},
        )
        torch.set_default_dtype(dtype)
        try:
            with vllm.config.set_current_vllm_config(self.config), torch.device(self.device):
                self.layers = [make("layers.0"), make("layers.1")]
        finally:
            torch.set_default_dtype(torch.float32)
        for layer in self.layers:
            self.forward(layer, self.inputs(layer, 4), None)  # profiling: no metadata, no pages
        spec = self.layers[0].get_kv_cache_spec(self.config)
        assert spec == self.layers[1].get_kv_cache_spec(self.config) and spec.mamba_cache_mode == mode
        backend = self.layers[0].get_attn_backend()
        assert backend.is_ssm()
        self.builder = backend.get_builder_cls()(spec, [x.prefix for x in self.layers], self.config, self.device)
        self._make_pages(spec)

    def _make_pages(self, spec, num_blocks=24, padding=64):
        """Pages of one allocation with a gap behind each, all of it poisoned."""
        size = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes))
        size += -size % 16
        self.memory = torch.full((len(self.layers), num_blocks, size + padding), 0xFF, dtype=torch.uint8, device=self.device)
        for layer, pages in zip(self.layers, self.memory):
            layer.bind_kv_cache(pages[:, :size].view(torch.int8))
        self.size, self.free = size, torch.randperm(num_blocks - 1).add(1).tolist()

    def forward(self, layer, rows, metadata):
        from vllm.forward_context import set_forward_context

        found = None if metadata is None else {x.prefix: metadata for x in self.layers}
        with set_forward_context(found, self.config), torch.inference_mode():
            return layer(rows)

    def inputs(self, layer, count):
        return torch.randn(count, columns(layer), device=self.device).to(self.config.model_config.dtype)

    def request(self, length):
        return Request([self.inputs(layer, length) for layer in self.layers])

    def release(self, request):
        """It has ended, or was preempted; whoever gets its blocks finds what it left."""
        self.free += [b for b in request.blocks if b != NULL_BLOCK]
        request.blocks, request.computed, request.expected = [], 0, {}
        request.first, request.accepted = 0, 1

    def _place(self, request, count):
        """Blocks for the step, one for each token that may be a draft; with "align" a step that begins a block finds a copy of the last state there, as vLLM's
        runner makes it."""
        before, first = request.first, 0 if self.mode == "none" else (request.computed + count - 1) // self.block_size
        while len(request.blocks) <= first + self.config.num_speculative_tokens:
            request.blocks.append(self.free.pop())
        if request.computed and before != first:
            kept = request.accepted - 1
            for layer in self.layers:
                conv, *states = layer.kv_cache
                conv[request.blocks[first], : conv.shape[1] - kept] = conv[request.blocks[before], kept:].clone()
                for state in states:
                    state[request.blocks[first]] = state[request.blocks[before + kept]]
            request.accepted = 1
        request.first = first

    def common(self, counts, lengths, blocks, total):
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0] + counts, dtype=torch.int32).cumsum(0).to(torch.int32)
        host = torch.tensor(lengths, dtype=torch.int32)
        table = torch.zeros(len(counts), max(map(len, blocks)) + 2, dtype=torch.int32)
        for row, ids in zip(table, blocks):
            row[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=host.to(self.device),
            num_reqs=len(counts),
            num_actual_tokens=total,
            max_query_len=max(counts),
            max_seq_len=max(lengths),
            block_table_tensor=table.to(self.device),
            slot_mapping=torch.zeros(total, dtype=torch.int64, device=self.device),
            seq_lens_cpu_upper_bound=host,
        )

    def expected(self, index, request):
        if index not in request.expected:
            request.expected[index] = self.reference(self.layers[index], request.rows[index].double())
        return request.expected[index]

    def step(self, scheduled, pad=0, tolerance=max(1e-5, FLOAT)):
        """Runs [(request, number of new tokens)] through the layers, checks every output, and that no other block has changed. A third number says that all
        tokens but the first are drafts, of which so many are kept: the others are made up."""
        scheduled = [(*entry, None)[:3] for entry in scheduled]
        counts = [n for _, n, _ in scheduled]
        for request, count, _ in scheduled:
            self._place(request, count)
        before = self.memory.clone()
        total = sum(counts) + pad
        cam = self.common(counts, [r.computed + n for r, n, _ in scheduled], [r.blocks for r, _, _ in scheduled], total)
        metadata = self.builder.build(common_prefix_len=0, common_attn_metadata=cam, **self._drafts(scheduled))
        for index, layer in enumerate(self.layers):
            rows = [self._rows(index, *entry) for entry in scheduled]
            rows.append(rows[0].new_full((pad, rows[0].shape[1]), float("nan")))
            out, at = self.forward(layer, torch.cat(rows), metadata), 0
            for request, count, kept in scheduled:
                right = count if kept is None else 1 + kept
                expected = self.expected(index, request)[request.computed : request.computed + right]
                error = (out[at : at + right].double() - expected).abs().max() / expected.abs().max()
                assert error <= tolerance, (index, request.computed, count, error)
                at += count
        for request, count, kept in scheduled:
            request.computed += count if kept is None else 1 + kept
            request.accepted = 1 if kept is None else 1 + kept
            for written in request.blocks[request.first :][: 1 if kept is None else count]:
                before[:, written, : self.size] = self.memory[:, written, : self.size]
        assert torch.equal(before, self.memory)

    def _rows(self, index, request, count, kept):
        right = count if kept is None else 1 + kept
        rows = request.rows[index][request.computed : request.computed + right]
        assert len(rows) == right, "the request has no more tokens"
        return torch.cat([rows, 10 * torch.randn_like(rows[:1]).expand(count - right, -1)])

    def _drafts(self, scheduled):
        """What vLLM tells a builder where drafts are made."""
        if not self.config.num_speculative_tokens:
            return {}
        drafts = torch.tensor([-1 if kept is None else n - 1 for _, n, kept in scheduled], dtype=torch.int32)
        accepted = torch.tensor([r.accepted for r, *_ in scheduled], dtype=torch.int32, device=self.device)
        return dict(num_accepted_tokens=accepted, num_decode_draft_tokens_cpu=drafts)


class Request:
    def __init__(self, rows):
        self.rows, self.computed, self.blocks, self.expected = rows, 0, [], {}
        self.first, self.accepted = 0, 1  # which of its blocks has its state, and how many tokens of its last step were right


def columns(layer):
    """Of what a stand-in takes."""
    name = type(layer).__mro__[2].__name__
    if name == "QwenGatedDeltaNetAttention":
        return layer.conv_dim + 2 * layer.num_v_heads
    if name == "KimiGatedDeltaNetAttention":
        return 5 * layer.local_projection_size + layer.local_num_heads
    if name == "MambaMixer2":
        return layer.tped_intermediate_size + layer.tped_conv_size + layer.tped_dt_size
    return layer.in_proj.weight.shape[1]
