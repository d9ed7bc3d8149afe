"""Random shapes, strides and types of imbrex.fla, imbrex.causal_conv1d and imbrex.mamba_ssm against the definition."""
import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from imbrex import _state_calls, causal_conv1d, mamba_ssm  # noqa: E402
from imbrex._plan_cache import PlanCache  # noqa: E402
from imbrex.fla import ops  # noqa: E402
from imbrex.mamba_ssm.ops.triton.selective_state_update import selective_state_update  # noqa: E402
from imbrex.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # noqa: E402
from fuzz_torch_states import MAKERS  # noqa: E402
from recurrent_reference import near, recurrence  # noqa: E402
from test_causal_conv1d import reference as convolution  # noqa: E402
from test_mamba_ssm import mamba  # noqa: E402

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}


class Draw:
    """Sizes, and tensors that lie in memory in different ways."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        pick = self.random.choice
        self.dtype = pick(list(TOLERANCE))
        self.batch, self.length, self.heads = pick([1, 1, 2, 3]), pick([1, 1, 2, 7, 33, 70]), pick([1, 2, 3])
        self.value_heads = self.heads * pick([1, 2, 3])
        self.k, self.v = pick([1, 8, 16, 17, 64, 100]), pick([1, 3, 16, 32, 65, 128])
        self.state = torch.randn(self.batch, self.value_heads, self.k, self.v) if pick([False, True]) else None

    def lay(self, x):
        way = self.random.randrange(4)
        if way == 0 and x.dim() > 2:
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if way == 1:  # a part of wider rows
            wide = torch.cat((x, torch.randn(*x.shape[:-1], self.random.randint(1, 5)).to(x.dtype)), -1)
            return wide[..., : x.shape[-1]]
        return x.transpose(-1, 0).contiguous().transpose(-1, 0) if way == 2 else x

    def numbers(self, *shape, dtype=None):
        return self.lay(torch.randn(*shape).to(dtype or self.dtype))

    def other_type(self):
        return self.random.choice([self.dtype, torch.float32, torch.float16])

    def check(self, *pairs):
        for got, expected in pairs:
            near(got, expected, TOLERANCE[self.dtype])

    def qkv(self):
        keys = [self.numbers(self.batch, self.length, self.heads, self.k) for _ in "qk"]
        return (*keys, self.numbers(self.batch, self.length, self.value_heads, self.v))


def delta(draw, chunk, recurrent, channels):
    tokens = (draw.batch, draw.length, draw.value_heads)
    g = draw.lay(-torch.rand(*tokens, *([draw.k] if channels else [])).to(draw.other_type()))
    beta, qkv = draw.lay(torch.rand(tokens).to(draw.other_type())), draw.qkv()
    state = None if draw.state is None else draw.lay(draw.state)
    function = draw.random.choice([chunk, recurrent])
    got = function(*qkv, g=g, beta=beta, use_qk_l2norm_in_kernel=True, initial_state=state, output_final_state=True)
    draw.check(*zip(got, recurrence(*qkv, g, beta, state=state, norm=True)))


def gdn(draw):
    delta(draw, ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule, False)


def kda(draw):
    delta(draw, ops.chunk_kda, ops.fused_recurrent_kda, True)


def gla(draw):
    g, qkv = draw.lay(-torch.rand(draw.batch, draw.length, draw.value_heads)), draw.qkv()
    function = draw.random.choice([ops.chunk_simple_gla, ops.fused_recurrent_simple_gla])
    draw.check(*zip(function(*qkv, g, initial_state=draw.state, output_final_state=True), recurrence(*qkv, g, state=draw.state)))


def conv(draw):
    dim, width = draw.random.choice([1, 3, 8, 40, 130]), draw.random.randint(2, 8)
    x, weight = draw.numbers(draw.batch, dim, draw.length), draw.numbers(dim, width)
    bias = torch.randn(dim).to(draw.dtype) if draw.random.random() < 0.5 else None
    states = draw.numbers(draw.batch, dim, width - 1) if draw.random.random() < 0.5 else None
    out, final = causal_conv1d.causal_conv1d_fn(x, weight, bias, None, states, True, activation="silu")
    expected, exact = convolution(x, weight, bias, True, states)
    draw.check((out, expected))
    assert torch.equal(final, exact.to(draw.dtype))


def conv_update(draw):
    dim, width = draw.random.choice([1, 3, 8, 40, 130]), draw.random.randint(2, 8)
    held = width - 1 + draw.random.choice([0, 1, 1, 2, 5])
    x, weight, state = draw.numbers(draw.batch, dim, draw.length), draw.numbers(dim, width), draw.numbers(draw.batch, dim, held)
    expected, kept = convolution(x, weight, None, True, state)[0], torch.cat((state, x), 2)[..., -held:]
    draw.check((causal_conv1d.causal_conv1d_update(x, state, weight, None, "silu"), expected))
    assert torch.equal(state, kept)


def chunks(draw):
    groups = [draw.numbers(draw.batch, draw.length, draw.heads, draw.k) for _ in "BC"]
    x, z = (draw.numbers(draw.batch, draw.length, draw.value_heads, draw.v) for _ in "xz")
    dt, A = draw.numbers(draw.batch, draw.length, draw.value_heads, dtype=draw.other_type()), -torch.rand(draw.value_heads) * 3 - 0.01
    D = draw.random.choice([None, torch.randn(draw.value_heads), torch.randn(draw.value_heads, draw.v)])
    state = None if draw.state is None else draw.state.transpose(2, 3)
    got = mamba_chunk_scan_combined(x, dt, A, *groups, 64, D=D, z=z, initial_states=state, dt_softplus=True, return_final_states=True)
    draw.check(*zip(got, mamba(x, dt, A, *groups, D, None, z, state)))


def selective(draw):
    dim = draw.value_heads * draw.random.choice([1, 5, 40])
    u, delta, z = (draw.numbers(draw.batch, dim, draw.length) for _ in "udz")
    groups = draw.random.choice([[], [draw.value_heads]])
    B, C = (draw.numbers(draw.batch, *groups, draw.k, draw.length) for _ in "BC")
    A, D = -torch.rand(dim, draw.k) - 0.01, torch.randn(dim)
    out, final = mamba_ssm.selective_scan_fn(u, delta, A, B, C, D, z, None, True, True)
    by_token = [(y if groups else y.unsqueeze(1)).permute(0, 3, 1, 2) for y in (B, C)]
    channels = [y.transpose(1, 2).unsqueeze(-1) for y in (u, z)]
    expected, state = mamba(channels[0], delta.transpose(1, 2), A, *by_token, D, None, channels[1])
    draw.check((out, expected.squeeze(-1).transpose(1, 2)), (final, state.squeeze(2)))


def step(draw):
    own = (draw.value_heads, draw.v)
    x, (B, C) = draw.numbers(draw.batch, *own), (draw.numbers(draw.batch, draw.heads, draw.k) for _ in "BC")
    if draw.random.random() < 0.5:
        dt = draw.numbers(draw.batch, draw.value_heads)[..., None].expand(-1, -1, draw.v)
        A = -torch.rand(draw.value_heads)[:, None, None].expand(-1, draw.v, draw.k)
        D, bias = torch.randn(2, draw.value_heads, 1).expand(-1, -1, draw.v)
    else:
        dt, A, (D, bias) = draw.numbers(draw.batch, *own), -torch.rand(*own, draw.k), torch.randn(2, *own)
    state = draw.numbers(draw.batch, *own, draw.k, dtype=torch.float32)
    channels = (x.flatten(1)[:, None, :, None], dt.flatten(1)[:, None], A.flatten(0, 1), B[:, None], C[:, None], D.flatten(), bias.flatten())
    expected, final = mamba(*channels, None, state.flatten(1, 2).unsqueeze(2))
    out = selective_state_update(state, x, dt, A, B, C, D, None, bias, True)
    draw.check((out, expected.view(x.shape)), (state, final.view(state.shape)))


@pytest.mark.parametrize("layer", [gdn, kda, gla, conv, conv_update, chunks, selective, step], ids=lambda f: f.__name__)
def test_random(layer, one_thread):
    for seed in range(40):
        try:
            layer(Draw(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("name", MAKERS)
def test_default_device(name, one_thread, monkeypatch):
    """Tensors are made where the arguments are, whatever the default device is."""
    for seed in range(12):
        function, arguments, written = MAKERS[name](random.Random(seed))
        results = []
        for device in ("cpu", "meta"):
            monkeypatch.setattr(_state_calls, "_plans", PlanCache())  # so that lengths are planned anew
            given = {n: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for n, x in arguments.items()}
            with torch.device(device):
                result = function(**given)
            results.append([*(result if isinstance(result, tuple) else (result,)), *(given[n] for n in written)])
        assert all(torch.equal(*pair) for pair in zip(*results))
