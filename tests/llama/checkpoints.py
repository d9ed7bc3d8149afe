"""Small random checkpoints in the layout of Hugging Face, written with the standard library alone. Used by llama_test.py."""
import json
import random
import struct
from pathlib import Path


def bf16_bits(value):
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def encoded(values, dtype):
    """The bytes of a tensor in a file: F32, F16 or BF16."""
    if dtype == "BF16":
        return struct.pack(f"<{len(values)}H", *map(bf16_bits, values))
    return struct.pack(f"<{len(values)}{'f' if dtype == 'F32' else 'e'}", *values)


def decoded(data, dtype):
    """What the bytes stand for, as doubles."""
    if dtype == "BF16":
        words = struct.unpack(f"<{len(data) // 2}H", data)
        return list(struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *(w << 16 for w in words))))
    size, letter = (4, "f") if dtype == "F32" else (2, "e")
    return list(struct.unpack(f"<{len(data) // size}{letter}", data))


def shapes(config):
    """Name to shape of every tensor of the model."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    family = config["model_type"]
    bias = config.get("attention_bias", False)
    result = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        result["lm_head.weight"] = (vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        result[at + "input_layernorm.weight"] = result[at + "post_attention_layernorm.weight"] = (hidden,)
        linears = {"self_attn.q_proj": (q, hidden, bias or family == "qwen2"), "self_attn.k_proj": (kv, hidden, bias or family == "qwen2"),
                   "self_attn.v_proj": (kv, hidden, bias or family == "qwen2"), "self_attn.o_proj": (hidden, q, bias)}
        for name in ("gate_proj", "up_proj"):
            linears["mlp." + name] = (inner, hidden, config.get("mlp_bias", False))
        linears["mlp.down_proj"] = (hidden, inner, config.get("mlp_bias", False))
        for name, (rows, columns, biased) in linears.items():
            result[f"{at}{name}.weight"] = (rows, columns)
            if biased:
                result[f"{at}{name}.bias"] = (rows,)
        if family == "qwen3":
            result[at + "self_attn.q_norm.weight"] = result[at + "self_attn.k_norm.weight"] = (dim,)
    return result


def random_tensors(config, dtype, seed):
    """Name to (dtype, shape, bytes). Queries and keys are large enough for attention to prefer some tokens."""
    rng = random.Random(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        if len(shape) == 2:
            gain = 1.7 if "q_proj" in name or "k_proj" in name else 1.0
            values = [rng.gauss(0, gain / shape[1] ** 0.5) for _ in range(shape[0] * shape[1])]
        else:
            values = [rng.gauss(1.0 if "norm" in name else 0.0, 0.2) for _ in range(shape[0])]
        tensors[name] = (dtype, shape, encoded(values, dtype))
    return tensors


def safetensors(tensors):
    """The bytes of a file."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(folder, config, tensors, shards=1):
    """The folder of a checkpoint, in one file or in shards with an index."""
    folder = Path(folder)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(tensors))
        return
    names, index = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        index.update(dict.fromkeys(names[i::shards], file))
        (folder / file).write_bytes(safetensors({name: tensors[name] for name in names[i::shards]}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
