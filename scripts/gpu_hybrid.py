#!/usr/bin/env python3
"""Hybrid models of transformers on a GPU with imbrex.transformers.set_recurrent_implementation, beside transformers' own code, at small size and random weights.

In float32: logits of padded prompts, and greedy tokens, which have to be the same. In bf16: the errors of the logits against float32 with the same weights,
and how many greedy tokens are those of float32 behind the same tokens; transformers' own code has both figures beside imbrex's. Needs PyTorch, transformers
and the package. Models are spread over --jobs processes. Exit code 1 when one is wrong."""
from __future__ import annotations

import argparse
import copy
import multiprocessing
import sys
import time

import torch
import transformers

from imbrex.transformers import set_recurrent_implementation

COMMON = dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=384,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
LINEAR = dict(layer_types=["linear_attention", "full_attention", "linear_attention"], num_hidden_layers=3)
MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=64, mamba_n_groups=2, mamba_d_state=128, mamba_chunk_size=64)

# The sizes of heads are those that kernels multiply in chunks.
MODELS = {
    "Qwen3Next": dict(
        LINEAR,
        head_dim=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "KimiLinear": dict(
        LINEAR,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        linear_head_dim=128,
        linear_num_heads=4,
        num_local_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
    ),
    "NemotronH": dict(
        layers_block_type=["mamba", "attention", "mamba", "mlp"],
        head_dim=64,
        ssm_state_size=128,
        mamba_num_heads=8,
        mamba_head_dim=64,
        n_groups=2,
        chunk_size=64,
    ),
    "FalconH1": dict(MAMBA2, num_hidden_layers=2, mamba_d_ssm=512),
    "Jamba": dict(
        num_hidden_layers=3,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_dt_rank=16,
        num_experts=1,
        num_experts_per_tok=1,
    ),
    "Lfm2": dict(num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], conv_bias=True),
}
LENGTH, NEW_TOKENS = 150, 24


def model_of(name: str, device: str) -> torch.nn.Module:
    torch.manual_seed(11)
    model = getattr(transformers, name + "ForCausalLM")(getattr(transformers, name + "Config")(**dict(COMMON, **MODELS[name])))
    for parameter_name, parameter in model.named_parameters():
        if "A_log" in parameter_name:
            torch.nn.init.uniform_(parameter, -1.5, 1.5)
        elif "dt_bias" in parameter_name or parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
        elif "conv" in parameter_name and "proj" not in parameter_name:
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return model.to(torch.bfloat16).float().eval().to(device)  # numbers that bf16 holds


def prompts(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(12)
    ids = torch.randint(1, COMMON["vocab_size"], (3, LENGTH)).to(device)
    mask = torch.ones_like(ids)
    mask[0, : LENGTH // 2] = 0
    mask[2, :1] = 0
    return ids, mask


def greedy(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)


def off(logits: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Root mean square and largest error, of those of the exact logits."""
    error = logits.double() - exact.double()
    return (error.square().mean() / exact.double().square().mean()).sqrt().item(), (error.abs().max() / exact.abs().max()).item()


def chosen(exact: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor) -> int:
    """How many of the new tokens are the choice of `exact` behind the same tokens."""
    whole = torch.cat((mask, mask.new_ones(len(mask), NEW_TOKENS)), 1)
    logits = exact(tokens, attention_mask=whole, use_cache=False).logits
    return int((logits[:, LENGTH - 1 : -1].argmax(-1) == tokens[:, LENGTH:]).sum())


@torch.no_grad()
def compare(name: str, device: str) -> tuple[str, bool]:
    exact = model_of(name, device)
    ids, mask = prompts(device)
    seen = mask.bool()

    def logits(model: torch.nn.Module) -> torch.Tensor:
        return model(ids, attention_mask=mask, use_cache=False).logits[seen]

    ours = set_up(exact)
    theirs, tokens = logits(exact), greedy(exact, ids, mask)
    rms, worst = off(logits(ours), theirs)
    same = int((greedy(ours, ids, mask) == tokens)[:, LENGTH:].sum())
    ours.set_attn_implementation("imbrex")
    both_rms, both_worst = off(logits(ours), theirs)
    text = f"float32: {rms:.1e} {worst:.1e} (attention on imbrex too: {both_rms:.1e} {both_worst:.1e}), {same} of {tokens[:, LENGTH:].numel()} tokens"
    good = worst < 2e-4 and same == tokens[:, LENGTH:].numel() and both_worst < 2e-2  # attention multiplies in TF32

    model = copy.deepcopy(exact).to(torch.bfloat16)
    figures = []
    for one in (model, set_up(model)):
        figures.append((*off(logits(one), theirs), chosen(exact, greedy(one, ids, mask), mask)))
    (own_rms, own_worst, own_chosen), (our_rms, our_worst, our_chosen) = figures
    text += f"; bf16: transformers {own_rms:.1e} {own_worst:.1e} {own_chosen}, imbrex {our_rms:.1e} {our_worst:.1e} {our_chosen}"
    return text, good and our_rms < 1.25 * own_rms and our_chosen >= own_chosen - 6


def set_up(model: torch.nn.Module) -> torch.nn.Module:
    twin = copy.deepcopy(model)
    set_recurrent_implementation(twin)
    return twin


def measure(task: tuple[str, str]) -> tuple[str, bool]:
    name, device = task
    began = time.time()
    try:
        text, good = compare(name, device)
    except Exception as error:  # one model that fails says nothing of the others
        text, good = f"{type(error).__name__}: {error}", False
    return f"{name:11} {'ok   ' if good else 'WRONG'}  {text}  ({time.time() - began:.0f} s)", good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; default: all that this transformers has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=6)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected one that PyTorch has, got cuda, of which it has none")
    for name in options.models:
        if name not in MODELS:
            parser.error(f"models: expected some of {', '.join(MODELS)}, got {name}")
    names = options.models or [name for name in MODELS if hasattr(transformers, name + "ForCausalLM")]
    where = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    missing = [name for name in MODELS if not hasattr(transformers, name + "ForCausalLM")]
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}; models that it lacks: {missing}", flush=True)
    print("logits: root mean square of the error, largest error", flush=True)
    verdicts = []
    with multiprocessing.get_context("spawn").Pool(min(options.jobs, len(names))) as pool:
        for text, good in pool.imap(measure, [(name, options.device) for name in names], chunksize=1):
            print(text, flush=True)
            verdicts.append(good)
    print(f"{sum(verdicts)} of {len(verdicts)} models are right")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
