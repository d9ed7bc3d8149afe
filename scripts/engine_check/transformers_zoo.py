#!/usr/bin/env python3
"""Small random models of many families of transformers, on imbrex beside eager: logits, greedy tokens, refusals; and tokens/s beside sdpa and eager.

    python scripts/engine_check/transformers_zoo.py [--only WORD] [--no-speed]

Needs torch, transformers and imbrex; no checkpoint is loaded. Prints Markdown tables; exits with 1 when a variant is wrong, is refused although it should
run, or runs although it should be refused.

What is right: eager in float64 is the truth, eager in float32 says how much of it single precision keeps in that model, and imbrex may lose three times as
much and 2e-6 of the largest number: both sum the same products in another order. In bfloat16, the same with the root mean square of each token, and the
median of the tokens, because a rounding that takes a token to another expert is no error. Greedy tokens are equal, one for one. Where eager in float64 is
not finite, imbrex has to be within 1e-5 of eager in float32.
"""
import argparse
import sys
import time
import warnings
from collections import defaultdict
from contextlib import contextmanager

import torch
import transformers

import imbrex.transformers
from transformers_variants import VARIANTS

VOCABULARY, BATCH, LENGTH, NEW_TOKENS = 128, 3, 21, 10
STATIC = dict(cache_implementation="static", disable_compile=True)


def rescaled(model):
    """Weights that make the scores of attention differ: with those of a fresh model every key weighs the same."""
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.12)
        elif "sink" in name:
            torch.nn.init.normal_(parameter, mean=2.0)
    return model.eval()


def make(variant, implementation):
    torch.manual_seed(10)
    cls = getattr(transformers, variant.model)
    config = cls.config_class(**variant.config())
    config._experts_implementation = "eager"  # the grouped product of others takes no float64
    return cls._from_config(config, attn_implementation=implementation)


def padding(left):
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    for row, n in ((0, 9), (2, 1)):
        mask[row, slice(None, n) if left else slice(LENGTH - n, None)] = 0
    return mask


def inputs_of(variant, padded):
    """Keyword arguments of forward, and which rows of its output count."""
    generator = torch.Generator().manual_seed(12)
    ids = torch.randint(4, VOCABULARY, (BATCH, LENGTH), generator=generator)
    mask = padding(variant.kind == "decoder") if padded else torch.ones(BATCH, LENGTH, dtype=torch.long)
    if variant.kind in ("decoder", "encoder"):
        return dict(input_ids=ids, attention_mask=mask), mask.bool()
    if variant.kind == "seq2seq":
        return dict(input_ids=ids, attention_mask=mask, decoder_input_ids=ids.flip(1)[:, :13]), ...
    return {name: torch.randn(*shape, generator=generator) for name, shape in variant.shapes.items()}, ...


def result(model, inputs, rows):
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    out = model(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()})
    out = next(
        getattr(out, n) for n in ("logits", "last_hidden_state", "image_embeds", "encoder_last_hidden_state") if getattr(out, n, None) is not None
    )
    return out[rows].double()


class Wrong(Exception):
    pass


@contextmanager
def switched(model, implementation):
    """The model on an implementation, which has to compute some of its layers: some models go on with what they were made with."""
    model.set_attn_implementation(implementation)
    reached = []

    def counted(module, *args, **kwargs):
        reached.append(module)
        return imbrex.transformers.attention_forward(module, *args, **kwargs)

    transformers.AttentionInterface.register("imbrex", counted)
    try:
        yield
    finally:
        imbrex.transformers.register()
    if bool(reached) is not (implementation == "imbrex"):
        raise Wrong(f"on {implementation} imbrex computes {len(set(reached))} layers")


def greedy(model, inputs, implementation, **options):
    ids = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
    with switched(model, implementation):
        return model.generate(**ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **options)


def on(model, implementation, inputs, rows):
    with switched(model, implementation):
        return result(model, inputs, rows)


def takes_static_caches(model, inputs):
    """Whether transformers itself generates with one: Llama 4 in 5.19 does not."""
    try:
        greedy(model, inputs, "eager", **STATIC)
        return True
    except TypeError:
        return False


def check(variant):
    """The worst error of a variant in single precision, as a share of the largest number, and how many sequences of tokens were compared."""
    worst, sequences = 0.0, 0
    model = rescaled(make(variant, "eager"))
    for padded in (False, True) if variant.kind in ("decoder", "encoder", "seq2seq") else (False,):
        inputs, rows = inputs_of(variant, padded)
        eager, ours = (on(model, i, inputs, rows) for i in ("eager", "imbrex"))
        exact = on(model.double(), "eager", inputs, rows)
        model.float()
        single = not exact.isfinite().all()  # eager in float64 makes NaN of rows that see padding alone, and these reach every row of the next layer
        exact = eager if single else exact
        largest = exact.abs().max()
        if not exact.std() > 0:
            raise Wrong("an output without content")
        error, allowed = ((x - exact).abs().max() / largest for x in (ours, eager))
        if not error <= 3 * allowed + (1e-5 if single else 2e-6):
            raise Wrong(f"{'padded' if padded else 'whole'}: error {error:.1e}, eager {allowed:.1e}")
        worst = max(worst, float(error))
        if variant.generates:
            for options in [{}, STATIC] if not padded and variant.static and takes_static_caches(model, inputs) else [{}]:
                if not torch.equal(*(greedy(model, inputs, i, **options) for i in ("eager", "imbrex"))):
                    raise Wrong(f"{'padded' if padded else 'whole'}: other tokens {options or ''}")
                sequences += BATCH
        if not padded:
            low = model.to(torch.bfloat16)
            allowed, error = ((on(low, i, inputs, rows) - exact).pow(2).mean(-1).sqrt().median() for i in ("eager", "imbrex"))
            model = rescaled(make(variant, "eager"))
            if not error <= 2 * allowed + 1e-3 * exact.pow(2).mean().sqrt():
                raise Wrong(f"bfloat16: error {error:.1e}, eager {allowed:.1e}")
    return worst, sequences


def examine(variant):
    """("right", error, sequences), ("refused", reason), ("absent",) or ("WRONG", reason)."""
    if not hasattr(transformers, variant.model):
        return ("absent",)
    try:
        if variant.refused:
            model = rescaled(make(variant, "imbrex"))
            on(model, "imbrex", *inputs_of(variant, False))
            return "WRONG", "runs, but should be refused"
        return ("right", *check(variant))
    except NotImplementedError as error:
        text = str(error)
        return ("refused", text) if variant.refused and text.startswith("imbrex") else ("WRONG", text)
    except Wrong as error:
        return "WRONG", str(error)
    except Exception as error:  # a table names it, and the others go on
        return "WRONG", f"{type(error).__name__}: {error}"


def zoo(only):
    found, wrong = defaultdict(list), []
    for variant in VARIANTS:
        if only in variant.name or only in variant.group:
            outcome = examine(variant)
            found[variant.group].append((variant, outcome))
            if outcome[0] == "WRONG":
                wrong.append((variant.name, outcome[1].replace("\n", " ")[:300]))
            print(f"{variant.name}: {outcome[0]}", file=sys.stderr, flush=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}\n")
    print("| models | variants | right | worst error, float32 | sequences of equal tokens | refused by name | wrong |\n|---|---|---|---|---|---|---|")
    totals = [0] * 5
    for group, rows in found.items():
        right = [o for _, o in rows if o[0] == "right"]
        refused = [v.name for v, o in rows if o[0] == "refused"]
        bad = sum(o[0] == "WRONG" for _, o in rows)
        present = sum(o[0] != "absent" for _, o in rows)
        error = f"{max(o[1] for o in right):.1e}" if right else "-"
        sequences = sum(o[2] for o in right)
        print(f"| {group} | {present} | {len(right)} | {error} | {sequences} | {', '.join(refused) or '-'} | {bad} |")
        totals = [a + b for a, b in zip(totals, (present, len(right), sequences, len(refused), bad))]
    print(f"| all | {totals[0]} | {totals[1]} | | {totals[2]} | {totals[3]} | {totals[4]} |")
    for name, reason in wrong:
        print(f"\nWRONG {name}: {reason}")
    return wrong


def speed():
    """Greedy tokens a second, in bfloat16 and float32, of a model with the heads of a small Llama; the best of three."""
    print("\n| tokens/s, 4 layers, 8/2 heads of 64 | eager | sdpa | imbrex |\n|---|---|---|---|")
    options = dict(vocab_size=512, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2)
    for dtype, batch, prompt in ((torch.float32, 1, 32), (torch.float32, 4, 512), (torch.bfloat16, 1, 512), (torch.bfloat16, 4, 2048)):
        torch.manual_seed(20)
        config = transformers.LlamaConfig(max_position_embeddings=4096, eos_token_id=None, **options)
        model = transformers.LlamaForCausalLM(config).eval().to(dtype)
        ids = torch.randint(1, 512, (batch, prompt))
        rates = {i: [] for i in ("eager", "sdpa", "imbrex")}
        for _ in range(3):
            for implementation, times in rates.items():
                model.set_attn_implementation(implementation)
                began = time.perf_counter()
                model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
                times.append(batch * 24 / (time.perf_counter() - began))
        print(f"| {str(dtype)[6:]}, batch {batch}, prompt {prompt} | " + " | ".join(f"{max(t):.0f}" for t in rates.values()) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="variants with this in their names or groups")
    parser.add_argument("--no-speed", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    began = time.perf_counter()
    with torch.no_grad():
        wrong = zoo(arguments.only)
        if not arguments.no_speed:
            speed()
    spent = time.perf_counter() - began
    print(f"\n{spent:.0f} s with {torch.get_num_threads()} threads")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
