"""vLLM's engine on a CPU with several layers of MTP, with vLLM's own attention and with imbrex: tokens and accepted drafts beside transformers in float32.

vllm_drafts.py RESULTS: prints a Markdown table and leaves it in RESULTS with the logs; exits with 1 where with imbrex tokens are not
the target's greedy ones, or not as many drafts are accepted at each place as latent_mtp.py says. vllm_drafts.py --serve JOBS ANSWERS runs engines. Model
runner V1 has every draft from the first layer, V2 each from the next layer; V2's Triton kernels run in Triton's interpreter.
"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

from vllm_features import ENVIRONMENT, OWN, left

RUNNERS = {"V1": dict(VLLM_USE_V2_MODEL_RUNNER="0"), "V2": dict(VLLM_USE_V2_MODEL_RUNNER="1", TRITON_INTERPRET="1")}
ATTENTION = {"latents": "0", "heads": "1"}  # VLLM_MLA_DISABLE: the same model
WAYS = {"V1": ((3, 3),), "V2": ((1, 3), (3, 3), (2, 4))}  # layers, drafts


def triton_on_a_cpu():
    """Has vLLM find a Triton that runs on CPUs, which with TRITON_INTERPRET its interpreter does."""
    import triton.backends

    driver = types.SimpleNamespace(is_active=lambda: False)
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)


def serve(jobs, answers):
    """An engine for each job, in one process."""
    if "TRITON_INTERPRET" in os.environ:
        triton_on_a_cpu()
    from vllm.distributed import cleanup_dist_env_and_memory

    found = []
    for job in json.loads(Path(jobs).read_text()):
        os.environ["VLLM_MLA_DISABLE"] = job["mla_disable"]
        found.append(asked(job))
        cleanup_dist_env_and_memory()
    Path(answers).write_text(json.dumps(found))


def asked(job):
    """An engine's tokens, steps, and accepted drafts by their place."""
    from vllm import LLM, SamplingParams

    limits = dict(max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=job["chunk"], block_size=32, enable_prefix_caching=False)
    drafts = dict(method="mtp", num_speculative_tokens=job["drafts"])
    engine = LLM(job["model"], dtype="float32", enforce_eager=True, disable_log_stats=False, speculative_config=drafts, **limits)
    sampling = SamplingParams(temperature=0, max_tokens=job["count"], ignore_eos=True, detokenize=False)
    given = engine.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    counts = {x.name.removeprefix("vllm:spec_decode_num_"): x for x in engine.get_metrics() if "spec_decode" in x.name}
    return dict(tokens=[list(x.outputs[0].token_ids) for x in given], steps=counts["drafts"].value, accepted=counts["accepted_tokens_per_pos"].values)


def counted(reference, runner, drafts, count):
    """Steps of all prompts, of `count` tokens each, and how many drafts are accepted at each place, in PyTorch."""
    steps, accepted = 0, [0] * drafts
    for prompt, answer in reference.asked:
        several = runner == "V2" and reference.count > 1
        propose = (reference.several if several else reference.first_alone)(prompt + answer, drafts)
        known = len(prompt) + 1
        while known < len(prompt) + count:
            found, kept = propose(known), 0
            while kept < drafts and found[kept] == answer[known + kept - len(prompt)]:
                accepted[kept] += 1
                kept += 1
            known, steps = known + kept + 1, steps + 1
    return steps, accepted


def jobs_of(runner, references):
    """Prompts are cut, in steps of 128 tokens, where vLLM allows it and drafts do not depend on it."""
    from draft_models import COUNT

    for layers, drafts in WAYS[runner]:
        reference = references[layers]
        asked = dict(model=str(reference.folder), prompts=[prompt for prompt, _ in reference.asked], count=COUNT)
        for attention, mla_disable in ATTENTION.items():
            chunk = 128 if runner == "V2" and attention == "heads" and layers != 2 else 256
            yield dict(asked, layers=layers, drafts=drafts, attention=attention, mla_disable=mla_disable, chunk=chunk)


def check(runner, variant, references, results):
    """Rows of the table and what is wrong."""
    name, lines, problems = f"{runner}-{variant}", [], []
    made, out, log = (results / f"{name}.{end}" for end in ("jobs", "json", "log"))
    jobs = list(jobs_of(runner, references))
    made.write_text(json.dumps(jobs))
    environment = {**os.environ, **ENVIRONMENT, **RUNNERS[runner], **OWN[variant]}
    with log.open("w") as told:
        code = subprocess.run([sys.executable, __file__, "--serve", made, out], stdout=told, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        return [], [f"{name}: expected an engine that ends with 0, got {code}: {log}"]
    if variant == "imbrex" and log.read_text().count("imbrex 0.") < 2 * len(jobs):
        problems.append(f"{name}: expected imbrex's lines for targets and drafts in {log}")
    for job, found in zip(jobs, json.loads(out.read_text())):
        reference = references[job["layers"]]
        all_tokens = job["count"] * len(job["prompts"])
        best = sum(a == b for (_, answer), tokens in zip(reference.asked, found["tokens"]) for a, b in zip(answer, tokens))
        steps, accepted = counted(reference, runner, job["drafts"], job["count"])
        lines.append(
            f"| {runner}, {job['layers']} layer{'s' if job['layers'] > 1 else ''}, {job['drafts']} drafts | {job['attention']} | {variant} | {best} of {all_tokens} "
            f"| {found['steps']}: {', '.join(map(str, found['accepted']))} | {steps}: {', '.join(map(str, accepted))} |"
        )
        print(lines[-1], flush=True)
        if variant == "imbrex" and (best < all_tokens or (found["steps"], found["accepted"]) != (steps, accepted)):
            problems.append(f"{name}: expected tokens and accepted drafts of float32: {lines[-1]}")
    return lines, problems


def main(results):
    import torch
    from latent_mtp import LatentMtp

    torch.set_num_threads(1)  # for small matrices
    results = Path(results)
    results.mkdir(parents=True, exist_ok=True)
    references = {}
    lines, problems = [
        "| | attention | | greedy choice of float32 | steps: accepted drafts, by place | in PyTorch |",
        "|---|---|---|---|---|---|",
    ], []
    print("\n".join(lines), flush=True)
    with torch.no_grad():
        for layers in (1, 2, 3):
            references[layers] = LatentMtp(results / f"mtp{layers}", layers)
            references[layers].learn()
        for runner, variant in ((runner, variant) for runner in WAYS for variant in OWN):
            found, wrong = check(runner, variant, references, results)
            lines, problems = lines + found, problems + wrong
    return left(results / "drafts.md", lines, problems)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1]))
