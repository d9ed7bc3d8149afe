"""Right calls of imbrex.causal_conv1d, imbrex.fla and imbrex.mamba_ssm, for fuzz_torch.py."""

import numpy as np

from imbrex import causal_conv1d, mamba_ssm
from imbrex.fla import ops
from imbrex.mamba_ssm.ops.triton.selective_state_update import selective_state_update
from imbrex.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

from fuzz_numpy import floats

WIDTH = 4


def _starts(rng, length):
    """Of some sequences, which may be empty."""
    return np.array([0, *sorted(rng.randint(0, length) for _ in range(rng.randint(0, 3))), length], np.int64)


def _some(rng, **arguments):
    """Each of them, or not."""
    return {name: value for name, value in arguments.items() if rng.random() < 0.5}


def conv(rng):
    batch, dim, length = rng.randint(1, 3), rng.choice((4, 20)), rng.randint(1, 9)
    arguments = dict(
        x=floats(rng, batch, dim, length),
        weight=floats(rng, dim, WIDTH),
        activation=rng.choice((None, "silu")),
        **_some(rng, bias=floats(rng, dim), initial_states=floats(rng, batch, dim, WIDTH - 1)),
    )
    if rng.random() < 0.4:
        arguments.update(seq_idx=np.cumsum(floats(rng, batch, length) > 0.5, 1).astype(np.int32))
    else:
        arguments.update(return_final_states=True)
    return causal_conv1d.causal_conv1d_fn, arguments, ()


def conv_update(rng):
    batch, dim, held, length = rng.randint(1, 3), rng.choice((4, 20)), rng.randint(WIDTH - 1, 6), rng.randint(1, 3)
    arguments = dict(x=floats(rng, batch, dim, length), conv_state=floats(rng, batch, dim, held), weight=floats(rng, dim, WIDTH))
    arguments.update(_some(rng, bias=floats(rng, dim), cache_seqlens=np.array([rng.randint(0, 9) for _ in range(batch)], np.int32)))
    if rng.random() < 0.5:
        rows = rng.sample(range(-1, batch + 2), batch)
        arguments.update(conv_state=floats(rng, batch + 2, dim, held), conv_state_indices=np.array(rows, np.int32))
    return causal_conv1d.causal_conv1d_update, arguments, ("conv_state",)


def _delta(rng, channels):
    batch, length, heads = rng.randint(1, 3), rng.randint(1, 9), rng.choice((1, 2))
    k, v, groups = rng.choice((8, 16)), rng.choice((8, 24)), rng.choice((1, 2))
    starts = None
    if rng.random() < 0.4:
        batch, starts = 1, _starts(rng, length)
    states = batch if starts is None else len(starts) - 1
    tokens = (batch, length, heads * groups)
    arguments = dict(
        q=floats(rng, batch, length, heads, k),
        k=floats(rng, batch, length, heads, k),
        v=floats(rng, *tokens, v),
        g=-np.abs(floats(rng, *tokens, *([k] if channels else []))),
        beta=1 / (1 + np.exp(floats(rng, *tokens))),
        use_qk_l2norm_in_kernel=True,
        output_final_state=True,
        **_some(rng, initial_state=floats(rng, states, heads * groups, k, v), scale=0.5),
    )
    return arguments if starts is None else dict(arguments, cu_seqlens=starts)


def gdn(rng):
    return rng.choice((ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule)), _delta(rng, False), ()


def kda(rng):
    return rng.choice((ops.chunk_kda, ops.fused_recurrent_kda)), _delta(rng, True), ()


def chunk_scan(rng):
    batch, length, heads, dim, groups, n = rng.randint(1, 2), rng.randint(1, 9), 4, 8, rng.choice((1, 2)), 16
    arguments = dict(
        x=floats(rng, batch, length, heads, dim),
        dt=floats(rng, batch, length, heads),
        A=-np.abs(floats(rng, heads)),
        B=floats(rng, batch, length, groups, n),
        C=floats(rng, batch, length, groups, n),
        chunk_size=64,
        dt_softplus=True,
        return_final_states=True,
        **_some(
            rng,
            D=floats(rng, heads),
            dt_bias=floats(rng, heads),
            initial_states=floats(rng, batch, heads, dim, n),
            z=floats(rng, batch, length, heads, dim),
        ),
    )
    if rng.random() < 0.4:
        arguments.update(seq_idx=np.cumsum(floats(rng, batch, length) > 0.5, 1).astype(np.int32))
    return mamba_chunk_scan_combined, arguments, ()


def scan(rng):
    batch, dim, length, n = rng.randint(1, 3), rng.choice((4, 40)), rng.randint(1, 9), 16
    arguments = {name: floats(rng, batch, dim, length) for name in ("u", "delta")}
    arguments.update(
        {name: floats(rng, batch, n, length) for name in ("B", "C")}, A=-np.abs(floats(rng, dim, n)), delta_softplus=True, return_last_state=True
    )
    return (
        mamba_ssm.selective_scan_fn,
        dict(arguments, **_some(rng, D=floats(rng, dim), delta_bias=floats(rng, dim), z=floats(rng, batch, dim, length))),
        (),
    )


def step(rng):
    batch, dim, n = rng.randint(1, 3), rng.choice((4, 40)), 16
    arguments = {name: floats(rng, batch, dim) for name in ("x", "dt")}
    arguments.update({name: floats(rng, batch, n) for name in ("B", "C")}, A=-np.abs(floats(rng, dim, n)), dt_softplus=True)
    arguments.update(state=floats(rng, batch, dim, n), **_some(rng, D=floats(rng, dim), dt_bias=floats(rng, dim), z=floats(rng, batch, dim)))
    if rng.random() < 0.5:
        slots = np.array(rng.sample(range(batch + 2), batch), np.int32)
        arguments.update(state=floats(rng, batch + 2, dim, n), state_batch_indices=slots)
    return selective_state_update, arguments, ("state",)


# Each gives a function, arguments by name, and which of them are written.
MAKERS = {
    "causal_conv1d_fn": conv,
    "causal_conv1d_update": conv_update,
    "gated_delta_rule": gdn,
    "kda": kda,
    "mamba_chunk_scan_combined": chunk_scan,
    "selective_scan_fn": scan,
    "selective_state_update": step,
}
