"""The plug-in's latent attention against stand-ins of vLLM: on a CPU in place of CPU_MLA, on a GPU as CUSTOM; prompts, decode and verify over pages,
beside the definition."""

from types import SimpleNamespace

import pytest
import torch

HEADS, RANK, NOPE, ROPE, VALUE, BLOCK = 3, 64, 32, 16, 24, 16
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Layers:
    """Layers of one group with their pages, and a step of vLLM's runner."""

    skip_scale = ()  # what vLLM 0.33 adds to the arguments of do_kv_cache_update()

    def __init__(self, count=2, dtype=torch.float32, rope=ROPE, device="cpu", **options):
        import vllm.config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        from vllm.v1.kv_cache_interface import MLAAttentionSpec

        import imbrex.vllm

        imbrex.vllm.register()
        self.config = vllm.config.VllmConfig(model_config=vllm.config.ModelConfig(dtype=dtype, use_mla=True), **options.get("config", {}))
        with vllm.config.set_current_vllm_config(self.config):
            self.backend = (AttentionBackendEnum.CPU_MLA if device == "cpu" else AttentionBackendEnum.CUSTOM).get_class()
        self.rope, self.rows, self.device = rope, {}, device
        self.layers = {}
        for i in range(count):

            class Layer(AttentionLayerBase):
                get_attn_backend = get_kv_cache_spec = None

            Layer.__abstractmethods__ = frozenset()
            layer, weight = Layer(), torch.nn.Linear(RANK, HEADS * (NOPE + VALUE), bias=False, dtype=dtype, device=device)
            arguments = dict(kv_lora_rank=RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=rope, qk_head_dim=NOPE + rope, v_head_dim=VALUE)
            layer.impl = self.backend.get_impl_cls()(
                HEADS, RANK + rope, 0.2, 1, None, None, options.get("kv_cache_dtype", "auto"), None, "decoder", None, kv_b_proj=weight,
                q_lora_rank=None, indexer=options.get("indexer"), **arguments,
            )  # fmt: skip
            layer.impl.process_weights_after_loading(dtype)
            fp8 = layer.impl.kv_cache_dtype.startswith("fp8")
            layer.kv_cache = torch.full((24, BLOCK, RANK + rope), 0x7F if fp8 else float("nan"), dtype=torch.uint8 if fp8 else dtype, device=device)
            self.layers[f"layers.{i}"] = layer
        self.config.compilation_config.static_forward_context.update(self.layers)
        spec = MLAAttentionSpec(BLOCK, 1, RANK + rope, dtype, **options.get("spec", {}))
        self.builder = self.backend.get_builder_cls()(spec, list(self.layers), self.config, torch.device(device))
        self.scale = torch.tensor(0.5, device=device)
        self.table = torch.randperm(23, generator=torch.Generator().manual_seed(1))[:20].view(4, 5).int() + 1

    def step(self, lens, new, at_most=None):
        """Requests of so many tokens, `at_most` as the host knows, the last `new` of which are this step's. Returns what each layer gave and what it should give."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        slots = [
            int(self.table[r, j // BLOCK]) * BLOCK + j % BLOCK for r, (n, m) in enumerate(zip(lens, new)) for j in range(n - m, n)
        ]  # fmt: skip
        slots, seq_lens = torch.tensor(slots), torch.tensor(lens, dtype=torch.int32)
        table, slots = self.table[: len(lens)].to(self.device), slots.to(self.device)
        there = starts.to(self.device), starts, seq_lens.to(self.device)
        host = seq_lens if at_most is None else torch.tensor(at_most, dtype=torch.int32)
        cam = CommonAttentionMetadata(*there, len(lens), len(slots), max(new), max(lens), table, slots, seq_lens_cpu_upper_bound=host)
        metadata = self.builder.build(0, cam)
        assert metadata.num_prefills == len(lens) and metadata.num_decodes == metadata.num_decode_tokens == 0
        found, self.metadata = [], metadata
        for name, layer in self.layers.items():
            latent, k_pe = torch.randn(len(slots), RANK), torch.randn(len(slots), 1, self.rope)
            q = torch.randn(len(slots), HEADS, NOPE + self.rope)
            latent, k_pe, q = (x.to(self.device, self.config.model_config.dtype) for x in (latent, k_pe, q))
            with set_forward_context({name: metadata}, self.config, {name: slots}):
                layer.impl.do_kv_cache_update(latent, k_pe, layer.kv_cache, slots, "auto", self.scale, *self.skip_scale)
            self.q = q
            out = torch.empty(len(slots), HEADS * VALUE, dtype=q.dtype, device=self.device)
            layer.impl.forward_mha(q, latent, k_pe, layer.kv_cache, metadata, self.scale, out)
            at = 0
            for r, (n, m) in enumerate(zip(lens, new)):
                made = torch.cat([latent, k_pe[:, 0]], 1)[at : at + m]
                if layer.kv_cache.dtype == torch.uint8:
                    made = (made.float() / self.scale).to(torch.float8_e4m3fn).float() * self.scale
                rows = self.rows.setdefault((name, r), [])[: n - m] + list(made)
                self.rows[name, r] = rows
                found.append((out[at : at + m].view(m, HEADS, VALUE), by_definition(layer.impl, q[at : at + m], torch.stack(rows))))
                at += m
        return found


def by_definition(impl, q, rows):
    rank = rows.double()[:, :RANK]
    made = torch.einsum("jc,hnc->jhn", rank, impl.kv_b_proj.weight.double().view(HEADS, NOPE + VALUE, RANK))
    keys = torch.cat([made[..., :NOPE], rows.double()[:, None, RANK:].expand(-1, HEADS, -1)], 2)
    logits = impl.scale * torch.einsum("thd,jhd->htj", q.double(), keys)
    hidden = torch.arange(len(rows), device=q.device) > torch.arange(len(q), device=q.device)[:, None] + len(rows) - len(q)
    return torch.einsum("htj,jhv->thv", torch.softmax(logits.masked_fill(hidden, -float("inf")), -1), made[..., NOPE:])


@pytest.mark.parametrize("rope", [ROPE, 0])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_steps_of_all_kinds(vllm_on_cpu, device, dtype, tolerance, rope):
    layers = Layers(dtype=dtype, rope=rope, device=device)
    for lens, new in (([40, 7, 70], [40, 7, 70]), ([41, 8, 71], [1, 1, 1]), ([45, 9, 71, 30], [4, 1, 0, 30]), ([46, 10, 72, 31], [1] * 4)):
        for out, expected in layers.step(lens, new):
            torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_layers_that_are_named_behind_the_first(vllm_on_cpu, device):
    """As vLLM's proposers do with those of a draft, in the list that the builder was given."""
    layers = Layers(count=3, device=device)
    first, *others = layers.layers
    layers.layers[others[1]].impl.scale = 0.3  # a plan of its own
    names = [first]
    layers.builder = type(layers.builder)(layers.builder.kv_cache_spec, names, layers.config, torch.device(device))
    names += others
    for lens, new in (([40, 7, 70], [40, 7, 70]), ([41, 8, 71], [1, 1, 1])):
        for out, expected in layers.step(lens, new):
            torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    assert len(layers.builder.plans) == 2


def test_latents_of_e4m3(vllm_on_cpu, device):
    layers = Layers(dtype=torch.bfloat16, kv_cache_dtype="fp8", device=device)
    for lens, new in (([40, 7, 70], [40, 7, 70]), ([41, 8, 71], [1, 1, 1])):
        for out, expected in layers.step(lens, new):
            torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=3e-2)


def test_drafts_have_the_lengths_of_the_gpu(vllm_on_cpu, monkeypatch, device):
    """Requests of decode at the front of a step are planned by lengths on the GPU, prompts behind them by the host's."""
    drafts = dict(speculative_config=SimpleNamespace(num_speculative_tokens=3)) if device != "cpu" else {}
    layers = Layers(dtype=torch.bfloat16, device=device, config=drafts)
    builder = layers.builder
    if device == "cpu":  # as on a GPU, with plans of the host
        monkeypatch.setattr(type(builder), "_update_on_device", lambda self, step: self._update(step, step.query_start_loc, step.seq_lens))
        builder.most_decoded, builder.on_device = 4, True
        builder.decode_plans = {key: builder._make_mla_plan(plan.spec, builder._limits()) for key, plan in builder.plans.items()}
    assert (builder.most_decoded, builder.on_device) == (4, True)
    for lens, new, at_most in (
        ([50, 9, 30], [50, 9, 30], [50, 9, 30]),
        ([52, 13, 31, 40], [2, 4, 1, 40], [55, 14, 33, 40]),
        ([53, 17, 34, 75], [1, 4, 3, 35], [56, 20, 35, 75]),
        ([57, 18, 36, 76], [4, 1, 2, 1], [61, 24, 40, 79]),
    ):
        parts_wanted = [plans for plans, wanted in ((builder.decode_plans, min(new) <= 4), (builder.plans, max(new) > 4)) if wanted]
        for out, expected in layers.step(lens, new, at_most):
            torch.testing.assert_close(out.double(), expected, atol=3e-2, rtol=3e-2)
        assert all(found is wanted for (found, _), wanted in zip(layers.metadata.parts, parts_wanted, strict=True))


@on_gpu
@pytest.mark.parametrize("on_device", ["auto", "always"])
def test_graphs_of_decode(vllm_on_cpu, on_device):
    """A graph of one step replays the next, after build() has planned that."""
    from vllm.forward_context import set_forward_context

    layers = Layers(count=1, dtype=torch.bfloat16, device="cuda", config=dict(additional_config={"imbrex": {"on_device": on_device}}))
    ((name, layer),) = layers.layers.items()
    layers.step([40, 7, 70], [40, 7, 70])
    expected = layers.step([41, 8, 71], [1, 1, 1])
    metadata = layers.metadata
    assert metadata.plans is layers.builder.decode_plans is not layers.builder.plans
    q, out = layers.q, torch.empty(3, HEADS * VALUE, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with set_forward_context({name: metadata}, layers.config, {name: metadata.slot_mapping}), torch.cuda.graph(graph):
        layer.impl.forward_mha(q, None, None, layer.kv_cache, metadata, layers.scale, out)
    graph.replay()
    for r, (_, wanted) in enumerate(expected):
        torch.testing.assert_close(out[r].view(1, HEADS, VALUE).double(), wanted, atol=3e-2, rtol=3e-2)


def test_a_model_with_latents_has_a_backend_of_its_own(vllm, monkeypatch):
    import vllm.config
    from vllm.platforms import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import imbrex.vllm

    imbrex.vllm.register()
    monkeypatch.setattr("vllm.platforms.current_platform.kind", "cuda")
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    config = vllm.config.VllmConfig(model_config=vllm.config.ModelConfig(use_mla=True))
    assert AttentionBackendEnum.CUSTOM.get_class().__name__ == "Backend"
    with vllm.config.set_current_vllm_config(config):
        backend = AttentionBackendEnum.CUSTOM.get_class()
    assert backend.__name__ == "MlaBackend" and backend.get_name() == "CUSTOM" and backend.is_mla() and backend.get_preferred_block_size(16) == 64
    given = dict(head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=64, use_mla=True, has_sink=False, use_sparse=False)
    given.update(use_mm_prefix=False, use_per_head_quant_scales=False, device_capability=DeviceCapability(9, 0), attn_type="decoder")
    assert backend.validate_configuration(**given) == []
    assert backend.validate_configuration(**{**given, "kv_cache_dtype": "fp8"}) == []
    assert backend.validate_configuration(**{**given, "use_sparse": True}) == ["sparse not supported"]
    (reason,) = backend.validate_configuration(**{**given, "head_size": 1088})
    assert reason.startswith("imbrex: ") and "576" in reason
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        imbrex.vllm.custom.Other


def test_calls_of_vllm_033_say_whether_the_scale_is_one(vllm_on_cpu):
    layers = Layers(count=1)
    layers.skip_scale = (True,)
    for out, expected in layers.step([9, 30], [9, 30]):
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)


def test_slots_that_no_step_has_are_written_too(vllm_on_cpu):
    from vllm.forward_context import set_forward_context

    layers = Layers(count=1)
    impl, cache = layers.layers["layers.0"].impl, layers.layers["layers.0"].kv_cache
    latent, k_pe, slots = torch.ones(3, RANK), torch.full((3, 1, ROPE), 2.0), torch.tensor([5, -1, 17])
    with set_forward_context(None, layers.config):
        impl.do_kv_cache_update(latent, k_pe, cache, slots, "auto", None)
    assert (cache[0, 5, :RANK] == 1).all() and (cache[1, 1, RANK:] == 2).all() and cache.isnan().sum() == (24 * BLOCK - 2) * (RANK + ROPE)


def test_the_backend_takes_any_latent_and_page(vllm_on_cpu):
    backend = Layers(count=1).backend
    assert backend.get_name() == "CPU_MLA" and backend.is_mla()
    assert backend.get_supported_head_sizes() == [] and backend.supports_block_size(128)


def test_without_the_variable_vllm_keeps_its_own(vllm):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import imbrex.vllm

    imbrex.vllm.register()
    assert not AttentionBackendEnum.CPU_MLA.is_overridden()


def test_refusals(vllm_on_cpu):
    with pytest.raises(NotImplementedError, match="expected a KV cache type of auto, .*, got fp8_ds_mla"):
        Layers(kv_cache_dtype="fp8_ds_mla")
    with pytest.raises(NotImplementedError, match="without an indexer"):
        Layers(indexer=object())
    with pytest.raises(NotImplementedError, match="state_content_bytes"):
        Layers(spec=dict(state_content_bytes=656))
    layers = Layers(count=1)
    impl = layers.layers["layers.0"].impl
    with pytest.raises(NotImplementedError, match="absorbed queries"):
        impl.forward_mqa(None, None, None, None)
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl.forward_mha(None, None, None, None, None, None, None, output_scale=torch.ones(1))
