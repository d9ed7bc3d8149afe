"""examples/llama against transformers: random small checkpoints, logits of the prefill and of each decode step, greedy tokens.

The program is IMBREX_LLAMA, or what the test `llama` of ctest leaves in build/llama.
"""
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROGRAM = Path(os.environ.get("IMBREX_LLAMA", Path(__file__).resolve().parents[2] / "build/llama/imbrex_llama"))
pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason=f"{PROGRAM} is not there: build examples/llama or set IMBREX_LLAMA")

SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 416,
    "vocab_size": 515,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64,
}
# As DeepSeek-V2-Lite has it: latents, and from the second layer on experts that a softmax chooses, beside shared ones.
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 56,
    "topk_method": "greedy",
}
MODELS = {
    "llama": ("Llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "llama_biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 64, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": 9, "head_dim": 40}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "tie_word_embeddings": True}),
    "deepseek_v2_lite": ("DeepseekV2", {**LATENT, "rope_parameters": YARN}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "q_lora_rank": 48, "first_k_dense_replace": 3}),
    "qwen3": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
}
PROMPT, STEPS = 37, 12
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def save(name, dtype, folder, **options):
    """A random checkpoint with logits that depend on attention."""
    family, fields = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **fields})
    torch.manual_seed(list(MODELS).index(name))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in key))
            elif parameter.ndim == 3:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[2] ** 0.5)
            else:
                gain = 1.7 if "q_proj" in key or "k_proj" in key else 1.0
                parameter.copy_(torch.randn_like(parameter) * gain / parameter.shape[1] ** 0.5)
    model.to(dtype).save_pretrained(folder, **options)


def load(folder, dtype):
    """As a user would: the frequencies of the rotation stay f32, which `model.to(torch.bfloat16)` would round."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others are not for float64
    return model


def run(folder, prompts, tmp_path, *options):
    """Token ids of each prompt's answer, and the logits of all computed tokens."""
    out = tmp_path / "logits.npy"
    arguments = [x for prompt in prompts for x in ("--prompt", ",".join(map(str, prompt)))]
    command = [PROGRAM, folder, *arguments, "--generate", str(STEPS), "--logits", out, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [list(map(int, line.split(","))) for line in done.stdout.split()], np.load(out)


@torch.no_grad()
def steps_of(model, tokens, prompt):
    """Logits of a prefill and of the decode steps after it, given all tokens: f64 [tokens, vocab]."""
    out = model(torch.tensor([tokens[:prompt]]), use_cache=True)
    rows = [out.logits[0]]
    for token in tokens[prompt:]:
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
        rows.append(out.logits[0])
    return torch.cat(rows).double().numpy()


def greedy(model, prompt, steps):
    tokens = list(prompt)
    for _ in range(steps):
        tokens.append(int(steps_of(model, tokens, len(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_f32(name, device, tmp_path):
    save(name, torch.float32, tmp_path)
    double = load(tmp_path, torch.float64)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, SHAPE["vocab_size"], size).tolist() for size in (PROMPT, 5)]
    answers, logits = run(tmp_path, prompts, tmp_path, "--device", device)
    at = 0
    for prompt, answer in zip(prompts, answers):
        expected = steps_of(double, prompt + answer[:-1], len(prompt))
        got = logits[at : at + len(expected)]
        at += len(expected)
        assert np.abs(got - expected).max() <= 2e-5 * np.abs(expected).max()
        assert answer == greedy(double, prompt, STEPS)
    assert at == len(logits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_bf16(name, device, tmp_path):
    """Against double precision, at most twice the error of transformers in bf16."""
    save(name, torch.bfloat16, tmp_path)
    prompt = np.random.default_rng(4).integers(0, SHAPE["vocab_size"], PROMPT).tolist()
    (answer,), logits = run(tmp_path, [prompt], tmp_path, "--device", device)
    tokens = prompt + answer[:-1]
    theirs = steps_of(load(tmp_path, torch.bfloat16), tokens, len(prompt))
    expected = steps_of(load(tmp_path, torch.float64), tokens, len(prompt))
    assert logits.shape == expected.shape
    error, their_error = np.abs(logits - expected), np.abs(theirs - expected)
    assert error.max() <= 2 * their_error.max() and error.mean() <= 1.5 * their_error.mean()
    experts = MODELS[name][1].get("first_k_dense_replace", len(MODELS)) < SHAPE["num_hidden_layers"]  # rounding takes a token to another one
    assert their_error.max() <= (0.25 if experts else 0.1) * np.abs(expected).max()  # the yardstick itself
    chosen = expected[len(prompt) - 1 :][np.arange(STEPS), answer]
    assert (expected[len(prompt) - 1 :].max(axis=1) - chosen).max() <= 2 * error.max()


def test_f16_in_shards(tmp_path):
    """What runs in f32 has the checkpoint's f16 numbers, exactly."""
    save("qwen2", torch.float16, tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    prompt = np.random.default_rng(5).integers(0, SHAPE["vocab_size"], PROMPT).tolist()
    (answer,), logits = run(tmp_path, [prompt], tmp_path)
    expected = steps_of(load(tmp_path, torch.float64), prompt + answer[:-1], len(prompt))
    assert np.abs(logits - expected).max() <= 2e-5 * np.abs(expected).max()
