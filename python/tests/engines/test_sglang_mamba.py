"""Convolutions and Mamba2 in SGLang, against its stand-in: its own functions are found by name, and imbrex's while a backend of imbrex runs."""

import pytest

torch = pytest.importorskip("torch")
from recurrent_reference import near, recurrence  # noqa: E402
from test_sglang_linear import NEAR, backend_of  # noqa: E402
from torch.nn.functional import silu, softplus  # noqa: E402


class Requests:
    """Rows of requests, and how many of each were computed."""

    def __init__(self, *lengths, columns, device):
        self.rows = [torch.randn(n, columns, device=device) for n in lengths]
        self.computed, self.device = [0] * len(lengths), device

    def step(self, counts):
        """The rows of the step, starts, and who has earlier ones."""
        parts = [rows[at : at + n] for rows, at, n in zip(self.rows, self.computed, counts)]
        earlier = torch.tensor([at > 0 for at in self.computed], device=self.device)
        self.computed = [at + n for at, n in zip(self.computed, counts)]
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return torch.cat(parts), starts.to(self.device), earlier

    def expected(self, counts, function):
        return torch.cat([function(rows[:at])[at - n : at] for rows, at, n in zip(self.rows, self.computed, counts) if n])


def convolved(rows, weight, bias):
    padded = torch.cat([rows.new_zeros(weight.shape[1] - 1, rows.shape[1]), rows]).double()
    return silu(sum(padded[i : i + len(rows)] * weight[:, i].double() for i in range(weight.shape[1])) + bias.double())


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_convolutions(registry, device, kind):
    pool = torch.full((1, 9, 8, 3), float("nan"), device=device)
    if kind == "kda":  # its pool has channels together, and its backend says so
        pool = pool.transpose(-1, -2).contiguous().transpose(-1, -2)
    backend, cache = backend_of(registry, kind, device, pool, linear_attn_backend="imbrex")
    states, (weight, bias) = cache.conv[0][0], (torch.randn(8, 4, device=device), torch.randn(8, device=device))
    assert states.shape == (9, 8, 3) and states.stride(-2) == 1
    slots, requests = torch.tensor([5, 2], dtype=torch.int32, device=device), Requests(12, 30, columns=8, device=device)
    for counts in ([1, 20], [6, 3], [1, 2]):
        x, starts, earlier = requests.step(counts)
        out = backend.forward_extend(x, states, weight, bias, slots, starts, earlier)
        near(out.transpose(0, 1), requests.expected(counts, lambda rows: convolved(rows, weight, bias)), NEAR)
    for _ in range(2):
        x, _, _ = requests.step([1, 1])
        near(backend.forward_decode(x, states, weight, bias, slots), requests.expected([1, 1], lambda rows: convolved(rows, weight, bias)), NEAR)
    assert torch.equal(states[5], requests.rows[0][7:10].T) and torch.isnan(states[[0, 1, 3, 4, 6, 7, 8]]).all()


def test_sglang_keeps_its_convolutions(registry):
    """Where one phase is its own, and where something else reads the pool's memory."""
    from sglang.srt.layers.attention.linear import gdn_backend

    x, arguments = torch.randn(2, 8), (None, None, None, None)
    for phases in (dict(linear_attn_decode_backend="imbrex"), dict(linear_attn_prefill_backend="imbrex")):
        backend, cache = backend_of(registry, "gdn", **phases)
        assert backend.forward_decode(x, *arguments) == "SGLang's fused kernel" and cache.conv[0].is_contiguous()
    part = torch.zeros(1, 9, 8, 6)[..., :3]
    backend, cache = backend_of(registry, "gdn", conv=part, linear_attn_backend="imbrex")
    assert cache.conv[0] is part and backend.forward_decode(x, *arguments) == "SGLang's fused kernel"
    assert gdn_backend.causal_conv1d_fn(x, None, None) == "SGLang's prompts"  # of other backends, and of none


def mixed(mixer, rows):
    """A request's rows, of the channels and the step."""
    xbc, dt = rows.split([len(mixer.bias), mixer.heads], -1)
    x, B, C = (y[None] for y in mixer.split(convolved(xbc, mixer.weight, mixer.bias)))
    step = softplus(dt.double() + mixer.dt_bias.double())[None]
    out, _ = recurrence(C, B, x * step[..., None], step * mixer.A.double(), scale=1.0)
    return (out + mixer.D.double()[:, None] * x)[0]


@pytest.mark.parametrize("triton", [False, True])
def test_mamba2(registry, device, triton):
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    mixer = MambaMixer2(device)
    mixer.use_triton = triton
    channels = len(mixer.bias)
    backend, cache = backend_of(
        registry, "mamba2", device, torch.full((1, 9, channels, 3), float("nan"), device=device), linear_attn_backend="imbrex"
    )
    states = torch.full((9, mixer.heads, mixer.dim, mixer.d_state), float("nan"), device=device)
    slots, requests = torch.tensor([7, 3, 1], dtype=torch.int32, device=device), Requests(12, 100, 40, columns=channels + mixer.heads, device=device)

    def run(counts, decode=False, **options):
        rows, starts, earlier = requests.step(counts)
        xbc, dt = rows.split([channels, mixer.heads], -1)
        place = (None, None) if decode else (starts, earlier)
        near(
            backend.forward(mixer, xbc, dt, cache.conv[0][0], states, slots, *place, **options),
            requests.expected(counts, lambda x: mixed(mixer, x)),
            NEAR,
        )

    run([1, 70, 5])
    run([4, 1, 20])
    for _ in range(3):
        run([1, 1, 1], decode=True)
    run([2, 20, 1])
    assert torch.isnan(states[[0, 2, 4, 5, 6, 8]]).all()
    with pytest.raises(NotImplementedError, match="--mamba-radix-cache-strategy no_buffer does without"):
        run([1, 1, 1], track=torch.zeros(1))


def test_mamba2_in_one_phase_is_sglang_s(registry):
    from sglang.srt.layers.attention.mamba import mamba

    backend, cache = backend_of(registry, "mamba2", linear_attn_decode_backend="imbrex")
    mixer = mamba.MambaMixer2("cpu")
    with pytest.raises(NotImplementedError, match="SGLang has no causal_conv1d_update on this device"):
        backend.forward(mixer, torch.randn(2, len(mixer.bias)), torch.randn(2, 4), None, None, None, None, None)
    assert mamba.selective_state_update() == "SGLang's tokens" and cache.conv[0].is_contiguous()
