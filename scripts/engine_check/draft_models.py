"""Draft models with random weights for SGLang's workers, as folders, and a target of few tokens: of random drafts some are then right."""

import json
import random

import torch
import transformers
from make_models import fill, shape, tokenizer
from safetensors.torch import save_file

TOKENS, MASK = 24, 3  # the first four are special
LENGTHS, COUNT = (50, 133, 7), 32  # of the prompts that checks of drafts have, and greedy tokens of each
HIDDEN, LAYERS, TAKEN = 256, 4, (0, 2)  # of the target, and after which of its layers a draft of blocks takes hidden states
CONFIG = dict(  # of all drafts that are made here
    hidden_size=HIDDEN,
    intermediate_size=2 * HIDDEN,
    hidden_act="silu",
    rope_theta=10000.0,
    max_position_embeddings=16384,
    vocab_size=TOKENS,
    attention_bias=False,
    tie_word_embeddings=False,
)
DRAFT = dict(layers=2, q_heads=4, kv_heads=2, head_dim=64)


def prompts(vocabulary=TOKENS):
    made = [random.Random(seed) for seed in range(len(LENGTHS))]
    return [[r.randrange(4, vocabulary) for _ in range(length)] for r, length in zip(made, LENGTHS)]


@torch.no_grad()
def answers_of(target, count):
    """Pairs of a prompt, those of the checks first and then others, and so many greedy tokens of the target's: what drafts are fitted to."""
    asked = prompts() + [[r.randrange(4, TOKENS) for _ in range(24)] for r in map(random.Random, range(100, 116))]
    given = [target.generate(torch.tensor([x]), do_sample=False, max_new_tokens=count, eos_token_id=None)[0, len(x) :].tolist() for x in asked]
    return list(zip(asked, given))


def save(folder, config, weights):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config, torch_dtype="float32", dtype="float32"), indent=1))
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors", metadata=dict(format="pt"))
    tokenizer().save_pretrained(folder)


@torch.no_grad()
def target(folder, config_class=transformers.LlamaConfig, **changes):
    config = config_class(**{**shape(hidden=HIDDEN, layers=LAYERS), "vocab_size": TOKENS, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


class Random:
    """Matrices that keep the size of what they multiply, and norms about 1."""

    def __init__(self, seed):
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *sizes, scale=1.0):
        return torch.randn(sizes, generator=self._generator) * scale * sizes[-1] ** -0.5

    def norm(self, size):
        return 1 + 0.05 * torch.randn(size, generator=self._generator)


def decoder_layer(random, head, size, norms=True):
    """Of Qwen's kind: attention, with norms of queries and keys, and an MLP."""
    q, kv, dim = DRAFT["q_heads"] * DRAFT["head_dim"], DRAFT["kv_heads"] * DRAFT["head_dim"], DRAFT["head_dim"]
    weights = {
        "input_layernorm.weight": random.norm(size),
        "post_attention_layernorm.weight": random.norm(size),
        "self_attn.q_proj.weight": random(q, size, scale=1.4),
        "self_attn.k_proj.weight": random(kv, size, scale=1.4),
        "self_attn.v_proj.weight": random(kv, size),
        "self_attn.o_proj.weight": random(size, q, scale=3),
        "mlp.gate_proj.weight": random(2 * size, size),
        "mlp.up_proj.weight": random(2 * size, size),
        "mlp.down_proj.weight": random(size, 2 * size),
    }
    if norms:
        weights.update({"self_attn.q_norm.weight": 1.4 * random.norm(dim), "self_attn.k_norm.weight": 1.4 * random.norm(dim)})
    return {head + name: x for name, x in weights.items()}


def blocks(size, window=0, markov_rank=0, **changes):
    """A draft of blocks of so many tokens (DFLASH), or with a rank one whose drafts also go by the draft in front (DSPARK). With a window layers are
    sliding ones, which SGLang makes causal, and full ones, which are not."""
    random = Random(5)
    config = dict(
        architectures=["DSparkDraftModel" if markov_rank else "DFlashDraftModel"],
        model_type="qwen3",
        **CONFIG,
        num_hidden_layers=DRAFT["layers"],
        num_attention_heads=DRAFT["q_heads"],
        num_key_value_heads=DRAFT["kv_heads"],
        head_dim=DRAFT["head_dim"],
        rms_norm_eps=1e-6,
        block_size=size,
        num_target_layers=LAYERS,
        dflash_config=dict(mask_token_id=MASK, target_layer_ids=list(TAKEN)),
        layer_types=["sliding_attention" if window and i % 2 == 0 else "full_attention" for i in range(DRAFT["layers"])],
        **changes,
    )
    if window:
        config.update(sliding_window=window, use_sliding_window=True, max_window_layers=0)
    weights = {"fc.weight": random(HIDDEN, len(TAKEN) * HIDDEN), "hidden_norm.weight": random.norm(HIDDEN), "norm.weight": random.norm(HIDDEN)}
    for i in range(DRAFT["layers"]):
        weights.update(decoder_layer(random, f"layers.{i}.", HIDDEN))
    if markov_rank:
        config.update(markov_rank=markov_rank, markov_head_type="vanilla")
        weights.update({f"markov_head.markov_w{i}.weight": random(TOKENS, markov_rank, scale=1.5) for i in (1, 2)})
        weights.update({"confidence_head.proj.weight": random(1, HIDDEN + markov_rank, scale=2), "confidence_head.proj.bias": torch.zeros(1)})
    return config, weights


def mtp(num_layers, window):
    """Several layers of MTP as MiMo-V2 has them: windows, sinks, values of half the size of keys. Layer i drafts the token i + 2 behind."""
    random = Random(6)
    heads = dict(
        num_attention_heads=DRAFT["q_heads"], num_key_value_heads=DRAFT["kv_heads"], head_dim=DRAFT["head_dim"], v_head_dim=DRAFT["head_dim"] // 2
    )
    config = dict(
        architectures=["MiMoV2FlashForCausalLM"],
        model_type="qwen2",
        **CONFIG,
        num_hidden_layers=1,
        hybrid_layer_pattern=[1],
        layernorm_epsilon=1e-6,
        sliding_window_size=window,
        add_swa_attention_sink_bias=True,
        num_nextn_predict_layers=num_layers,
        **heads,
        **{f"swa_{name}": value for name, value in heads.items()},
    )
    weights = {}
    for i in range(num_layers):
        head = f"model.mtp.layers.{i}."
        weights.update(decoder_layer(random, head, HIDDEN, norms=False))
        weights[head + "self_attn.v_proj.weight"] = random(heads["num_key_value_heads"] * heads["v_head_dim"], HIDDEN)
        weights[head + "self_attn.o_proj.weight"] = random(HIDDEN, heads["num_attention_heads"] * heads["v_head_dim"], scale=3)
        weights[head + "self_attn.attention_sink_bias"] = torch.ones(heads["num_attention_heads"])
        weights[head + "eh_proj.weight"] = random(HIDDEN, 2 * HIDDEN)
        weights.update({f"{head}{name}.weight": random.norm(HIDDEN) for name in ("enorm", "hnorm", "final_layernorm")})
    return config, weights


def gemma(folder):
    """A target of Gemma 4's kind whose layers all have the same heads, and an assistant over its cache."""
    common = dict(
        vocab_size=TOKENS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        global_head_dim=64,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        max_position_embeddings=16384,
        sliding_window=24,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    windows, sizes = ["sliding_attention"] * 3 + ["full_attention"], dict(hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS)
    text = dict(hidden_size=HIDDEN // 2, intermediate_size=HIDDEN, num_hidden_layers=2, num_kv_shared_layers=2, layer_types=windows[-2:])
    target = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes, layer_types=windows, **common)).eval()
    text = transformers.Gemma4TextConfig(**text, tie_word_embeddings=False, **common)
    assistant = transformers.Gemma4AssistantForCausalLM(
        transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=HIDDEN, tie_word_embeddings=False)
    ).eval()
    for seed, model in enumerate((target, assistant)):
        random = Random(7 + seed)
        for name, x in model.named_parameters():
            if x.dim() > 1:
                x.copy_(random(*x.shape, scale=1.4 if "q_proj" in name or "k_proj" in name else 1.0))
            elif "post_" in name:
                x.fill_(3.0)  # layers then say more than the token itself
    target.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return target, assistant
