"""Small random hybrid models of transformers with their recurrent layers on imbrex, against transformers' own code: logits, and greedy tokens in float32."""
import copy
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from imbrex import _state_calls  # noqa: E402
from imbrex.transformers import _versions, set_recurrent_implementation  # noqa: E402
from torch_reference import DEVICES  # noqa: E402

try:
    _versions.check_recurrent()
except NotImplementedError as error:
    pytest.skip(str(error), allow_module_level=True)

COMMON = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None,
    eos_token_id=None, pad_token_id=0,
)  # fmt: skip
GDN = dict(
    head_dim=32, linear_key_head_dim=16, linear_value_head_dim=24, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"], num_hidden_layers=3,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=24,
    moe_intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
)  # fmt: skip
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=2, mamba_d_state=16, mamba_chunk_size=8)

# model -> (class, its config's options, how many layers have a convolution, how many a recurrence)
MODELS = {
    "qwen3_next": ("Qwen3Next", dict(GDN, shared_expert_intermediate_size=32, **EXPERTS), 2, 2),
    "kimi_linear": (
        "KimiLinear",
        dict(LATENT, num_hidden_layers=3, linear_head_dim=16, linear_num_heads=4, layer_types=GDN["layer_types"]), 2, 2,
    ),
    "nemotron_h": (
        "NemotronH",
        dict(
            layers_block_type=["mamba", "attention", "mamba", "mlp"], head_dim=16, ssm_state_size=16, mamba_num_heads=4, mamba_head_dim=32, n_groups=2,
            chunk_size=8,
        ), 2, 2,
    ),
    "falcon_h1": ("FalconH1", dict(MAMBA2, num_hidden_layers=2, mamba_d_ssm=128), 2, 2),
    "jamba": (
        "Jamba",
        dict(
            num_hidden_layers=3, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=8, num_experts=2, num_experts_per_tok=1, expert_layer_offset=1,
        ), 2, 2,
    ),
    "lfm2": ("Lfm2", dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], conv_bias=True), 2, 0),
}  # fmt: skip
MODELS = {name: model for name, model in MODELS.items() if hasattr(transformers, model[0] + "ForCausalLM")}  # Kimi-Linear came later

# Others, whose greedy tokens alone are compared.
BAILING = dict(LATENT, q_lora_rank=32, n_group=1, topk_group=1, head_dim=16, num_experts=4, layer_types=["linear_attention", "full_attention"] * 2)
MORE = {
    "bailing_hybrid": ("BailingHybrid", dict(BAILING, num_hidden_layers=4), 2, 2),
    "bamba": ("Bamba", dict(MAMBA2, num_hidden_layers=2, attn_layer_indices=[1]), 1, 1),
    "falcon_mamba": ("FalconMamba", dict(num_hidden_layers=2), 2, 2),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        dict(MAMBA2, num_hidden_layers=2, layer_types=["mamba", "attention"], num_local_experts=0, shared_intermediate_size=64), 1, 1,
    ),
    "lfm2_moe": (
        "Lfm2Moe", dict(MODELS["lfm2"][1], conv_bias=False, num_dense_layers=1, **EXPERTS), 2, 0,
    ),
    "mamba": ("Mamba", dict(num_hidden_layers=2), 2, 2),
    "mamba2": ("Mamba2", dict(num_hidden_layers=2, state_size=16, num_heads=4, head_dim=32, n_groups=2, chunk_size=8), 2, 2),
    "olmo_hybrid": ("OlmoHybrid", dict(GDN, linear_num_key_heads=4), 2, 2),
    "qwen3_5": ("Qwen3_5", GDN, 2, 2),
    "zamba": ("Zamba", dict(num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, mamba_dt_rank=8, n_mamba_heads=2), 4, 8),
    "zamba2": (
        "Zamba2",
        dict(
            num_hidden_layers=3, layers_block_type=["mamba", "hybrid", "mamba"], mamba_d_state=16, mamba_headdim=32, n_mamba_heads=4, mamba_ngroups=2,
            num_mem_blocks=1, adapter_rank=4, chunk_size=8,
        ), 3, 3,
    ),
}  # fmt: skip
MORE = {name: model for name, model in MORE.items() if hasattr(transformers, model[0] + "ForCausalLM")}


@pytest.fixture(autouse=True)
def no_grad(one_thread):
    with torch.no_grad():
        yield


def model_of(name, device="cpu", dtype=torch.float32):
    torch.manual_seed(11)
    stem, options, *_ = dict(MODELS, **MORE)[name]
    config = getattr(transformers, stem + ("TextConfig" if stem == "Qwen3_5" else "Config"))
    model = getattr(transformers, stem + "ForCausalLM")(config(**dict(COMMON, **options)))
    for parameter_name, parameter in model.named_parameters():
        if "A_log" in parameter_name:
            torch.nn.init.uniform_(parameter, -1.5, 1.5)
        elif "dt_bias" in parameter_name or parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif "conv" in parameter_name and "proj" not in parameter_name:
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)  # weights that make the layers matter
    return model.eval().to(device=device, dtype=dtype)


def ids_of(device, padded):
    torch.manual_seed(12)
    ids = torch.randint(1, 128, (3, 21), device=device)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
        mask[2, :1] = 0
    return ids, mask


@pytest.fixture
def calls(monkeypatch):
    """How often imbrex has computed a convolution and a recurrence."""
    counts = dict(short_conv=0, recurrent=0)

    def counted(name):
        function = getattr(_state_calls, name)

        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for name in counts:
        monkeypatch.setattr(_state_calls, name, counted(name))
    return counts


def generate(model, ids, mask, **options):
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens(name, padded, device, calls):
    model = model_of(name, device)
    ids, mask = ids_of(device, padded)
    theirs, expected = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], generate(model, ids, mask)
    assert not any(calls.values()) and theirs.std() > 0.1
    model.set_attn_implementation("imbrex")
    set_recurrent_implementation(model)
    ours, got = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()], generate(model, ids, mask)
    bound = (2e-2 if device == "cuda" else 2e-5) * theirs.abs().max()
    assert (ours - theirs).abs().max() < bound
    assert max((a - b).abs().max() for a, b in zip(got.logits, expected.logits)) < bound
    assert torch.equal(got.sequences, expected.sequences)
    assert list(calls.values()) == [n * 13 for n in MODELS[name][2:]]  # logits, a prompt, and eleven tokens


@pytest.mark.parametrize("name", MORE)
def test_greedy_tokens(name, calls):
    model = model_of(name)
    ids, mask = ids_of("cpu", padded=True)
    expected = generate(model, ids, mask)
    set_recurrent_implementation(model)
    got = generate(model, ids, mask)
    assert max((a - b).abs().max() / b.abs().max() for a, b in zip(got.logits, expected.logits)) < 2e-5
    assert torch.equal(got.sequences, expected.sequences)
    assert list(calls.values()) == [n * 12 for n in MORE[name][2:]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_bf16_logits(name, device):
    """As near to float32 as transformers' own bf16, or nearly so, at most tokens: at some an expert is another one."""
    exact, model = model_of(name, device), model_of(name, device, torch.bfloat16)
    exact.load_state_dict(model.state_dict())
    ids, mask = ids_of(device, padded=True)
    exact, theirs = (m(ids, attention_mask=mask).logits[mask.bool()].float() for m in (exact, model))
    set_recurrent_implementation(model)
    ours = model(ids, attention_mask=mask).logits[mask.bool()].float()
    theirs, ours = (((x - exact).norm(dim=-1) / exact.norm(dim=-1)).median() for x in (theirs, ours))
    assert ours < 1.25 * theirs < 0.05


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_parts(name):
    """Steps of more than one token behind a cache."""
    model, (ids, _) = model_of(name), ids_of("cpu", padded=False)
    whole = model(ids).logits
    set_recurrent_implementation(model)
    cache, parts = None, []
    for part in ids.split((6, 1, 2, 12), 1):
        result = model(part, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        parts.append(result.logits)
    if name == "jamba":  # Mamba1's scan of transformers and of mamba_ssm has no initial state
        parts, whole = [p[:, :k] for p, k in zip(parts, (6, 1))], whole[:, :7]
    assert (torch.cat(parts, 1) - whole).abs().max() < 2e-5 * whole.abs().max()


def test_other_models_stay_what_they_are(calls):
    ids, _ = ids_of("cpu", padded=False)
    ours, other = model_of("qwen3_next"), model_of("qwen3_next")
    set_recurrent_implementation(ours)
    other(ids)
    assert not any(calls.values())
    expected = ours(ids).logits
    assert list(calls.values()) == [2, 2]
    twin = copy.deepcopy(ours)
    assert torch.equal(twin(ids).logits, expected) and list(calls.values()) == [4, 4]
    for model in (ours, twin):
        set_recurrent_implementation(model)  # a second time
        set_recurrent_implementation(model, None)
        model(ids)
    assert list(calls.values()) == [4, 4]


def test_compiled_models_run_as_before(calls):
    model, (ids, _) = model_of("lfm2"), ids_of("cpu", padded=False)
    expected = model(ids, use_cache=False).logits
    set_recurrent_implementation(model)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids, use_cache=False).logits, expected) and not any(calls.values())
    model(ids)
    assert calls["short_conv"] == 2


def test_threads_share_a_model():
    model, other = model_of("qwen3_next"), model_of("qwen3_next")
    set_recurrent_implementation(model)
    batches = [torch.randint(1, 128, (2, 7 + i)) for i in range(4)]

    def run(ids):
        with torch.no_grad():
            return [m(ids).logits for m in (model, other) for _ in range(3)]

    with ThreadPoolExecutor(4) as pool:
        for outs in pool.map(run, batches):
            assert all((out - outs[-1]).abs().max() < 2e-5 * out.abs().max() for out in outs)
            assert torch.equal(outs[0], outs[2]) and torch.equal(outs[3], outs[5]) and not torch.equal(outs[0], outs[3])


def test_a_call_that_fails_ends(calls):
    model, (ids, _) = model_of("lfm2"), ids_of("cpu", padded=False)
    set_recurrent_implementation(model)
    model.model.layers[0].conv.out_proj = torch.nn.Linear(7, 7)
    with pytest.raises(RuntimeError, match="shapes"):
        model(ids)
    assert calls["short_conv"] == 1
    model_of("lfm2")(ids)
    assert calls["short_conv"] == 1


def test_gradients_are_refused():
    model, (ids, _) = model_of("nemotron_h"), ids_of("cpu", padded=False)
    set_recurrent_implementation(model)
    with torch.enable_grad():
        logits = model(ids).logits
        assert logits.requires_grad
        with pytest.raises(NotImplementedError, match=r"no backward pass.*set_recurrent_implementation\(model, None\)"):
            logits.sum().backward()
        model.train()
        with pytest.raises(NotImplementedError, match="NemotronHMamba2Mixer in training mode"):
            model(ids)
        set_recurrent_implementation(model, None)
        model(ids).logits.sum().backward()
    assert all(parameter.grad.any() for name, parameter in model.named_parameters() if "A_log" in name)


def test_packed_sequences():
    """transformers' own code refuses them without fla: here they are kept apart."""
    model, (ids, _) = model_of("qwen3_next"), ids_of("cpu", padded=False)
    alone = [model(part).logits for part in (ids[:1, :8], ids[:1, 8:])]
    set_recurrent_implementation(model)
    positions = torch.cat((torch.arange(8), torch.arange(13)))[None]
    starts, sequence = torch.tensor([0, 8, 21], dtype=torch.int32), torch.tensor([[0] * 8 + [1] * 13], dtype=torch.int32)
    lengths = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=13, max_length_k=13)
    packed = model(ids[:1], position_ids=positions, seq_idx=sequence, use_cache=False, **lengths).logits
    assert (packed - torch.cat(alone, 1)).abs().max() < 2e-5 * packed.abs().max()


def test_refused():
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**dict(COMMON, num_hidden_layers=1)))
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM: expected layers that call one of causal_conv1d_fn"):
        set_recurrent_implementation(llama)
    with pytest.raises(ValueError, match="expected 'imbrex' or None, got 'fla'"):
        set_recurrent_implementation(llama, "fla")
    with pytest.raises(NotImplementedError, match=r"transformers 5.16 or later, got 5.15.1"):
        _versions.check_recurrent("5.15.1")
