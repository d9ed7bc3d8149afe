#!/usr/bin/env python3
"""examples/llama on random checkpoints: logits against reference.py, batches and chunks against each other, and hostile files.

llama_test.py PROGRAM, the standard library only. Run by ctest.
"""
import json
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import checkpoints  # noqa: E402
import reference  # noqa: E402

PROGRAM = ""
WORK = ""  # a folder for checkpoints
# Sizes are no multiples of what the products of matrices work in.
SHAPE = {"hidden_size": 36, "intermediate_size": 52, "vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 6,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"type": "linear", "factor": 4.0}


def case(dtype, family, without, shards=1, **fields):
    """`without`: fields of the config without which the logits must be others, or the comparison would not see a mistake in them."""
    return {"dtype": dtype, "shards": shards, "without": without, "config": {**SHAPE, "model_type": family, **fields}}


CASES = {
    "llama": case("F32", "llama", ["rope_scaling", "rope_theta"], rope_scaling=LLAMA3, rope_theta=30000.0),
    "llama, biases": case("F16", "llama", ["rope_parameters"], shards=3, attention_bias=True, mlp_bias=True,
                          rope_parameters={"rope_theta": 300.0, "rope_type": "default"}),
    "mistral": case("F32", "mistral", ["sliding_window", "rope_scaling"], sliding_window=5, rope_scaling=LINEAR, num_key_value_heads=1),
    "qwen2": case("F32", "qwen2", ["use_sliding_window"], use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": case("BF16", "qwen3", ["rope_theta"], rope_theta=1e6, tie_word_embeddings=True, num_key_value_heads=3),
    # Longer than the blocks of a product, in rows and in depth. Head dims follow from the hidden size.
    "long": case("F32", "llama", [], intermediate_size=520, num_hidden_layers=1, head_dim=None, hidden_size=48),
}


class Checkpoint:
    """A random checkpoint in a folder, and its reference."""

    def __init__(self, name, seed=0):
        chosen = CASES[name]
        self.config = chosen["config"]
        self.tensors = checkpoints.random_tensors(self.config, chosen["dtype"], seed)
        self.path = Path(tempfile.mkdtemp(dir=WORK))
        checkpoints.write(self.path, self.config, self.tensors, chosen["shards"])

    def model(self, **changes):
        weights = {name: (shape, checkpoints.decoded(data, dtype)) for name, (dtype, shape, data) in self.tensors.items()}
        return reference.Model({**self.config, **changes}, weights)


def start(folder, prompts, *options):
    arguments = [x for prompt in prompts for x in ("--prompt", ",".join(map(str, prompt)))]
    return subprocess.run([PROGRAM, str(folder), *arguments, *options], capture_output=True, text=True, timeout=60)


def run(folder, prompts, *options):
    """Answers, and the logits of all computed tokens as one bytes object of f32."""
    out = Path(folder) / "logits.npy"
    done = start(folder, prompts, "--logits", str(out), *options)
    if done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode}: {done.stderr}")
    data = out.read_bytes()
    (length,) = struct.unpack("<H", data[8:10])
    header = eval(data[10 : 10 + length])  # noqa: S307: a Python literal, by the definition of .npy
    answers = [list(map(int, line.split(","))) for line in done.stdout.split()]
    assert header["descr"] == "<f4" and (10 + length) % 64 == 0
    assert len(data) == 10 + length + 4 * header["shape"][0] * header["shape"][1]
    return answers, data[10 + length :]


def rows_of(data, vocab):
    values = struct.unpack(f"<{len(data) // 4}f", data)
    return [values[i : i + vocab] for i in range(0, len(values), vocab)]


def difference(a, b):
    """Largest and root-mean-square difference, in parts of the root mean square of a."""
    pairs = [(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)]
    size = (sum(x * x for x, _ in pairs) / len(pairs)) ** 0.5
    return max(abs(x - y) for x, y in pairs) / size, (sum((x - y) ** 2 for x, y in pairs) / len(pairs)) ** 0.5 / size


def prompt_of(length, seed=1):
    return random.Random(seed).choices(range(SHAPE["vocab_size"]), k=length)


class Logits(unittest.TestCase):
    def compare(self, name, length, generate, largest, mean, *options):
        checkpoint = Checkpoint(name)
        prompt = prompt_of(length)
        (answer,), data = run(checkpoint.path, [prompt], "--generate", str(generate), *options)
        tokens = prompt + answer[:-1]
        expected = checkpoint.model().logits(tokens)
        got = rows_of(data, SHAPE["vocab_size"])
        error = difference(expected, got)
        self.assertLess(error[0], largest)
        self.assertLess(error[1], mean)
        for row, token in zip(got[length - 1 :], answer, strict=True):
            self.assertEqual(max(row), row[token], "greedy")
        for field in CASES[name]["without"]:
            other = checkpoint.model(**{field: 10000.0 if field == "rope_theta" else None})
            seen = difference(expected, other.logits(tokens))
            self.assertGreater(seen[1], 5 * mean, f"the comparison does not see {field}")
        return expected, answer, length

    def test_f32(self):
        for name in CASES:
            with self.subTest(name):
                length = 70 if name == "long" else 18
                expected, answer, length = self.compare(name, length, 8, 2e-5, 3e-6, "--dtype", "f32", "--threads", "2")
                self.assertEqual(answer, [max(range(len(row)), key=row.__getitem__) for row in expected[length - 1 :]])

    def test_bf16(self):
        for name in ("llama", "qwen2", "qwen3"):
            with self.subTest(name):
                self.compare(name, 18, 8, 0.2, 0.03, "--dtype", "bf16")


class SameBits(unittest.TestCase):
    """What is batched with a request, how its prompt is cut and how many threads there are changes nothing."""

    def test_batch_chunks_threads(self):
        for name, dtype in (("qwen2", "f32"), ("qwen3", "bf16")):
            checkpoint = Checkpoint(name)
            prompts = [prompt_of(length, seed=length) for length in (3, 21, 40)]
            alone = [run(checkpoint.path, [prompt], "--generate", "9", "--dtype", dtype, "--threads", "1") for prompt in prompts]
            expected = [answer for (answer,), _ in alone], b"".join(data for _, data in alone)
            for options in (("--threads", "1"), ("--threads", "3"), ("--step-tokens", "7")):
                with self.subTest(name, options=options):
                    self.assertEqual(run(checkpoint.path, prompts, "--generate", "9", "--dtype", dtype, *options), expected)

    def test_logits_do_not_change_tokens(self):
        checkpoint = Checkpoint("llama")
        prompts = [prompt_of(5), prompt_of(30)]
        with_logits, _ = run(checkpoint.path, prompts, "--generate", "4")
        lines = start(checkpoint.path, prompts, "--generate", "4").stdout.split()
        self.assertEqual([list(map(int, line.split(","))) for line in lines], with_logits)


def one_entry(entry, data=b"\0" * 8):
    text = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"a": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


class Refusals(unittest.TestCase):
    def expect(self, folder, words, *options, prompt=(1, 2)):
        done = start(folder, [list(prompt)], "--generate", "2", *options)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(done.stdout, "")
        for word in words:
            self.assertIn(word, done.stderr)

    def test_files(self):
        checkpoint = Checkpoint("llama")
        file = checkpoint.path / "model.safetensors"
        good = file.read_bytes()
        (header,) = struct.unpack("<Q", good[:8])
        files = {
            "empty": (b"", ["expected 8 bytes of header size", "has 0"]),
            "seven bytes": (good[:7], ["has 7"]),
            "huge header": (b"\xff" * 8 + good[8:], ["at most 100000000", "18446744073709551615"]),
            "header beyond the file": (good[: 8 + header - 1], [f"a header of {header} bytes", f"has {header - 1}"]),
            "truncated data": (good[:-1], ["data_offsets: expected a range within"]),
            "trailing data": (good + b"\0", ["they end at"]),
            "no JSON": (one_entry(b"{]"), ["not JSON"]),
            "not UTF-8": (one_entry(b'{"\xff": 1}'), ["not JSON"]),
            "no object": (one_entry([1]), ["expected a JSON object, got array"]),
            "deep": (one_entry(b'{"a":' + b"[" * 50000), ["at most 4 levels"]),
            "twice": (one_entry(b'{"a": 1, "a": 2}'), ["a appears twice"]),
            "fields": (one_entry({"a": {"dtype": "F32"}}), ["an object of dtype, shape and data_offsets"]),
            "a number": (one_entry({"a": 3}), ["an object of dtype"]),
            "dtype": (one_entry(tensor(dtype="F33")), ["F32 or BF16, got F33"]),
            "dtype no string": (one_entry(tensor(dtype=7)), ["dtype: expected a string, got number"]),
            "shape no array": (one_entry({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}), ["shape: expected an array"]),
            "negative size": (one_entry(tensor(shape=(-2,))), ["shape: expected a whole number", "-2"]),
            "fraction": (one_entry(tensor(shape=(2.5,))), ["got 2.5"]),
            "2^64": (one_entry(tensor(shape=(1 << 64,))), ["shape: expected a whole number"]),
            "overflow": (one_entry(tensor(shape=(1 << 62, 4))), ["less than 2^63 bytes"]),
            "rank": (one_entry(tensor(shape=(1,) * 9)), ["at most 8"]),
            "offsets fall": (one_entry(tensor(offsets=(8, 0))), ["got 8 to 0"]),
            "offsets beyond": (one_entry(tensor(offsets=(8, 16))), ["the 8 bytes of data, got 8 to 16"]),
            "three offsets": (one_entry(tensor(offsets=(0, 4, 8))), ["expected two numbers"]),
            "offsets and shape": (one_entry(tensor(shape=(3,))), ["the 12 bytes of its shape, data_offsets have 8"]),
            "hole": (one_entry(tensor(offsets=(4, 12)), b"\0" * 12), ["begins at byte 0", "begins at 4"]),
            "overlap": (one_entry({**tensor(), "b": tensor(offsets=(4, 12))["a"]}, b"\0" * 12), ["begins at byte 8", "begins at 4"]),
        }
        for name, (content, words) in files.items():
            with self.subTest(name):
                file.write_bytes(content)
                self.expect(checkpoint.path, ["imbrex_llama: ", *words])

    def test_damaged_headers(self):
        """Any byte of a header changed: an error, or another name in the metadata; never a crash."""
        checkpoint = Checkpoint("llama")
        file = checkpoint.path / "model.safetensors"
        good = file.read_bytes()
        (header,) = struct.unpack("<Q", good[:8])
        rng = random.Random(11)
        codes = set()
        for _ in range(150):
            bad = bytearray(good)
            for _ in range(rng.choice((1, 1, 3))):
                bad[rng.choice((rng.randrange(8), rng.randrange(8, 8 + header)))] = rng.choice((rng.randrange(256), *b'0919{}[]",:-'))
            file.write_bytes(bad)
            codes.add(start(checkpoint.path, [[1]], "--generate", "1").returncode)
        self.assertLessEqual(codes, {0, 2})
        self.assertIn(2, codes)

    def test_tensors(self):
        def changed(change):
            tensors = dict(good.tensors)
            change(tensors)
            checkpoints.write(good.path, good.config, tensors)

        good = Checkpoint("llama")
        norm, extra = "model.norm.weight", "model.layers.0.self_attn.q_norm.weight"
        changes = {
            "missing": (lambda t: t.pop(norm), [f"expected a tensor {norm}"]),
            "shape": (lambda t: t.update({norm: ("F32", (9, 4), t[norm][2])}), ["the shape [36], got [9, 4]"]),
            "dtype": (lambda t: t.update({norm: ("I32", (36,), t[norm][2])}), [f"{norm}: expected F32, F16 or BF16, got I32"]),
            "left over": (lambda t: t.update({extra: ("F32", (1,), b"\0" * 4)}), [extra, "no tensor beside those of the model, got 1"]),
        }
        for name, (change, words) in changes.items():
            with self.subTest(name):
                changed(change)
                self.expect(good.path, words)
        changed(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (1,), b"\0" * 4)}))
        self.assertEqual(start(good.path, [[1]]).returncode, 0, "the rotation's frequencies are known to be left out")

    def test_index(self):
        checkpoint = Checkpoint("llama, biases")
        index = checkpoint.path / "model.safetensors.index.json"
        good = json.loads(index.read_text())
        name = "model.norm.weight"
        file = good["weight_map"][name]
        other = next(f for f in good["weight_map"].values() if f != file)
        for value, words in (("../model-00001-of-00003.safetensors", ["a .safetensors file in the folder, got ../"]),
                             ("config.json", ["a .safetensors file in the folder, got config.json"]),
                             ("absent.safetensors", ["cannot open"]), (3, ["the name of a file, got number"]),
                             (other, [name, "is in", other])):
            with self.subTest(value):
                index.write_text(json.dumps({"weight_map": {**good["weight_map"], name: value}}))
                self.expect(checkpoint.path, words)
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], "model.absent": file}}))
        self.expect(checkpoint.path, [file, "expected the tensor model.absent"])
        index.write_text("{}")
        self.expect(checkpoint.path, ["expected an object weight_map"])
        index.unlink()
        self.expect(checkpoint.path, ["cannot open", "model.safetensors"])

    def test_configs(self):
        checkpoint = Checkpoint("llama")
        yarn = {"rope_type": "yarn", "factor": 2.0}
        for change, words in (({"model_type": "gemma2"}, ["model_type: expected llama, mistral, qwen2, qwen3 or deepseek_v2, got gemma2"]),
                              ({"hidden_act": "gelu"}, ["hidden_act: expected silu, got gelu"]),
                              ({"quantization_config": {"bits": 4}}, ["quantization_config: expected none"]),
                              ({"rope_scaling": yarn}, ["rope_type: expected default, linear, llama3 or, with latent attention, yarn, got yarn"]),
                              ({"rope_scaling": 3}, ["rope_parameters: expected an object, got 3"]),
                              ({"rope_scaling": {**LLAMA3, "factor": "8"}}, ["factor: expected a number", '"8"']),
                              ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ["below high_freq_factor, got 1 and 1"]),
                              ({"rope_parameters": yarn}, ["got both"]),
                              ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor: expected 1, got 0.5"]),
                              ({"vocab_size": 60.5}, ["vocab_size: expected a whole number, got 60.5"]),
                              ({"rms_norm_eps": None}, ["rms_norm_eps: expected a number, there is none"]),
                              ({"tie_word_embeddings": 1}, ["tie_word_embeddings: expected true or false, got 1"]),
                              ({"attention_bias": True}, ["expected a tensor model.layers.0.self_attn.q_proj.bias"]),
                              ({"vocab_size": 60}, ["the shape [60, 36], got [61, 36]"]),
                              ({"head_dim": 20}, ["20 is not a multiple of 8"])):
            with self.subTest(change):
                (checkpoint.path / "config.json").write_text(json.dumps({**checkpoint.config, **change}))
                self.expect(checkpoint.path, words)
        (checkpoint.path / "config.json").write_text("{")
        self.expect(checkpoint.path, ["config.json: not JSON"])
        (checkpoint.path / "config.json").unlink()
        self.expect(checkpoint.path, ["config.json is not a file"])

    def test_arguments(self):
        checkpoint = Checkpoint("llama")
        self.expect(checkpoint.path, ["a token below the vocabulary's 61, got 61"], prompt=(1, 61))
        self.expect(checkpoint.path, ["max_position_embeddings = 128", "got 129"], prompt=[1] * 127)
        self.expect(checkpoint.path, ["cuda:7"], "--device", "cuda:7")
        for text in ("", "1,,2", "1,", "-1", "x", "1 2", "9999999999"):
            done = subprocess.run([PROGRAM, str(checkpoint.path), f"--prompt={text}"], capture_output=True, text=True)
            self.assertNotEqual(done.returncode, 0, text)
            self.assertEqual(done.stdout, "")


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    with tempfile.TemporaryDirectory() as WORK:
        unittest.main()
