"""Small random models of transformers with latent attention (MLA) on imbrex, against attn_implementation="eager": logits of a prompt and of decode
steps, over the caches of transformers and imbrex.transformers.LatentCache, both in latent space and with expanded keys."""
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import imbrex.transformers  # noqa: E402
from imbrex.transformers import LatentCache, _latent  # noqa: E402

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
COMMON = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, q_lora_rank=32,
    kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=24, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(
    moe_intermediate_size=32, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, mscale=0.707, mscale_all_dim=0.707, original_max_position_embeddings=128)
SCALED = dict(rope_parameters=YARN)
LAYERS = dict(num_hidden_layers=2)
MODELS = {
    "deepseek_v2": ("DeepseekV2", dict(LAYERS, **EXPERTS, topk_method="greedy")),
    "deepseek_v2_lite": ("DeepseekV2", dict(LAYERS, **EXPERTS, **SCALED, q_lora_rank=None, topk_method="greedy")),
    "deepseek_v3": ("DeepseekV3", dict(LAYERS, **EXPERTS, **SCALED)),
    "glm4_moe_lite": ("Glm4MoeLite", dict(LAYERS, **EXPERTS, qk_nope_head_dim=48, v_head_dim=64)),
    "kimi_linear": (
        "KimiLinear",
        dict(EXPERTS, num_hidden_layers=3, q_lora_rank=None, layer_types=["linear_attention", "full_attention", "full_attention"],
             linear_head_dim=16, linear_num_heads=4),
    ),
    "longcat_flash": (
        "LongcatFlash",
        dict(num_layers=1, ffn_hidden_size=96, expert_ffn_hidden_size=32, n_routed_experts=4, zero_expert_num=2, moe_topk=2, head_dim=16),
    ),
    "minicpm3": ("MiniCPM3", dict(LAYERS, v_head_dim=16)),
    "youtu": ("Youtu", dict(LAYERS)),
}  # fmt: skip
SPARSE = {
    "deepseek_v32": ("DeepseekV32", dict(LAYERS, **EXPERTS, index_topk=24, index_n_heads=4, index_head_dim=32)),
    "glm_moe_dsa": ("GlmMoeDsa", dict(LAYERS, **EXPERTS, index_topk=24, index_n_heads=4, index_head_dim=32)),
}


def model_of(name, dtype=torch.float32):
    stem, options = {**MODELS, **SPARSE}[name]
    if not hasattr(transformers, stem + "ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {stem}")
    torch.manual_seed(11)
    model = getattr(transformers, stem + "ForCausalLM")(getattr(transformers, stem + "Config")(**dict(COMMON, **options)))
    if not any(hasattr(m, "expand_kv") for m in model.modules()):
        pytest.skip(f"transformers {transformers.__version__} caches keys and values of all heads of {stem}")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)  # weights that make the scores differ
    return model.eval().to(dtype)


def ids_of(batch, length):
    torch.manual_seed(12)
    return torch.randint(1, 128, (batch, length))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def calls(monkeypatch):
    """The plans that latent layers ran, as texts."""
    texts = []
    run = imbrex.MlaPlan.run
    monkeypatch.setattr(imbrex.MlaPlan, "run", lambda self, *a, **k: (run(self, *a, **k), texts.append(str(self)))[0])
    return texts


def latent_layers(model):
    return sum(hasattr(m, "expand_kv") for m in model.modules())


def steps(model, implementation, ids, cache, cuts):
    """Logits of a prompt and of what follows, in steps."""
    model.set_attn_implementation(implementation)
    out, begin = [], 0
    for end in cuts:
        out.append(model(ids[:, begin:end], past_key_values=cache, use_cache=True).logits)
        begin = end
    return torch.cat(out, 1)


@pytest.mark.parametrize("cache, batch", [("growing", 3), ("pages", 1), ("pages", 2)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_prompt_and_of_decode(name, batch, cache, calls):
    """A prompt, three tokens one by one, and a verify step of four."""
    model, ids, cuts = model_of(name), ids_of(batch, 90), (83, 84, 85, 86, 90)
    make = transformers.DynamicCache if cache == "growing" else LatentCache
    eager = steps(model, "eager", ids, transformers.DynamicCache(config=model.config), cuts)
    ours = steps(model, "imbrex", ids, make(config=model.config), cuts)
    assert eager.std() > 0.1
    assert (eager - ours).abs().max() < 1e-4 * eager.abs().max()
    assert len(calls) == 5 * latent_layers(model) > 0
    assert any("in latent space" in text for text in calls)


@on_gpu
@pytest.mark.parametrize("cache", ["growing", "pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3", "longcat_flash"])
def test_logits_on_a_gpu(name, dtype, cache, calls):
    """Beside eager attention in float32 on the CPU."""
    ids, cuts = ids_of(2, 90), (83, 84, 85, 86, 90)
    model = model_of(name)
    eager = steps(model, "eager", ids, transformers.DynamicCache(config=model.config), cuts)
    there = model_of(name, dtype).cuda()
    make = transformers.DynamicCache if cache == "growing" else LatentCache
    ours = steps(there, "imbrex", ids.cuda(), make(config=there.config), cuts).float().cpu()
    plain = steps(there, "eager", ids.cuda(), transformers.DynamicCache(config=there.config), cuts).float().cpu()
    assert (eager - ours).abs().max() < max(2e-2 * eager.abs().max(), 2 * (eager - plain).abs().max())
    assert len(calls) == 5 * latent_layers(there) and all(text.startswith("cuda_") for text in calls)


@pytest.mark.parametrize("way", ["latent space", "expanded keys"])
@pytest.mark.parametrize("name", ["deepseek_v3", "longcat_flash"])
def test_both_ways(name, way, calls):
    """The cost of a request decides: many queries pay for expanded keys."""
    model, length = model_of(name), 400 if way == "expanded keys" else 12
    ids = ids_of(2, length)
    eager = steps(model, "eager", ids, transformers.DynamicCache(config=model.config), (length,))
    ours = steps(model, "imbrex", ids, LatentCache(model.config), (length,))
    assert (eager - ours).abs().max() < 1e-4 * eager.abs().max()
    assert calls and all(way in text for text in calls), calls


@pytest.mark.parametrize("cache", ["growing", "static", "pages"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["deepseek_v2_lite", "kimi_linear"])
def test_greedy_tokens(name, padded, cache, calls):
    model, ids = model_of(name), ids_of(3, 21)
    if name == "kimi_linear" and cache == "static":
        pytest.skip("a state beside the cache")
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
        mask[2, :1] = 0
    tokens = []
    for implementation in ("eager", "imbrex"):
        model.set_attn_implementation(implementation)
        options = dict(max_new_tokens=24, do_sample=False)
        if cache == "static":
            options.update(cache_implementation="static", disable_compile=True)
        elif cache == "pages" and implementation == "imbrex":
            options.update(past_key_values=LatentCache(model.config))
        tokens.append(model.generate(ids, attention_mask=mask, **options))
    assert torch.equal(*tokens)
    assert calls


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_bf16_logits(name, calls):
    """Against float32 eager: imbrex may be off no more than twice as much as eager in bfloat16 is, at half of the tokens: a token whose rounding
    takes it to another expert is off by more in either."""
    ids, cuts = ids_of(2, 40), (37, 38, 40)
    exact = steps(model_of(name), "eager", ids, transformers.DynamicCache(), cuts)
    model = model_of(name, torch.bfloat16)
    eager, ours = (
        (steps(model, i, ids, c, cuts).float() - exact).pow(2).mean(-1).sqrt().median()
        for i, c in (("eager", transformers.DynamicCache()), ("imbrex", LatentCache(model.config)))
    )
    assert ours <= 2 * eager, (ours, eager)
    assert calls


def test_pages_grow_and_are_cropped_and_reordered():
    model, ids = model_of("deepseek_v3"), ids_of(2, 150)
    model.set_attn_implementation("imbrex")
    cache, plain = LatentCache(model.config), transformers.DynamicCache(config=model.config)
    for c in (cache, plain):
        model(ids[:, :60], past_key_values=c, use_cache=True)
        c.crop(-7)
        model(ids[:, 53:130], past_key_values=c, use_cache=True)
        c.reorder_cache(torch.tensor([1, 0]))
    a, b = (model(ids[[1, 0], 130:131], past_key_values=c, use_cache=True).logits for c in (cache, plain))
    assert (a - b).abs().max() < 1e-5
    assert cache.get_seq_length() == 131
    rows = cache.layers[0]._rows
    assert rows.shape[2] % 64 == 0 and cache.layers[0].keys.data_ptr() == rows.data_ptr()
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", SPARSE)
def test_an_indexer_that_picks_every_key_and_one_that_does_not(name):
    """Dense attention is exact while no query sees more keys than the indexer picks, and refused beyond."""
    model, ids = model_of(name), ids_of(2, 24)
    eager, ours = (steps(model, i, ids, transformers.DynamicCache(config=model.config), (20, 21, 24)) for i in ("eager", "imbrex"))
    assert (eager - ours).abs().max() < 1e-4 * eager.abs().max()
    with pytest.raises(NotImplementedError, match="indices: expected all 25 keys for each query, got 24"):
        model(ids_of(2, 25))


def test_what_latents_are_not_handed_over_for(calls):
    """Training, a weight that is not what it seems, and torch.compile keep the module's own keys and values."""
    model, ids = model_of("deepseek_v3"), ids_of(1, 9)
    expected = steps(model, "imbrex", ids, None, (9,))
    assert len(calls) == 2
    layer = model.model.layers[0].self_attn
    hook = layer.kv_b_proj.register_forward_hook(lambda module, args, out: out)
    again = steps(model, "imbrex", ids, None, (9,))
    assert len(calls) == 3 and (again - expected).abs().max() < 1e-4
    hook.remove()
    with torch.enable_grad():
        out = model(ids).logits
        assert len(calls) == 5 and (out - expected).abs().max() < 1e-5
        with pytest.raises((NotImplementedError, RuntimeError), match="backward|autograd"):
            out.sum().backward()
    model.set_attn_implementation("eager")
    model(ids)
    assert len(calls) == 5
    assert _latent.latents_of(torch.zeros(1)) is None
