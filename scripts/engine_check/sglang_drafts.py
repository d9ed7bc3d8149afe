"""SGLang's engine on a CPU with a draft worker of imbrex: a model drafts for itself, and every token is held to transformers in float32.

sglang_drafts.py MODEL: prints a Markdown table, exits with 1 when something is wrong. SGLang's own kernels of trees and slots are stand-ins
(stand_ins/sgl_kernel, some of them SGLang's Triton kernels by Triton's interpreter).
"""

import os
import random
import sys

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", TRITON_INTERPRET="1")
import torch  # noqa: E402
import transformers  # noqa: E402
from make_models import VOCABULARY  # noqa: E402

LENGTHS, COUNT = (50, 133, 7), 32
WAYS = ((3, 1, 4, 1), (4, 1, 5, 16), (3, 4, 8, 1), (3, 4, 8, 16))  # steps, top-k, drafts, tokens of a page


def prompts():
    made = [random.Random(seed) for seed in range(len(LENGTHS))]
    return [[r.randrange(4, VOCABULARY) for _ in range(length)] for r, length in zip(made, LENGTHS)]


def generate(model, steps, topk, drafts, page_size):
    import sglang

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        dtype="float32",
        attention_backend="imbrex",
        page_size=page_size,
        max_total_tokens=8192,
        context_length=2048,
        chunked_prefill_size=256,
        skip_server_warmup=True,
        disable_overlap_schedule=True,
        log_level="error",
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=model,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=drafts,
    )
    try:
        return engine.generate(input_ids=prompts(), sampling_params=dict(temperature=0, max_new_tokens=COUNT, ignore_eos=True))
    finally:
        engine.shutdown()


def texts(numbers):
    return ", ".join(f"{x:.2f}" for x in numbers)


def best_of(reference, tokens):
    return int(reference(torch.tensor([tokens])).logits[0, -1].argmax())


def tokens_a_step(reference, prompt, answer, steps):
    """Of a chain: the model drafts without the prompt's first token, as SGLang's draft models do."""
    known, count, rounds = prompt + answer, len(prompt) + 1, 0  # the prompt's own step gives a token
    while count < len(known):
        drafts, kept = known[1:count], 0
        while kept < steps:
            drafts = [*drafts, best_of(reference, drafts)]
            if count + kept < len(known) and drafts[-1] != known[count + kept]:
                break
            kept += 1
        count, rounds = count + kept + 1, rounds + 1
    return COUNT / rounds


@torch.no_grad()
def main(model):
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    wrong = 0
    print("| steps, top-k, drafts | pages of | greedy choice of float32 | tokens a step of each prompt | of a chain in float32 |\n|---|---|---|---|---|", flush=True)
    for steps, topk, drafts, page_size in WAYS:
        best, lengths, expected = 0, [], []
        for prompt, answer in zip(prompts(), generate(model, steps, topk, drafts, page_size)):
            tokens = answer["output_ids"]
            logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            best += int((logits.argmax(-1) == torch.tensor(tokens)).sum())
            lengths.append(answer["meta_info"]["spec_accept_length"])
            expected.append(tokens_a_step(reference, prompt, tokens, steps))
        total = COUNT * len(LENGTHS)
        wrong += best < total or any(found < chain - 0.01 or (topk == 1 and found > chain + 0.01) for found, chain in zip(lengths, expected))
        print(f"| {steps}, {topk}, {drafts} | {page_size} | {best} of {total} | {texts(lengths)} | {texts(expected)} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
