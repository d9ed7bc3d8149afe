"""The forward pass of Llama, Mistral, Qwen2 and Qwen3 in doubles and plain Python: what llama_test.py compares examples/llama with."""
import math
from operator import mul


def dot(a, b):
    return sum(map(mul, a, b))


def rms_norm(x, weight, eps):
    factor = 1 / math.sqrt(dot(x, x) / len(x) + eps)
    return [a * factor * w for a, w in zip(x, weight)]


def softmax(logits):
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    total = sum(weights)
    return [w / total for w in weights]


def rope_frequencies(config, dim):
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    result = []
    for i in range(dim // 2):
        frequency = theta ** (-2 * i / dim)
        if kind == "linear":
            frequency /= rope["factor"]
        if kind == "llama3":
            wavelength, original = 2 * math.pi / frequency, rope["original_max_position_embeddings"]
            if wavelength > original / rope["low_freq_factor"]:
                frequency /= rope["factor"]
            elif wavelength > original / rope["high_freq_factor"]:
                smooth = (original / wavelength - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
                frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        result.append(frequency)
    return result


def rotated(x, position, frequencies):
    half = len(x) // 2
    result = list(x)
    for i, frequency in enumerate(frequencies):
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        result[i] = x[i] * c - x[i + half] * s
        result[i + half] = x[i + half] * c + x[i] * s
    return result


def window_of(config, layer):
    """Keys that a query sees, itself included; None: all."""
    window = config.get("sliding_window")
    if config["model_type"] == "mistral":
        return window
    if config["model_type"].startswith("qwen") and config.get("use_sliding_window") and layer >= config["max_window_layers"]:
        return window
    return None


class Model:
    def __init__(self, config, weights):
        """weights: name to (shape, list of floats)"""
        self.config = config
        self.weights = weights
        self.dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        self.frequencies = rope_frequencies(config, self.dim)

    def vector(self, name):
        return self.weights[name][1]

    def rows(self, name):
        (_, columns), values = self.weights[name]
        return [values[i : i + columns] for i in range(0, len(values), columns)]

    def linear(self, xs, name):
        matrix = self.rows(name + ".weight")
        bias = self.weights.get(name + ".bias", (None, [0.0] * len(matrix)))[1]
        return [[dot(row, x) + b for row, b in zip(matrix, bias)] for x in xs]

    def heads(self, xs, norm):
        """[tokens][heads][dim], with the norm of a head and the rotation where `norm` is not None."""
        result = []
        for position, x in enumerate(xs):
            heads = [x[i : i + self.dim] for i in range(0, len(x), self.dim)]
            if norm is not None and norm in self.weights:
                heads = [rms_norm(head, self.vector(norm), self.config["rms_norm_eps"]) for head in heads]
            if norm is not None:
                heads = [rotated(head, position, self.frequencies) for head in heads]
            result.append(heads)
        return result

    def attention(self, xs, at, layer):
        q = self.heads(self.linear(xs, at + "q_proj"), at + "q_norm.weight")
        k = self.heads(self.linear(xs, at + "k_proj"), at + "k_norm.weight")
        v = self.heads(self.linear(xs, at + "v_proj"), None)
        window = window_of(self.config, layer) or len(xs)
        group = len(q[0]) // len(k[0])
        attended = []
        for p in range(len(xs)):
            seen = range(max(0, p - window + 1), p + 1)
            row = []
            for head, query in enumerate(q[p]):
                weights = softmax([dot(query, k[j][head // group]) / math.sqrt(self.dim) for j in seen])
                row += [sum(w * v[j][head // group][d] for w, j in zip(weights, seen)) for d in range(self.dim)]
            attended.append(row)
        return self.linear(attended, at + "o_proj")

    def mlp(self, xs, at):
        gate, up = self.linear(xs, at + "gate_proj"), self.linear(xs, at + "up_proj")
        return self.linear([[g / (1 + math.exp(-g)) * u for g, u in zip(gs, us)] for gs, us in zip(gate, up)], at + "down_proj")

    def logits(self, tokens):
        """[tokens][vocab]"""
        eps = self.config["rms_norm_eps"]
        embedding = self.rows("model.embed_tokens.weight")
        xs = [embedding[token] for token in tokens]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            for norm, block in (("input_layernorm", lambda ys: self.attention(ys, at + "self_attn.", layer)),
                                ("post_attention_layernorm", lambda ys: self.mlp(ys, at + "mlp."))):
                normed = [rms_norm(x, self.vector(f"{at}{norm}.weight"), eps) for x in xs]
                xs = [[a + b for a, b in zip(x, y)] for x, y in zip(xs, block(normed))]
        xs = [rms_norm(x, self.vector("model.norm.weight"), eps) for x in xs]
        return self.linear(xs, "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head")
