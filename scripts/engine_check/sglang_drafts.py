"""SGLang's engine on a CPU with draft workers of imbrex: small models with random weights, and every token is held to transformers in float32.

sglang_drafts.py MODEL: prints Markdown tables, exits with 1 when something is wrong. First the model drafts for itself (STANDALONE); then a model of few tokens
has drafts of blocks (DFLASH, DSPARK), of several layers of MTP, of chains and trees over its own cache (FROZEN_KV_MTP), and of an adapter of its own (UNO), and
of each as many are to be accepted as draft_reference.py, mtp_reference.py and uno_reference.py say. SGLang's own kernels of trees and slots are stand-ins
(stand_ins/sgl_kernel, some of them SGLang's Triton kernels by Triton's interpreter), and what keeps workers from CPUs is taken away (stand_ins/sglang_on_a_cpu).
Some rows are of SGLang's runners of graphs (stand_ins/sglang_graphs_on_a_cpu): then each runner is to replay some.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", TRITON_INTERPRET="1")
import draft_models  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from draft_models import COUNT, LENGTHS, prompts  # noqa: E402
from draft_reference import Blocks, tokens_a_step  # noqa: E402
from make_models import VOCABULARY  # noqa: E402
from mtp_reference import Frozen, Mtp  # noqa: E402
from uno_reference import Uno  # noqa: E402

CHAIN, TREE = (3, 1, 4), (3, 4, 8)  # steps, top-k, drafts
WAYS = (
    (CHAIN, 1, False),
    ((4, 1, 5), 16, False),
    (TREE, 1, False),
    (TREE, 16, False),
    (CHAIN, 1, True),
    (TREE, 16, True),
)  # tokens of a page; in graphs
GRAPHS = dict(cuda_graph_bs_decode=[1, 2, 4], cuda_graph_bs_prefill=[64, 256], cuda_graph_backend_prefill="breakable")
RUNNERS = dict(
    STANDALONE=("Decode", "EAGLEDraft", "EAGLEDraftExtend", "Prefill"),
    FROZEN_KV_MTP=("Decode", "FrozenKVMTP", "Prefill"),
    UNO=("UnoDecode", "Prefill"),
)
SIZE, WINDOW, RANK, RECENT, DEPTH = 6, 21, 16, 32, 3  # of a block; of layers and of all drafts in tokens; of DSPARK's bias; layers of MTP
COMPACT = dict(sample_batch_tokens=[1, 4, 8, 12, 16, 20, 24], sample_steps_per_sec=[10.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.0], max_batch_tokens=1024)


def generate(model, draft, page_size, vocabulary=VOCABULARY, **how):
    import sglang

    engine = sglang.Engine(
        model_path=str(model),
        **({"uno_lora_path" if how["speculative_algorithm"] == "UNO" else "speculative_draft_model_path": str(draft)}),
        device="cpu",
        dtype="float32",
        attention_backend="imbrex",
        page_size=page_size,
        max_total_tokens=8192,
        context_length=2048,
        chunked_prefill_size=256,
        skip_server_warmup=True,
        disable_overlap_schedule=True,
        disable_hybrid_swa_memory=True,
        log_level="error",
        **how,
    )
    try:
        return engine.generate(input_ids=prompts(vocabulary), sampling_params=dict(temperature=0, max_new_tokens=COUNT, ignore_eos=True))
    finally:
        engine.shutdown()


def in_graphs(algorithm, call):
    """What a call returns, and how many graphs each of the algorithm's runners replayed in it."""
    with tempfile.NamedTemporaryFile("r") as file:
        os.environ["GRAPHS_ON_A_CPU"] = file.name
        try:
            result = call()
        finally:
            del os.environ["GRAPHS_ON_A_CPU"]
        counts = dict(line.split(": ") for line in file.read().splitlines())
    return result, [int(counts.get(f"replayed {name}CudaGraphRunner", 0)) for name in RUNNERS[algorithm]]


def run(*args, graphs=False, **how):
    """SGLang's answers, and how many graphs were replayed for them."""
    if not graphs:
        return generate(*args, **how), []
    return in_graphs(how["speculative_algorithm"], lambda: generate(*args, **how, **GRAPHS))


def chain(steps, topk=1, drafts=0):
    return dict(speculative_num_steps=steps, speculative_eagle_topk=topk, speculative_num_draft_tokens=drafts or steps + 1)


def texts(numbers):
    return ", ".join(f"{x:.2f}" for x in numbers)


def counted(replayed):
    return ", ".join(map(str, replayed)) or "none"


def compared(reference, expected_of, answers, vocabulary=VOCABULARY):
    """How many tokens are the greedy choice, and tokens of each prompt's steps as they are and as they should be."""
    best, lengths, expected = 0, [], []
    for prompt, answer in zip(prompts(vocabulary), answers):
        tokens = answer["output_ids"]
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best += int((logits.argmax(-1) == torch.tensor(tokens)).sum())
        lengths.append(answer["meta_info"]["spec_accept_length"])
        expected.append(expected_of(prompt, tokens))
    return best, lengths, expected


TOTAL = COUNT * len(LENGTHS)


def of_itself(model):
    """The model drafts without the prompt's first token, as SGLang's draft models do."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    wrong = 0
    print(
        "| steps, top-k, drafts | pages of | replayed graphs | greedy choice of float32 | tokens a step of each prompt | of a chain in float32 |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for (steps, topk, drafts), page_size, graphs in WAYS:

        def drafts_of(known, count=steps):
            found = known[1:]
            for _ in range(count):
                found = [*found, int(reference(torch.tensor([found])).logits[0, -1].argmax())]
            return found[-count:]

        answers, replayed = run(model, model, page_size, graphs=graphs, speculative_algorithm="STANDALONE", **chain(steps, topk, drafts))
        best, lengths, expected = compared(reference, lambda *of: tokens_a_step(drafts_of, *of), answers)
        wrong += best < TOTAL or any(found < chain - 0.01 or (topk == 1 and found > chain + 0.01) for found, chain in zip(lengths, expected))
        wrong += 0 in replayed
        print(
            f"| {steps}, {topk}, {drafts} | {page_size} | {counted(replayed)} | {best} of {TOTAL} | {texts(lengths)} | {texts(expected)} |", flush=True
        )
    return wrong


def learned(target, drafts, folder):
    """Drafts whose last matrix is fitted to answers of the target's, those to the check's prompts among them."""
    drafts.learn(draft_models.answers_of(target, COUNT + 8))
    drafts.save(folder)
    return drafts


def others(base):
    """Rows of the second table: what is drafted, a draft's folder with its reference, pages, and SGLang's arguments."""
    llama = draft_models.target(base / "llama")
    (base / "compact.json").write_text(json.dumps(COMPACT))

    def blocks(name, *options):
        return learned(llama, Blocks(llama, *draft_models.blocks(SIZE, *options)), base / name)

    dflash, dspark, sliding, both = blocks("dflash"), blocks("dspark", 0, RANK), blocks("sliding", WINDOW), blocks("both", WINDOW, RANK)
    mtp = learned(llama, Mtp(llama, *draft_models.mtp(DEPTH, WINDOW)), base / "mtp")
    several, cut = dict(enable_multi_layer_eagle=True, **chain(DEPTH)), dict(speculative_draft_window_size=RECENT)
    yield "DFLASH, blocks of 6", "llama", "dflash", dflash, 1, dict(speculative_algorithm="DFLASH")
    yield "DFLASH, a causal layer with a window of 21", "llama", "sliding", sliding, 16, dict(speculative_algorithm="DFLASH")
    for page_size in (1, 16):
        dflash.recent, dflash.page_size = RECENT, page_size
        yield "DFLASH, a draft's window of 32", "llama", "dflash", dflash, page_size, dict(speculative_algorithm="DFLASH", **cut)
    yield "DSPARK, 6 drafts", "llama", "dspark", dspark, 1, dict(speculative_algorithm="DSPARK")
    yield "DSPARK, a causal layer with a window of 21", "llama", "both", both, 16, dict(speculative_algorithm="DSPARK")
    compact = dict(speculative_algorithm="DSPARK", speculative_dspark_sps_table_path=str(base / "compact.json"))
    yield "DSPARK, compact", "llama", "dspark", dspark, 1, compact
    for page_size in (1, 16):
        yield "three layers of MTP, windows of 21, sinks", "llama", "mtp", mtp, page_size, dict(speculative_algorithm="EAGLE", **several)
    yield from frozen(base)
    yield from uno(base, llama)


SHAPES = ("a chain of 3", CHAIN), ("trees of 8", TREE)
WITHOUT_AND_WITH_GRAPHS = ((1, False), (16, False), (16, True))  # tokens of a page; in graphs


def frozen(base):
    gemma, assistant = draft_models.gemma(base / "gemma")
    reference = learned(gemma, Frozen(gemma, assistant, DEPTH), base / "assistant")
    for name, shape in SHAPES:
        reference.topk, reference.nodes = shape[1:]
        for page_size, graphs in WITHOUT_AND_WITH_GRAPHS:
            how = dict(speculative_algorithm="FROZEN_KV_MTP", graphs=graphs, **chain(*shape))
            yield f"FROZEN_KV_MTP, {name}", "gemma", "assistant", reference, page_size, how


def uno(base, llama):
    reference = learned(llama, Uno(llama, DEPTH + 1), base / "uno")
    for name, shape in SHAPES:
        reference.topk, reference.nodes = shape[1:]
        for page_size, graphs in WITHOUT_AND_WITH_GRAPHS:
            yield f"UNO, {name}", "llama", "uno", reference, page_size, dict(speculative_algorithm="UNO", graphs=graphs, **chain(*shape))


def of_others(base):
    wrong = 0
    print(
        "\n| drafts | pages of | replayed graphs | greedy choice of float32 | tokens a step of each prompt | as it should be |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for name, target, draft, reference, page_size, how in others(base):
        compact = name.endswith("compact")  # verifies fewer drafts, those that are likely to be kept
        os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact" if compact else "static"
        answers, replayed = run(base / target, base / draft, page_size, draft_models.TOKENS, **how)
        best, lengths, expected = compared(reference.target, reference.tokens_a_step, answers, draft_models.TOKENS)
        wrong += best < TOTAL or any(found > most + 0.01 or (not compact and found < most - 0.01) for found, most in zip(lengths, expected))
        wrong += 0 in replayed
        print(
            f"| {name} | {page_size} | {counted(replayed)} | {best} of {TOTAL} | {texts(lengths)} | {'at most ' if compact else ''}{texts(expected)} |",
            flush=True,
        )
    return wrong


@torch.no_grad()
def main(model):
    torch.set_num_threads(1)  # for small matrices, beside an engine
    wrong = of_itself(model)
    with tempfile.TemporaryDirectory() as base:
        wrong += of_others(Path(base))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
