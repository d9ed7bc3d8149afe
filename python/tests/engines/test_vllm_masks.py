"""imbrex.vllm where a step says what queries see: images in a causal prompt, R-SWA, requests that are not causal, tokens whose logits are asked
for, and the keys of an encoder."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from serving import check, rounded  # noqa: E402
from vllm_runner import NULL_BLOCK, Runner  # noqa: E402

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")


class MaskRunner(Runner):
    """A runner whose requests may have `images`, (first, last) each, a `prompt` that stays visible, and `causal`, which may be False."""

    causal = True  # of all requests, or "by request"

    def common(self, index, counts, lengths, total, rows):
        cam = super().common(index, counts, lengths, total, rows)
        images = {row: getattr(r, "images", []) for row, r in enumerate(self.requests)}
        prompts = torch.tensor([getattr(r, "prompt", 0) for r in self.requests], dtype=torch.int32)
        by_request = [getattr(r, "causal", True) for r in self.requests] + [True] * (rows - len(self.requests))
        causal = torch.tensor(by_request, device=self.device) if self.causal == "by request" else self.causal
        model = self.config.model_config
        return cam.replace(
            mm_req_doc_ranges=images if model.is_mm_prefix_lm else None,
            rswa_prefix_lens=None if model.rswa_window is None else prompts.to(self.device),
            causal=causal,
        )

    def _place(self, index, requests, counts, total):
        """As vLLM's manager of R-SWA: blocks between a prompt and the window are given back, and the null block, of zeros, stands for them."""
        super()._place(index, requests, counts, total)
        group, window = self.groups[index], self.config.model_config.rswa_window
        for row, request in enumerate(requests if window is not None else []):
            table, size = group.tables[request.name], group.spec.block_size
            for block in range(-(-request.prompt // size), max(0, request.computed - window + 1) // size):
                self._give_back(group, [table[block]])
                table[block] = NULL_BLOCK
            self.tables[index][row, : len(table)] = torch.tensor(table, dtype=torch.int32)
            for layer in group.layers:
                layer.kv_cache[NULL_BLOCK] = 0

    def mask_of(self, options, request, count):
        length = request.computed + count
        q, kv = np.arange(request.computed, length)[:, None], np.arange(length)[None, :]
        causal = self.causal if isinstance(self.causal, bool) else getattr(request, "causal", True)
        window, model = options.get("per_layer_sliding_window") or length, self.config.model_config
        near = q - kv < window
        seen = near & ((kv <= q) if causal else (kv - q < window))
        if model.rswa_window is not None:
            seen &= (kv < getattr(request, "prompt", 0)) | (q - kv < model.rswa_window)
        for first, last in getattr(request, "images", []) if model.is_mm_prefix_lm else []:
            own = (first <= q) & (q <= last) & (first <= kv) & (kv <= last)
            seen |= own & near if options.get("mm_prefix_clamp_sliding_window") else own
        return dict(causal=False, mask=seen)


IMAGES = dict(is_mm_prefix_lm=True)
CLAMPED = {"per_layer_sliding_window": 12, "mm_prefix_clamp_sliding_window": True}
SLOPES = [2.0 ** -(i + 1) for i in range(8)]
SINKS = torch.linspace(-1, 2, 8)


def serve_images(runner):
    a, b, c = (runner.request(name, length) for name, length in (("a", 90), ("b", 70), ("c", 60)))
    a.images, b.images, c.images = [(5, 16), (20, 29)], [], [(0, 9), (50, 54)]
    runner.step([(a, 18), (b, 25)])
    assert len(runner.builders[0]._masked_plans["images"]) >= 1
    runner.step([(b, 1), (a, 14), (c, 30)], pad_tokens=3, pad_reqs=1)
    runner.step([(a, 1), (b, 1), (c, 1)])
    runner.step([(a, 20), (c, 20)])
    runner.step([(c, 2), (a, 2)])  # an image that a step ends within sees what is there
    runner.step([(c, 3), (a, 1), (b, 20)])
    runner.step([(c, 1), (a, 1), (b, 1)])


@pytest.mark.parametrize(
    "layers",
    [
        [{}, {}],
        [{"per_layer_sliding_window": 14}, {}],
        [CLAMPED, {"per_layer_sliding_window": 12}],
        [{"alibi_slopes": SLOPES}, {"sinks": SINKS, "per_layer_sliding_window": 16, "logits_soft_cap": 8.0}],
    ],
)
def test_images(device, layers):
    layers = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()} for options in layers]
    serve_images(MaskRunner(device, layers, model=IMAGES))


def test_images_of_layers_in_one_group(device):
    runner = MaskRunner(device, [{"per_layer_sliding_window": 14}, {}, CLAMPED], model=IMAGES, one_group=True)
    serve_images(runner)
    assert len(runner.builders[0]._masked_plans["images"]) == 3
    with pytest.raises(NotImplementedError, match="images of at most a window's 14 tokens, got one of 15"):
        a = runner.request("long", 30)
        a.images = [(3, 17)]
        runner.step([(a, 30)])


def test_images_longer_than_a_window_that_ends_them(device):
    runner = MaskRunner(device, [CLAMPED], model=IMAGES)
    a = runner.request("a", 60)
    a.images = [(4, 30)]
    runner.step([(a, 40)])
    runner.step([(a, 20)])


def test_images_in_packed_and_fp8_pages(device):
    serve_images(MaskRunner(device, [{"per_layer_sliding_window": 14}, {}], model=IMAGES, block_size=32, num_blocks=24))
    serve_images(MaskRunner(device, [{"per_layer_sliding_window": 14}, {}], model=IMAGES, kv_dtype="fp8_e4m3", scales=(0.5, 0.25)))


def test_steps_without_an_image_have_the_plans_of_text(device):
    runner = MaskRunner(device, [{}], model=IMAGES)
    a = runner.request("a", 60)
    a.images = [(5, 16)]

    def metadata(count):
        runner.requests = [a]
        runner._place(0, [a], [count], count)
        return runner._metadata([count], [a.computed + count], count, 1)[0]["layers.0"]

    assert metadata(5).image_plans is None
    made = metadata(17)
    assert made.image_plans is not None and made.plans_of_queries is made.image_plans
    made.mm_prefix_query_range_tensor = None  # as vLLM's Gemma 4 does for layers that see images as text
    assert made.plans_of_queries is made.plans
    runner.step([(a, 17)])
    assert metadata(10).image_plans is None and metadata(1).image_plans is None


@pytest.mark.parametrize("layers", [[{"rswa_window": 20}] * 2, [{"rswa_window": 20}, {"rswa_window": 20, "sinks": SINKS}]])
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_prompts_that_stay_visible(device, layers, mode):
    layers = [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()} for options in layers]
    runner = MaskRunner(device, layers, model=dict(rswa_window=20), cudagraph_mode=mode)
    a, b = runner.request("a", 120), runner.request("b", 90)
    a.prompt, b.prompt = 40, 7
    runner.step([(a, 40), (b, 5)], pad_tokens=2, pad_reqs=1)
    runner.step([(b, 50), (a, 30)])
    runner.step([(a, 1), (b, 1)])
    runner.step([(b, 1), (a, 1)], pad_tokens=1, pad_reqs=1)
    runner.step([(a, 40), (b, 2)])
    runner.step([(b, 1), (a, 1)])
    if device == "cpu":  # a GPU has no drafts then
        runner.draft([b, a], 3)
    assert NULL_BLOCK in runner.groups[0].tables["a"] and NULL_BLOCK in runner.groups[0].tables["b"]


@pytest.mark.parametrize("layers", [[{}], [{"per_layer_sliding_window": 9}, {}]])
@pytest.mark.parametrize("causal", [False, "by request"])
def test_requests_that_are_not_causal(device, layers, causal):
    runner = MaskRunner(device, layers)
    a, b = runner.request("a", 60), runner.request("b", 50)
    b.causal = False
    runner.step([(a, 20), (b, 11)])
    runner.causal = causal
    runner.step([(b, 17), (a, 9)], pad_tokens=2, pad_reqs=1)
    runner.step([(b, 1), (a, 1)])
    runner.causal = True
    runner.step([(a, 3), (b, 2)])


def test_lengths_on_the_gpu_have_no_such_masks(vllm, monkeypatch):
    from vllm.config import SpeculativeConfig

    from imbrex.vllm import builders

    runner = MaskRunner("cpu", [{}])
    runner.requests = [runner.request("a", 20)]
    cam = runner.common(0, [1], [1], 1, 1).replace(causal=torch.ones(1, dtype=torch.bool))
    runner.builders[0].on_device = True
    with pytest.raises(NotImplementedError, match="expected lengths that the host knows"):
        runner.builders[0]._plans_of_step(cam)
    for model, name in ((dict(rswa_window=20), "R-SWA"), (IMAGES, "multimodal prefixes")):
        runner = MaskRunner("cpu", [{}], model=model, speculative=SpeculativeConfig())  # a CPU has lengths
        with monkeypatch.context() as gpu, pytest.raises(NotImplementedError, match=f"expected no drafts .* with {name} on a GPU"):
            gpu.setattr(builders, "device_text", lambda device: "cuda:0")
            type(runner.builders[0])(runner.groups[0].spec, runner.groups[0].names, runner.config, torch.device("cpu"))


def test_chunks_with_a_lookback_have_no_such_masks(vllm):
    with pytest.raises(NotImplementedError, match="no multimodal prefixes in layers with chunks"):
        MaskRunner("cpu", [{"per_layer_sliding_window": 32, "chunk_lookback": 1}], model=IMAGES)
    runner = MaskRunner("cpu", [{"per_layer_sliding_window": 32, "chunk_lookback": 1}])
    runner.causal = False
    with pytest.raises(NotImplementedError, match="expected causal layers with chunks"):
        runner.step([(runner.request("a", 20), 20)])


@pytest.mark.parametrize("options", [{}, {"on_device": "always"}])
def test_layers_that_are_computed_where_logits_are_asked_for(device, options):
    """Fast prefill: a layer that shares the cache of another gets fewer queries than that."""
    from vllm.model_executor.layers.attention import fast_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    runner = Runner(device, [{}, {"kv_sharing_target_layer_name": "layers.0"}], settings=options)
    sharing = fast_prefill_backend(runner.layers[0].attn_backend)
    assert AttentionBackendEnum[sharing.get_name()]
    builder = sharing.get_builder_cls()(runner.groups[0].spec, ["layers.1"], runner.config, runner.device)
    a, b, c = (runner.request(name, 60) for name in "abc")
    for scheduled, asked in (([(a, 20), (b, 30)], [19, 47, 48, 49]), ([(c, 7), (a, 1), (b, 2)], [6, 7, 8, 9]), ([(a, 1), (b, 1)], [0, 1])):
        runner.requests, counts = [r for r, _ in scheduled], [n for _, n in scheduled]
        total = sum(counts)
        runner._place(0, runner.requests, counts, total)
        cam = runner.common(0, counts, [r.computed + n for r, n in scheduled], total, len(scheduled))
        padded = torch.tensor(asked + asked[-1:] * 2, device=runner.device)
        cam = cam.replace(logits_indices_padded=padded, num_logits_indices=len(asked))
        metadata = {"layers.0": runner.builders[0].build(0, cam), "layers.1": builder.build(0, cam)}
        assert metadata["layers.1"].num_logits_indices == len(asked)
        (q, k, v), slots = runner.inputs(total, runner.requests, counts)[0], {"layers.0": runner.slots[0][:total]}
        whole = runner.forward(runner.layers[0], *(x.reshape(total, -1) for x in (q, k, v)), metadata, slots)
        kept = q.reshape(total, -1)[padded]
        few = runner.forward(runner.layers[1], kept, None, None, metadata, {})
        torch.testing.assert_close(few[: len(asked)], whole[padded[: len(asked)]], rtol=2e-2, atol=2e-2)
        for request, count in scheduled:
            request.computed += count


@pytest.mark.parametrize("kv_dtype, scales", [("auto", (1.0, 1.0)), ("fp8_e4m3", (0.5, 0.25))])
@pytest.mark.parametrize("block_size", [16, 32])
def test_cross_attention(device, kv_dtype, scales, block_size):
    """The keys of an encoder are written in the first step of a request, and every query sees all of them."""
    runner = Runner(device, [{"attn_type": "encoder_decoder"}, {}], kv_dtype=kv_dtype, scales=scales, block_size=block_size)
    runner.config.scheduler_config.max_num_encoder_input_tokens = 700  # more than a decoder's limit
    index = next(i for i, group in enumerate(runner.groups) if "layers.0" in group.names)
    layer, builder = runner.layers[0], runner.builders[index]
    lengths = {"a": 75, "b": 3, "c": 100}
    requests, tables, free = {n: runner.request(n, x) for n, x in lengths.items()}, {}, list(range(1, runner.num_blocks))
    for name, length in lengths.items():
        tables[name] = [free.pop() for _ in range(-(-length // block_size))]
    steps = [[("a", 4), ("b", 9)], [("a", 1), ("c", 5), ("b", 1)], [("c", 1), ("a", 1), ("b", 1)]]
    for number, scheduled in enumerate(steps):
        names, counts, total = [n for n, _ in scheduled], [n for _, n in scheduled], sum(n for _, n in scheduled)
        for row, name in enumerate(names):
            runner.tables[index][row, : len(tables[name])] = torch.tensor(tables[name], dtype=torch.int32)
        cam = runner.common(index, counts, [requests[n].computed + c for n, c in scheduled], total, len(names))
        encoders = np.array([lengths[n] for n in names], np.int32)
        cam = cam.replace(encoder_seq_lens=torch.from_numpy(encoders).to(device), encoder_seq_lens_cpu=encoders)
        new = [requests[n] for n in names if not requests[n].computed]
        k, v = (torch.cat(x).flatten(1) if x else None for x in ([r.keys[0] for r in new], [r.values[0] for r in new]))
        q = torch.randn(total, 8 * 64, device=device).to(runner.dtype)
        out = runner.forward(layer, q, k, v, {"layers.0": builder.build(0, cam)}, {}).view(total, 8, 64)
        at = 0
        for name, count in scheduled:
            keys, values = (rounded(x[0], kv_dtype, s) for x, s in zip((requests[name].keys, requests[name].values), scales))
            queries = q.view(total, 8, 64)[at : at + count]
            check(out[at : at + count], queries, keys, values, runner.dtype, f"step {number}, {name}", causal=False)
            at += count
            requests[name].computed += count


def test_cross_attention_has_room_for_an_encoders_tokens(vllm):
    import vllm.config

    runner = Runner("cpu", [{"attn_type": "encoder_decoder"}])
    runner.config.scheduler_config = vllm.config.SchedulerConfig(max_num_encoder_input_tokens=700)
    group = runner.groups[0]
    assert type(runner.builders[0])(group.spec, group.names, runner.config, runner.device)._limits()["max_seq_len"] == 700


def test_halves_of_a_step_have_scratch_of_their_own(vllm):
    """Dual batch overlap: vLLM makes a builder for each half."""
    runner = Runner("cpu", [{}])
    group = runner.groups[0]
    runner.config.parallel_config.use_ubatching = True
    first, second = (type(runner.builders[0])(group.spec, group.names, runner.config, runner.device) for _ in range(2))
    assert first.workspace is not second.workspace and runner.builders[0].workspace is not first.workspace
    a, b = runner.request("a", 60), runner.request("b", 60)
    runner.step([(a, 10), (b, 12)])
    runner._place(0, [a, b], [8, 9], 17)
    halves = []
    for builder, counts, lengths, begin in ((first, [8, 4], [18, 16], 0), (second, [5], [21], 12)):  # b is in both
        cam = runner.common(0, counts, lengths, sum(counts), len(counts))
        rows = slice(0, 2) if begin == 0 else slice(1, 2)
        starts, seen = cam.query_start_loc_cpu.clone(), torch.tensor(lengths, dtype=torch.int32)
        slots = runner.slots[0][begin : begin + sum(counts)]
        cam = cam.replace(query_start_loc=starts, seq_lens=seen, seq_lens_cpu_upper_bound=seen, slot_mapping=slots)
        cam = cam.replace(block_table_tensor=runner.tables[0][rows].clone())
        halves.append((builder.build(0, cam), slots, slice(begin, begin + sum(counts))))
    q, k, v = (x.reshape(17, -1) for x in runner.inputs(17, [a, b], [8, 9])[0])
    outs = [runner.forward(runner.layers[0], q[x], k[x], v[x], {"layers.0": made}, {"layers.0": slots}) for made, slots, x in halves]
    runner._check(0, runner.layers[0], torch.cat(outs).view(17, 8, 64), q.view(17, 8, 64), [(a, 8), (b, 9)])
