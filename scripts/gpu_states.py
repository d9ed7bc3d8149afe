#!/usr/bin/env python3
"""The functions of imbrex.fla.ops, imbrex.causal_conv1d and imbrex.mamba_ssm on a GPU, with the layers of published models, against float64.

A case is a prompt of four sequences (one of a token, one of 1000), a token behind each, and six tokens behind these, with states handed on. The errors of
outputs and of the last states are a root mean square over that of the reference, and the largest one over the largest number. Needs PyTorch and the
package. Every process compiles kernels of its own, so cases are spread over --jobs. Exit code 1 when one is wrong."""
from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path
from typing import List, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python" / "tests"))

import torch

from imbrex import mamba_ssm
from imbrex.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from imbrex.fla import ops
from imbrex.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from imbrex.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
from recurrent_reference import recurrence
from test_causal_conv1d import reference as convolution
from test_mamba_ssm import mamba

LENGTHS = (130, 1, 1000, 65)
SOFTPLUS = torch.nn.functional.softplus

# Of root mean squares and of the largest error. Chunks of prompts multiply factors that are rounded to the type of the tensors.
LIMITS = {torch.float32: (2e-5, 1e-4), torch.bfloat16: (1e-2, 3e-2), torch.float16: (2e-3, 6e-3)}
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

Steps = List[Tuple[torch.Tensor, torch.Tensor]]  # results, and what they should be: outputs of each step, and the last state


class Numbers:
    """Random tensors of a device and a type, the same ones in each run."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        torch.manual_seed(5)
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype if dtype is None else dtype)

    def f32(self, *shape: int) -> torch.Tensor:
        return self(*shape, dtype=torch.float32)


def parts(length: int) -> list[int]:
    return [length, 1, 6]


def delta_rule(prompt, token, make_gates, heads, value_heads, dim):
    """GDN and KDA: prompts by cu_seqlens, tokens as a batch, each with the gates that make_gates() gives, raw ones and those of the reference."""

    def run(numbers: Numbers) -> Steps:
        starts = torch.tensor([0, *LENGTHS]).cumsum(0)
        total, count = int(starts[-1]), len(LENGTHS)
        options, gates = make_gates(numbers, value_heads, dim)

        def layer(batch: int, length: int):
            q, k = (numbers(batch, length, heads, dim) for _ in range(2))
            return (q, k, numbers(batch, length, value_heads, dim), *gates(batch, length))

        steps, state, expected_state = [], None, None
        for length in parts(total):
            batch = 1 if state is None else count
            q, k, v, gate, beta, g = layer(batch, length)
            own = dict(options, output_final_state=True, use_qk_l2norm_in_kernel=True)
            if state is None:
                out, state = prompt(q, k, v, gate, beta, cu_seqlens=starts.to(q.device), cu_seqlens_cpu=starts, **own)
                cut = [slice(int(a), int(b)) for a, b in zip(starts, starts[1:])]
                each = [recurrence(*(x[:, s] for x in (q, k, v, g, beta)), norm=True) for s in cut]
                expected, expected_state = torch.cat([e[0] for e in each], 1), torch.cat([e[1] for e in each])
            else:
                out, state = token(q, k, v, g=gate, beta=beta, initial_state=state, **own)
                expected, expected_state = recurrence(q, k, v, g, beta, state=expected_state, norm=True)
            steps.append((out, expected))
        return [*steps, (state, expected_state)]

    return run


def gdn_gates(numbers: Numbers, heads: int, dim: int):
    def gates(batch: int, length: int):
        g = -0.2 * SOFTPLUS(numbers.f32(batch, length, heads))
        return g, numbers.f32(batch, length, heads).sigmoid(), g

    return {}, gates


def kda_gates(lower_bound: float | None):
    def make(numbers: Numbers, heads: int, dim: int):
        a_log, bias = numbers.f32(heads) - 1, numbers.f32(heads * dim)

        def gates(batch: int, length: int):
            raw = numbers(batch, length, heads, dim)
            x, rate = raw.double() + bias.view(heads, dim), a_log.double().exp()[:, None]
            g = -rate * SOFTPLUS(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
            return raw, numbers.f32(batch, length, heads).sigmoid(), g

        options = dict(use_gate_in_kernel=True, A_log=a_log, dt_bias=bias)
        return dict(options, **({} if lower_bound is None else dict(lower_bound=lower_bound))), gates

    return make


def lightning(heads: int, dim: int):
    def run(numbers: Numbers) -> Steps:
        gamma = -torch.rand(heads, device=numbers.device) * 0.3
        steps, state, expected_state = [], None, None
        for i, length in enumerate(parts(max(LENGTHS))):
            q, k, v = (numbers(2, length, heads, dim) for _ in range(3))
            function = ops.fused_recurrent_simple_gla if i else ops.chunk_simple_gla
            out, state = function(q, k, v, g_gamma=gamma, initial_state=state, output_final_state=True)
            expected, expected_state = recurrence(q, k, v, gamma.expand(2, length, heads), state=expected_state)
            steps.append((out, expected))
        return [*steps, (state, expected_state)]

    return run


def mamba2(heads: int, dim: int, groups: int, d_state: int):
    def run(numbers: Numbers) -> Steps:
        A, D, bias = -torch.rand(heads, device=numbers.device) * 4 - 0.1, numbers.f32(heads), numbers.f32(heads) - 2
        steps, state, expected_state = [], None, None
        for length in (max(LENGTHS), 1, 1):
            x, z = numbers(2, length, heads, dim), numbers(2, length, heads, dim)
            dt, B, C = numbers(2, length, heads), numbers(2, length, groups, d_state), numbers(2, length, groups, d_state)
            expected, expected_state = mamba(x, dt, A, B, C, D, bias, z, expected_state)
            if state is None:
                options = dict(D=D, z=z, dt_bias=bias, dt_softplus=True, return_final_states=True)
                out, state = mamba_chunk_scan_combined(x, dt, A, B, C, 256, **options)
            else:
                wide = [y[..., None].expand(*y.shape, dim) for y in (dt[:, 0], D, bias)]
                rates = A[:, None, None].expand(heads, dim, d_state)
                out = selective_state_update(state, x[:, 0], wide[0], rates, B[:, 0], C[:, 0], wide[1], z[:, 0], wide[2], True)[:, None]
            steps.append((out, expected))
        return [*steps, (state, expected_state)]

    return run


def mamba1(channels: int, d_state: int):
    def run(numbers: Numbers) -> Steps:
        A, D, bias = -torch.rand(channels, d_state, device=numbers.device) * 4 - 0.1, numbers.f32(channels), numbers.f32(channels) - 2
        steps, state, expected_state = [], None, None
        for length in (LENGTHS[0], 1, 1):
            u, delta, z = (numbers(2, length, channels) for _ in range(3))
            B, C = numbers(2, length, d_state), numbers(2, length, d_state)
            expected, expected_state = mamba(u[..., None], delta, A, B[:, :, None], C[:, :, None], D, bias, z[..., None], expected_state)
            if state is None:
                by_channel = [y.transpose(1, 2) for y in (u, delta, z, B, C)]
                u, delta, z, B, C = by_channel
                out, state = mamba_ssm.selective_scan_fn(u, delta, A, B, C, D, z, bias, True, return_last_state=True)
                out = out.transpose(1, 2)
            else:
                out = selective_state_update(state, u[:, 0], delta[:, 0], A, B[:, 0], C[:, 0], D, z[:, 0], bias, True)[:, None]
            steps.append((out, expected.squeeze(-1)))
        return [*steps, (state, expected_state.squeeze(2))]

    return run


def short_conv(channels: int, width: int, activation: str | None):
    def run(numbers: Numbers) -> Steps:
        weight, bias = numbers(channels, width), numbers(channels)
        x = numbers(2, channels, LENGTHS[0])
        expected, kept = convolution(x, weight, bias, activation is not None)
        out, state = causal_conv1d_fn(x, weight, bias, return_final_states=True, activation=activation)
        steps = [(out, expected)]
        for length in (1, 6):
            x, before = numbers(2, channels, length), state.clone()
            expected, kept = convolution(x, weight, bias, activation is not None, before)
            steps.append((causal_conv1d_update(x, state, weight, bias, activation), expected))
        return [*steps, (state, kept)]

    return run


CASES = {
    "gdn, Qwen3-Next": delta_rule(ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule, gdn_gates, 16, 32, 128),
    "gdn, 64 channels": delta_rule(ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule, gdn_gates, 8, 16, 64),
    "kda, Kimi-Linear": delta_rule(ops.chunk_kda, ops.fused_recurrent_kda, kda_gates(None), 32, 32, 128),
    "kda, lower bound": delta_rule(ops.chunk_kda, ops.fused_recurrent_kda, kda_gates(-5.0), 32, 32, 128),
    "lightning, MiniMax": lightning(64, 128),
    "mamba2, Nemotron-H": mamba2(128, 64, 8, 128),
    "mamba2, Falcon-H1": mamba2(24, 64, 1, 256),
    "mamba1, Jamba": mamba1(8192, 16),
    "conv, Qwen3-Next": short_conv(8192, 4, "silu"),
    "conv, LFM2": short_conv(2048, 3, None),
}


def errors(out: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    if out.shape != expected.shape or not torch.isfinite(out).all():
        return float("inf"), float("inf")
    off, norm = out.double() - expected.double(), expected.double()
    return (off.square().mean().sqrt() / norm.square().mean().sqrt()).item(), (off.abs().max() / norm.abs().max()).item()


def measure(task: tuple[str, str, str]) -> tuple[str, bool]:
    name, type_name, device = task
    dtype, began = TYPES[type_name], time.time()
    try:
        found = [errors(*step) for step in CASES[name](Numbers(device, dtype))]
    except Exception as error:  # one case that fails says nothing of the others
        return f"{name:20} {type_name:5} FAILED  {type(error).__name__}: {error}", False
    good = all(rms <= LIMITS[dtype][0] and worst <= LIMITS[dtype][1] for rms, worst in found)
    labels = [f"step {i + 1}" for i in range(len(found) - 1)] + ["state"]
    text = "  ".join(f"{label} {rms:.1e} {worst:.1e}" for label, (rms, worst) in zip(labels, found))
    return f"{name:20} {type_name:5} {'ok    ' if good else 'WRONG '}  {text}  ({time.time() - began:.0f} s)", good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected one that PyTorch has, got cuda, of which it has none")
    tasks = [(name, type_name, options.device) for name in CASES if options.only in name for type_name in options.types]
    if not tasks:
        parser.error(f"--only: expected a part of one of {', '.join(CASES)}; got {options.only!r}")
    where = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"{where}, torch {torch.__version__}; of each step: root mean square of the error, largest error", flush=True)
    with multiprocessing.get_context("spawn").Pool(min(options.jobs, len(tasks))) as pool:
        verdicts = []
        for text, good in pool.imap(measure, tasks, chunksize=1):
            print(text, flush=True)
            verdicts.append(good)
    print(f"{sum(verdicts)} of {len(verdicts)} cases are right")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
