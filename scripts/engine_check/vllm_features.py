"""Small models of vLLM whose steps ask for more than a causal mask, with vLLM's own attention for CPUs and with imbrex, beside transformers in float32.

vllm_features.py MODELS RESULTS [FEATURE...]: prints a Markdown table and leaves it in RESULTS with the logs; exits with 1 where imbrex is not as near to
transformers as roundings allow, or nothing tells a model that has the feature from one that has not. vllm_features.py --serve JOB ANSWERS runs an engine.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

IMAGE, IMAGE_BEGINS, IMAGE_ENDS, NEWLINES = 511, 509, 510, ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
OWN = {"CPU_ATTN": {"VLLM_PLUGINS": ""}, "imbrex": {"VLLM_PLUGINS": "imbrex", "IMBREX_VLLM_CPU_ATTN": "1"}}
ENVIRONMENT = dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_MLA_DISABLE="1",  # the model with R-SWA is one of DeepSeek's class without latents
    HF_HUB_OFFLINE="1",
)
WORST_MEAN, WORST_GAP = 0.03, 0.3


def tokens(seed, count):
    made = random.Random(seed)
    return [made.randrange(4, 500) for _ in range(count)]


def plain(*lengths):
    return [dict(ids=tokens(seed, length)) for seed, length in enumerate(lengths)]


def picture(seed):
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (64, 64, 3), dtype=np.uint8))


def sound(prompt):
    import numpy as np

    return np.random.default_rng(prompt["audio"]).standard_normal(prompt["samples"]).astype("float32") * 0.1


def serve(job, answers):
    """Two rounds of greedy answers to all prompts at once, the second out of the prefix cache where there is one."""
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job).read_text())
    limits = dict(max_model_len=2048, max_num_batched_tokens=256, max_num_seqs=16, seed=0, enforce_eager=True)
    engine = LLM(job["model"], **{**limits, **job["options"]})
    asked = []
    for prompt in job["prompts"]:
        data = {"image": [picture(seed) for seed in prompt["images"]]} if "images" in prompt else {}
        data.update({"audio": (sound(prompt), 16000)} if "audio" in prompt else {})
        asked.append({"prompt_token_ids": prompt["ids"], **({"multi_modal_data": data} if data else {})})
    sampling = SamplingParams(temperature=0, max_tokens=job["count"], logprobs=1, ignore_eos=True, detokenize=False)
    rounds = []
    for _ in range(2):
        rounds.append([])
        for given in engine.generate(asked, sampling, use_tqdm=False):
            chosen = given.outputs[0]
            logprobs = [of[token].logprob for of, token in zip(chosen.logprobs, chosen.token_ids)]
            rounds[-1].append(dict(prompt=list(given.prompt_token_ids), tokens=list(chosen.token_ids), logprobs=logprobs))
    Path(answers).write_text(json.dumps(rounds))


class Feature:
    """A model with it. logits() has those of transformers for an answer's tokens; with `without`, of a model that lacks the feature."""

    options, count, reference = {}, 24, "AutoModelForCausalLM"

    def config(self):
        raise NotImplementedError

    def make(self, folder):
        import make_models

        make_models.MODELS[folder.name] = self.config
        make_models.make(folder, folder.name)

    def load(self, folder):
        import torch
        import transformers

        made = getattr(transformers, self.reference).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return made.eval()

    def logits(self, model, prompt, answer, without):
        import torch

        ids = torch.tensor([answer["prompt"] + answer["tokens"]])
        return model(input_ids=ids, **self.inputs(ids, prompt, len(answer["prompt"]), without)).logits[0, len(answer["prompt"]) - 1 : -1]

    def inputs(self, ids, prompt, length, without):
        return {}


def mask_of(seen):
    """transformers' mask of [queries, keys]."""
    import torch

    return torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


class LocalChunks(Feature):
    """Llama 4: three layers with chunks of 256 tokens, and one that sees all."""

    prompts = plain(17, 64, 333, 700, 1100, 256, 257)

    def config(self):
        import make_models
        import transformers

        dense = dict(moe_layers=[], interleave_moe_layer_step=0, num_local_experts=2, intermediate_size_mlp=512)
        rope = dict(no_rope_layers=[1, 1, 1, 0], rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        return transformers.Llama4TextConfig(**make_models.shape(), **dense, **rope, attention_chunk_size=256, attn_temperature_tuning=False)

    def logits(self, model, prompt, answer, without):
        import transformers

        if not without:
            return super().logits(model, prompt, answer, without)
        config = transformers.Llama4TextConfig(**{**model.config.to_dict(), "attention_chunk_size": 8192})
        whole = transformers.Llama4ForCausalLM._from_config(config, attn_implementation="eager").eval()
        whole.load_state_dict(model.state_dict())
        return super().logits(whole, prompt, answer, without)


class RetainedPrompts(Feature):
    """R-SWA, of a Llama with the name of DeepSeek's class, whose generated tokens see 24 of their own behind the prompt."""

    prompts, options, count = plain(5, 17, 64, 333, 200), dict(block_size=32), 150

    def config(self):
        import make_models
        import transformers

        return transformers.LlamaConfig(**make_models.shape(head_dim=32))

    def make(self, folder):
        super().make(folder)
        shutil.copytree(folder, folder / "llama", dirs_exist_ok=True)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        del config["head_dim"]
        latent = dict(qk_nope_head_dim=0, qk_rope_head_dim=0, v_head_dim=0, kv_lora_rank=16, q_lora_rank=16)
        dense = dict(n_routed_experts=2, first_k_dense_replace=99, moe_layer_freq=1, topk_method="greedy", norm_topk_prob=False)
        config.update(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", rswa_window=24, **latent, **dense)
        path.write_text(json.dumps(config, indent=1))

    def load(self, folder):
        return super().load(folder / "llama")

    def inputs(self, ids, prompt, length, without):
        import torch

        q, kv = torch.arange(ids.shape[1])[:, None], torch.arange(ids.shape[1])[None]
        return {"attention_mask": mask_of((kv <= q) & (without or (kv < length) | (q - kv < 24)))}


class PrefixLm(Feature):
    """HRM-Text: the prompt in both directions, the answer causal."""

    prompts, options = plain(5, 17, 64, 333, 700), dict(max_num_batched_tokens=2048)

    def config(self):
        import make_models
        import transformers

        shape = make_models.shape(q_heads=4, kv_heads=4)
        del shape["num_key_value_heads"], shape["num_hidden_layers"]
        cycles = dict(num_layers_per_stack=1, num_hidden_layers=8, H_cycles=2, L_cycles=2, L_bp_cycles=[1])
        return transformers.HrmTextConfig(**shape, **cycles, embedding_scale=1.0)

    def inputs(self, ids, prompt, length, without):
        import torch

        return {"use_cache": False, "token_type_ids": (torch.arange(ids.shape[1])[None] < (0 if without else length)).long()}


class FastPrefill(Feature):
    """Gemma 3n with kv_sharing_fast_prefill: the last two of six layers are computed where logits are asked for. `without` lacks nothing."""

    prompts, options, reference = plain(5, 17, 64, 333, 700), dict(block_size=32, kv_sharing_fast_prefill=True), "Gemma3nForCausalLM"

    def config(self):
        import make_models
        import transformers

        layers = dict(layer_types=["sliding_attention", "full_attention"] * 3, sliding_window=64, num_kv_shared_layers=2)
        small = dict(laurel_rank=16, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 6, vocab_size_per_layer_input=512)
        shape = {**make_models.shape(layers=6), "tie_word_embeddings": True}
        return transformers.Gemma3nTextConfig(**shape, **layers, **small, hidden_size_per_layer_input=32)


class Images(Feature):
    """Gemma 3: images of 16 tokens in both directions, in layers with a window of 32 and in others."""

    options, reference = dict(block_size=32), "Gemma3ForConditionalGeneration"
    prompts = [
        dict(ids=tokens(0, 40)),
        dict(ids=tokens(1, 10) + [IMAGE_BEGINS] + tokens(2, 9), images=[1]),
        dict(ids=tokens(3, 100) + [IMAGE_BEGINS] + tokens(4, 7) + [IMAGE_BEGINS] + tokens(5, 70), images=[2, 3]),
        dict(ids=tokens(3, 100) + [IMAGE_BEGINS] + tokens(4, 7) + [IMAGE_BEGINS] + tokens(5, 200), images=[2, 3]),
        dict(ids=[IMAGE_BEGINS] + tokens(6, 3), images=[4]),
        dict(ids=tokens(7, 300) + [IMAGE_BEGINS], images=[5]),
    ]

    def make(self, folder):
        import make_models
        import safetensors.torch
        import transformers

        layers = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=32, query_pre_attn_scalar=64)
        text = transformers.Gemma3TextConfig(**{**make_models.shape(), "tie_word_embeddings": True}, **layers)
        sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=56, patch_size=14)
        marks = dict(boi_token_index=IMAGE_BEGINS, eoi_token_index=IMAGE_ENDS, image_token_index=IMAGE)
        config = transformers.Gemma3Config(text_config=text, vision_config=transformers.SiglipVisionConfig(**sizes), mm_tokens_per_image=16, **marks)
        model = filled(transformers.Gemma3ForConditionalGeneration(config), "gemma3")
        scaled(model, {"mm_input_projection_weight": 6})
        save(model, folder)
        save(model, folder / "hf")
        weights = safetensors.torch.load_file(folder / "model.safetensors")
        older = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in weights.items()}  # the names that vLLM reads
        safetensors.torch.save_file(older, folder / "model.safetensors", metadata={"format": "pt"})
        words = [*NEWLINES, "<start_of_image>", "<end_of_image>", "<image_soft_token>"]
        special = dict(boi_token=words[4], eoi_token=words[5], image_token=words[6])
        images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
        transformers.Gemma3Processor(images, tokenizer(words, extra_special_tokens=special), image_seq_length=16).save_pretrained(folder)

    def load(self, folder):
        import transformers

        self.processor = transformers.Gemma3ImageProcessor.from_pretrained(folder)
        return super().load(folder / "hf")

    def inputs(self, ids, prompt, length, without):
        if "images" not in prompt:
            return {}
        pixels = self.processor([picture(seed) for seed in prompt["images"]], return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "token_type_ids": (ids == (-1 if without else IMAGE)).long()}


class CrossAttention(Feature):
    """Whisper: 1500 keys of an encoder, more than the decoder's limit of 448. `without` has other sounds."""

    options, reference = dict(max_model_len=448, max_num_batched_tokens=2048), "WhisperForConditionalGeneration"
    prompts = [dict(ids=[1] + tokens(seed, n), audio=seed, samples=16000 * (2 + seed)) for seed, n in enumerate((3, 1, 20, 7, 60))]

    def make(self, folder):
        import transformers

        sizes = dict(vocab_size=512, d_model=128, encoder_layers=1, decoder_layers=3, encoder_attention_heads=2, decoder_attention_heads=2)
        marks = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[])
        config = transformers.WhisperConfig(**sizes, **marks, encoder_ffn_dim=256, decoder_ffn_dim=256, num_mel_bins=80)
        model = filled(transformers.WhisperForConditionalGeneration(config), "whisper")
        cross = {f"encoder_attn.{name}.weight": factor for name, factor in (("q_proj", 1.5), ("k_proj", 1.5), ("out_proj", 3))}
        scaled(model, {**cross, "decoder.embed_tokens.weight": 0.25, "decoder.layer_norm.weight": 2})
        model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
        save(model, folder)
        transformers.WhisperProcessor(transformers.WhisperFeatureExtractor(feature_size=80), tokenizer([])).save_pretrained(folder)

    def logits(self, model, prompt, answer, without):
        import torch
        import transformers

        heard = dict(prompt, audio=99) if without else prompt
        features = transformers.WhisperFeatureExtractor(feature_size=80)(sound(heard), sampling_rate=16000, return_tensors="pt").input_features
        ids = torch.tensor([prompt["ids"] + answer["tokens"]])
        return model(input_features=features, decoder_input_ids=ids).logits[0, len(prompt["ids"]) - 1 : -1]


FEATURES = {
    "images": Images(),
    "cross-attention": CrossAttention(),
    "local-chunks": LocalChunks(),
    "retained-prompts": RetainedPrompts(),
    "prefix-lm": PrefixLm(),
    "fast-prefill": FastPrefill(),
}


def filled(model, model_type):
    """With make_models' weights, for a model whose configuration is of several parts."""
    import types

    import make_models

    config, model.config = model.config, types.SimpleNamespace(model_type=model_type, hidden_size=256)
    make_models.fill(model)
    model.config = config
    return model


def scaled(model, factors):
    import torch

    with torch.no_grad():
        for name, x in model.named_parameters():
            x.mul_(next((factor for end, factor in factors.items() if name.endswith(end)), 1))
    model.tie_weights()


def save(model, folder):
    import torch

    model.to(torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config["dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=1))


def tokenizer(last, **special):
    """make_models' words, of which the last are others."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = (["<pad>", "<s>", "</s>", "<unk>"] + [f"t{i}" for i in range(4, 512)])[: 512 - len(last)] + last
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##", cleanup=False)
    names = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names, **special)


def compared(feature, model, answers, without):
    """How many tokens are transformers' greedy choice, of how many, the worst gap, and the mean difference of log-probabilities."""
    import torch

    behind, apart = [], []
    for prompt, answer in zip(feature.prompts, answers):
        with torch.no_grad():
            logprobs = feature.logits(model, prompt, answer, without).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(answer["tokens"])[:, None])[:, 0]
        behind += (logprobs.max(1).values - chosen).tolist()
        apart += (chosen - torch.tensor(answer["logprobs"])).abs().tolist()
    return sum(gap == 0 for gap in behind), len(behind), max(behind), statistics.mean(apart)


def check(name, folder, results):
    """Rows of the table and what is wrong."""
    feature, lines, problems = FEATURES[name], [], []
    feature.make(folder)
    job = results / f"{name}.json"
    job.write_text(json.dumps(dict(model=str(folder), prompts=feature.prompts, options=feature.options, count=feature.count)))
    model = feature.load(folder)
    for variant, environment in OWN.items():
        log, out = results / f"{name}-{variant}.log", results / f"{name}-{variant}.json"
        command = [sys.executable, __file__, "--serve", str(job), str(out)]
        with log.open("w") as told:
            code = subprocess.run(command, stdout=told, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT, **environment}).returncode
        if code:
            problems.append(f"{name}, {variant}: expected an engine that ends with 0, got {code}: {log}")
            continue
        first, again = json.loads(out.read_text())
        (best, total, gap, mean), (_, _, _, lacking) = (compared(feature, model, first, without) for without in (False, True))
        worst = max(mean, compared(feature, model, again, False)[3])
        lines.append(f"| {name} | {variant} | {best} of {total} | {gap:.3f} | {mean:.4f} | {'' if name == 'fast-prefill' else f'{lacking:.4f}'} |")
        print(lines[-1], flush=True)
        if variant == "imbrex":
            if "self check passed" not in log.read_text():
                problems.append(f"{name}: expected imbrex's line with its self check in {log}")
            if not (worst <= WORST_MEAN and gap <= WORST_GAP):
                problems.append(f"{name}: expected a mean difference of {WORST_MEAN} and a gap of {WORST_GAP}, got {worst:.4f} and {gap:.3f}")
            if name != "fast-prefill" and lacking < 2 * mean:
                problems.append(f"{name}: expected answers that tell the model from one without the feature, got {mean:.4f} and {lacking:.4f}")
    return lines, problems


def left(table, lines, problems):
    """The exit code of a check that leaves its table and says what is wrong."""
    table.write_text("\n".join(lines) + "\n")
    for problem in problems:
        print("PROBLEM", problem)
    return 1 if problems else 0


def main(models, results, chosen):
    models, results = Path(models), Path(results)
    results.mkdir(parents=True, exist_ok=True)
    lines = ["| | attention | greedy choice of float32 | worst gap | logprobs: mean difference | to a model without |", "|---|---|---|---|---|---|"]
    problems = []
    for name in chosen or FEATURES:
        found, wrong = check(name, models / name, results)
        lines, problems = lines + found, problems + wrong
    print("\n" + "\n".join(lines) + "\n")
    return left(results / "features.md", lines, problems)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
