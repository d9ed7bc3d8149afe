"""Small models with random weights, as folders that vLLM and SGLang load: config, weights, tokenizer. make_models.py FOLDER NAME..."""

import json
import sys
import zlib
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
COMMON = dict(vocab_size=VOCABULARY, max_position_embeddings=16384, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False)


def shape(hidden=256, layers=4, q_heads=8, kv_heads=2, head_dim=64, **more):
    return dict(
        COMMON,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        **more,
    )


# With tied embeddings, as published models have them: vLLM and SGLang read no others of Gemma.
GEMMA = dict(query_pre_attn_scalar=64, sliding_window=64)
GEMMA2 = dict(GEMMA, attn_logit_softcapping=20.0, final_logit_softcapping=30.0, hidden_act="gelu_pytorch_tanh")  # SGLang asks for hidden_act
GEMMA3 = dict(GEMMA, layer_types=["sliding_attention"] * 3 + ["full_attention"])
GPT_OSS = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=128)

# Latent attention. Every layer is dense: a rounding would change a router's choice. SGLang's engine for CPUs has no RoPE but YaRN's, and vLLM's turns
# queries wrongly without it.
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
DEEPSEEK = dict(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=4, moe_layer_freq=1)

# Layers with a state. All experts of the one layer that has some are taken: vLLM asks for one at least. A block of vLLM's prefix cache has at most 256 tokens.
QWEN3_NEXT = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64, mlp_only_layers=[0, 1, 2])
EXPERTS = dict(num_experts=4, num_experts_per_tok=4, moe_intermediate_size=64, shared_expert_intermediate_size=64)
NEMOTRON_H = dict(mamba_num_heads=4, mamba_head_dim=64, ssm_state_size=64, n_groups=2, layers_block_type=["mamba", "mlp", "attention", "mamba"])
JAMBA = dict(num_experts=1, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=16, mamba_dt_rank=16)


def without(name, given):
    return {key: value for key, value in given.items() if key != name}


MODELS = {
    "llama": lambda: transformers.LlamaConfig(**shape()),
    "qwen3": lambda: transformers.Qwen3Config(**shape(q_heads=4, kv_heads=1, head_dim=128)),
    "gemma2": lambda: transformers.Gemma2Config(**{**shape(**GEMMA2), "tie_word_embeddings": True}),
    "gemma3": lambda: transformers.Gemma3TextConfig(**{**shape(**GEMMA3), "tie_word_embeddings": True}),
    "gpt-oss": lambda: transformers.GptOssConfig(**shape(**GPT_OSS)),
    "deepseek": lambda: transformers.DeepseekV2Config(
        **{**shape(layers=3, kv_heads=8), "head_dim": 64},
        **DEEPSEEK,
        first_k_dense_replace=3,
        moe_intermediate_size=64,
        num_experts_per_tok=2,
        rope_parameters=YARN,
    ),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**shape(q_heads=4), **QWEN3_NEXT, **EXPERTS),
    "nemotron-h": lambda: transformers.NemotronHConfig(**shape(q_heads=4), **NEMOTRON_H),
    "jamba": lambda: transformers.JambaConfig(**without("head_dim", shape(q_heads=4)), **JAMBA),
    # Attention is most of its work, so that tokens/s tell something of the backends.
    "speed": lambda: transformers.LlamaConfig(**shape(hidden=512, layers=2, q_heads=32, kv_heads=8, head_dim=128)),
}


@torch.no_grad()
def fill(model):
    """Weights of a scale at which attention matters: transformers' own make all scores about 0. The same for a name on every machine."""
    gemma = "gemma" in model.config.model_type
    hidden = model.config.hidden_size
    for name, x in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        last = name.split(".")[-1]
        if "sinks" in name:
            mean, std = 1.0, 1.0
        elif last == "A_log":
            x.copy_((0.5 + 8 * torch.rand(x.shape, generator=generator)).log())  # some channels forget, others do not
            continue
        elif last == "dt_bias" or name.endswith("dt_proj.bias"):
            mean, std = -2.0, 0.5
        elif last == "D" or "conv1d.weight" in name:
            mean, std = 0.0, 0.5
        elif x.dim() == 1 or name.endswith("bias"):
            mean, std = (0.0 if gemma else 1.0, 0.05) if "norm" in name else (0.0, 0.05)
        elif "embed_tokens" in name:
            mean, std = 0.0, hidden**-0.5 if gemma else 1.0
        else:
            mean, std = 0.0, {"q_proj": 1.4, "k_proj": 1.4, "o_proj": 3, "lm_head": 2}.get(name.split(".")[-2], 1) * x.shape[-1] ** -0.5
        x.copy_(torch.randn(x.shape, generator=generator) * std + mean)


def tokenizer():
    """A word for each token: "t17"."""
    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", "<unk>"] + [f"t{i}" for i in range(4, VOCABULARY)])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##", cleanup=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def make(folder, name):
    config = MODELS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    saved["torch_dtype"] = saved["dtype"] = "bfloat16"
    path.write_text(json.dumps(saved, indent=1))


if __name__ == "__main__":
    for name in sys.argv[2:] or MODELS:
        make(Path(sys.argv[1]) / name, name)
        print("made", name)
