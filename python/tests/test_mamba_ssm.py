"""imbrex.mamba_ssm against the definition, with mamba_ssm's layouts and options."""
import inspect

import pytest

torch = pytest.importorskip("torch")

from imbrex import mamba_ssm  # noqa: E402
from imbrex.mamba_ssm.ops.triton.selective_state_update import selective_state_update  # noqa: E402
from imbrex.mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined  # noqa: E402
from recurrent_reference import FLOAT, near, recurrence  # noqa: E402
from torch_reference import DEVICES  # noqa: E402

TOLERANCE = {torch.float32: FLOAT, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
F = torch.nn.functional
BATCH, LENGTH, STATE = 2, 17, 16

# Parameters of mamba_ssm 2.3 with their defaults.
INFINITE = (0.0, float("inf"))
SIGNATURES = {
    mamba_ssm.selective_scan_fn: (
        ["u", "delta", "A", "B", "C"], dict(D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False),
    ),
    selective_state_update: (
        ["state", "x", "dt", "A", "B", "C"], dict(D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None),
    ),
    mamba_chunk_scan_combined: (
        ["x", "dt", "A", "B", "C", "chunk_size"],
        dict(
            D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=INFINITE,
            return_final_states=False, return_varlen_states=False,
        ),
    ),
    mamba_split_conv1d_scan_combined: (
        ["zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "chunk_size"],
        dict(
            initial_states=None, seq_idx=None, dt_limit=INFINITE, return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
            outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signature(function):
    required, optional = SIGNATURES[function]
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [*required, *optional]
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == optional


@pytest.fixture(autouse=True)
def seed(one_thread):
    torch.manual_seed(4)


def silu(x):
    return F.silu(x.double())


def mamba(x, dt, A, B, C, D=None, dt_bias=None, z=None, state=None, limit=INFINITE):
    """In float64: x and z [b, t, h, p], dt [b, t, h], A [h] or [h, n], B and C [b, t, g, n], state [b, h, p, n]. Returns out and the state."""
    x = x.double()
    step = F.softplus(dt.double() + (0 if dt_bias is None else dt_bias.double())).clamp(*limit)
    g = step[..., None] * A.double() if A.dim() == 2 else step * A.double()
    state = None if state is None else state.double().transpose(2, 3)
    out, state = recurrence(C, B, x * step[..., None], g, scale=1.0, state=state)
    if D is not None:
        out = out + x * (D.double() if D.dim() == 2 else D.double()[:, None])
    return out if z is None else out * silu(z), state.transpose(2, 3)


class Mamba2:
    def __init__(self, device="cpu", dtype=torch.float32, b=BATCH, t=LENGTH, heads=4, dim=8, groups=2):
        self.x, self.z = torch.randn(2, b, t, heads, dim, device=device).to(dtype)
        self.dt = torch.randn(b, t, heads, device=device).to(dtype)
        self.B, self.C = torch.randn(2, b, t, groups, STATE, device=device).to(dtype)
        self.A = -torch.rand(heads, device=device) * 4 - 0.1
        self.D, self.bias = torch.randn(2, heads, device=device)
        self.wide_D = torch.randn(heads, dim, device=device)
        self.state = torch.randn(b, heads, dim, STATE, device=device)

    @property
    def inputs(self):
        return self.x, self.dt, self.A, self.B, self.C


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_chunk_scan(given, wide, dtype, device):
    layer = Mamba2(device, dtype)
    D, state = layer.wide_D if wide else layer.D, layer.state if given else None
    options = dict(D=D, z=layer.z, dt_bias=layer.bias)
    expected, final = mamba(*layer.inputs, state=state, limit=(0.2, 1.5), **options)
    out, got = mamba_chunk_scan_combined(
        *layer.inputs, 256, **options, initial_states=state, dt_softplus=True, dt_limit=(0.2, 1.5), return_final_states=True
    )
    near(out, expected, TOLERANCE[dtype])
    near(got, final, TOLERANCE[dtype])
    assert out.dtype == dtype and got.dtype == torch.float32
    out = mamba_chunk_scan_combined(*layer.inputs, 256, dt_softplus=True)
    near(out, mamba(*layer.inputs)[0], TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [False, True])
def test_packed_sequences(given, device):
    layer = Mamba2(device)
    sequence = torch.tensor([[0] * 3 + [1] * 9 + [2] * 5, [4] * 16 + [5]], dtype=torch.int32, device=device)
    state = layer.state if given else None
    options = dict(D=layer.D, dt_softplus=True, initial_states=state, return_final_states=True)
    out, final = mamba_chunk_scan_combined(*layer.inputs, 64, seq_idx=sequence, **options)
    for row, starts in ((0, [0, 3, 12, 17]), (1, [0, 16, 17])):
        for begin, end in zip(starts, starts[1:]):
            part = [y if y is layer.A else y[row : row + 1, begin:end] for y in layer.inputs]
            goes_on = given and row == 0 and begin == 0  # initial states are those of sequence 0
            expected, own = mamba(*part, D=layer.D, state=layer.state[:1] if goes_on else None)
            near(out[row : row + 1, begin:end], expected, FLOAT)
        near(final[row : row + 1], own, FLOAT)

    one = [y if y is layer.A else y[:1] for y in layer.inputs]
    starts = torch.tensor([0, 3, 12, 17], device=device)
    options.update(initial_states=None if state is None else state[:1])
    _, final, states = mamba_chunk_scan_combined(*one, 64, seq_idx=sequence[:1], cu_seqlens=starts, return_varlen_states=True, **options)
    assert states.shape[0] == 3 and torch.equal(states[2:], final)
    near(states[1:2], mamba(*(y if y is layer.A else y[:, 3:12] for y in one))[1], FLOAT)


class Mamba1:
    def __init__(self, device="cpu", dtype=torch.float32, b=BATCH, t=LENGTH, dim=24, groups=None):
        self.u, self.delta, self.z = torch.randn(3, b, dim, t, device=device).to(dtype)
        self.B, self.C = torch.randn(2, b, *([groups] if groups else []), STATE, t, device=device).to(dtype)
        self.A = -torch.rand(dim, STATE, device=device) * 4 - 0.1
        self.D, self.bias = torch.randn(2, dim, device=device)

    def reference(self):
        by_token = [y.transpose(1, 2).unsqueeze(-1) for y in (self.u, self.z)]
        B, C = ((y if y.dim() == 4 else y.unsqueeze(1)).permute(0, 3, 1, 2) for y in (self.B, self.C))
        out, state = mamba(by_token[0], self.delta.transpose(1, 2), self.A, B, C, self.D, self.bias, by_token[1])
        return out.squeeze(-1).transpose(1, 2), state.squeeze(2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("by_token", [False, True])
def test_selective_scan(by_token, groups, dtype, device):
    layer = Mamba1(device, dtype, groups=groups)
    expected, final = layer.reference()
    if by_token:
        layer.u, layer.delta = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (layer.u, layer.delta))
    inputs = (layer.u, layer.delta, layer.A, layer.B, layer.C, layer.D, layer.z, layer.bias, True)
    out, got = mamba_ssm.selective_scan_fn(*inputs, return_last_state=True)
    near(out, expected, TOLERANCE[dtype])
    near(got, final, TOLERANCE[dtype])
    assert torch.equal(mamba_ssm.selective_scan_fn(*inputs), out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_update_of_heads(tied, state_dtype, dtype, device):
    """Mamba2: numbers of a head come expanded, or each channel has its own."""
    layer = Mamba2(device, dtype, t=1)
    heads, dim = layer.x.shape[2:]
    x, z, state = layer.x[:, 0], layer.z[:, 0], layer.state.to(state_dtype)
    wide = [layer.A[:, None, None].expand(-1, dim, STATE), layer.D[:, None].expand(-1, dim), layer.bias[:, None].expand(-1, dim)]
    dt = layer.dt[:, 0, :, None].expand(-1, -1, dim)
    if not tied:
        dt, *wide = (y * (0.5 + torch.rand(y.shape, device=device).to(y.dtype)) for y in (dt, *wide))
    B, C, (A, D, bias) = layer.B[:, 0], layer.C[:, 0], wide
    # Each channel as a value head, whose group is that of its head.
    channels = (x.flatten(1)[:, None, :, None], dt.flatten(1)[:, None], A.flatten(0, 1), B[:, None], C[:, None], D.flatten(), bias.flatten())
    expected, final = mamba(*channels, z.flatten(1)[:, None, :, None], state.flatten(1, 2).unsqueeze(2))
    out = selective_state_update(state, x, dt, A, B, C, D, z, bias, True)
    near(out, expected.view(x.shape), TOLERANCE[dtype])
    near(state, final.view(state.shape), TOLERANCE[torch.bfloat16 if state_dtype == torch.bfloat16 else dtype])
    assert out.dtype == dtype and state.dtype == state_dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_updates_are_the_scan(dtype, device):
    layer = Mamba1(device, dtype)
    expected, final = layer.reference()
    state = torch.zeros(BATCH, 24, STATE, device=device)
    for t in range(LENGTH):
        u, delta, z, B, C = (y[..., t] for y in (layer.u, layer.delta, layer.z, layer.B, layer.C))
        out = selective_state_update(state, u, delta, layer.A, B, C, layer.D, z, layer.bias, dt_softplus=True)
        near(out, expected[..., t], 2 * TOLERANCE[dtype])
    near(state, final, TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_larger_state(device):
    layer, slots = Mamba2(device, t=1), torch.tensor([6, 1], dtype=torch.int32, device=device)
    pool = torch.randn(8, 2, 4, 8, STATE, device=device)  # of two layers
    state, before = pool[:, 1], pool.clone()
    dim = layer.x.shape[3]
    wide = layer.dt[:, 0, :, None].expand(-1, -1, dim), layer.A[:, None, None].expand(-1, dim, STATE), layer.B[:, 0], layer.C[:, 0]
    out = selective_state_update(state, layer.x[:, 0], *wide, dt_softplus=True, state_batch_indices=slots)
    expected, final = mamba(*layer.inputs, state=before[:, 1][slots.long()])
    near(out, expected[:, 0], FLOAT)
    near(state[slots.long()], final, FLOAT)
    before[slots.long(), 1] = state[slots.long()]
    assert torch.equal(pool, before)


def test_a_state_that_lies_otherwise():
    layer = Mamba1(t=1)
    state = torch.randn(BATCH, STATE, 24).transpose(1, 2)
    other = state.contiguous()
    inputs = [y[..., 0] for y in (layer.u, layer.delta)], [layer.A, layer.B[..., 0], layer.C[..., 0]]
    outs = [selective_state_update(s, *inputs[0], *inputs[1], dt_softplus=True) for s in (state, other)]
    assert torch.equal(*outs) and torch.equal(state, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{}, dict(norm=True), dict(norm=True, norm_before_gate=False), dict(norm=True, others=6, project=True), dict(others=6)]
)
def test_split_conv1d_scan(options, device):
    heads, dim, groups, others = 4, 8, 2, options.get("others", 0)
    width, channels = heads * dim, heads * dim + 2 * groups * STATE
    rest, z, xbc, dt = (torch.randn(BATCH, LENGTH, n, device=device) for n in (2 * others, width, channels, heads))
    weight, conv_bias = torch.randn(channels, 4, device=device) / 2, torch.randn(channels, device=device)
    A, bias, D = -torch.rand(heads, device=device) - 0.1, torch.randn(heads, device=device), torch.randn(heads, device=device)
    norm = torch.rand(width, device=device) if options.get("norm") else None
    project = torch.randn(10, width + others, device=device) if options.get("project") else None
    before = options.get("norm_before_gate", True)

    padded = F.pad(xbc.double().transpose(1, 2), (3, 0))
    x, B, C = (
        silu(F.conv1d(padded, weight.double()[:, None], conv_bias.double(), groups=channels))
        .transpose(1, 2)
        .split((width, groups * STATE, groups * STATE), -1)
    )
    expected, _ = mamba(x.unflatten(-1, (heads, dim)), dt, A, B.unflatten(-1, (groups, STATE)), C.unflatten(-1, (groups, STATE)), D, bias)
    expected = expected.flatten(2)
    if norm is None or not before:
        expected = expected * silu(z)
    if norm is not None:
        grouped = expected.unflatten(-1, (groups, -1))
        expected = (grouped / (grouped.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(2) * norm
        expected = expected * silu(z) if before else expected
    left, right = rest.double().chunk(2, -1)
    expected = torch.cat((silu(left) * right, expected), -1)
    expected = expected if project is None else expected @ project.double().t()

    zxbcdt = torch.cat((rest, z, xbc, dt), -1)
    out, state = mamba_split_conv1d_scan_combined(
        zxbcdt, weight, conv_bias, bias, A, D, 256, headdim=dim, ngroups=groups, rmsnorm_weight=norm, rmsnorm_eps=1e-5, outproj_weight=project,
        norm_before_gate=before, return_final_states=True,
    )  # fmt: skip
    near(out, expected, 1e-5)
    assert state.shape == (BATCH, heads, dim, STATE)


def test_empty():
    layer = Mamba2(t=0)
    out, state = mamba_chunk_scan_combined(*layer.inputs, 64, initial_states=layer.state, dt_softplus=True, return_final_states=True)
    assert out.shape == (BATCH, 0, 4, 8) and torch.equal(state, layer.state)


M1, M2 = Mamba1(), Mamba2()
ONE = [y[..., 0] for y in (M1.u, M1.delta)] + [M1.A, M1.B[..., 0], M1.C[..., 0]]
S1 = torch.randn(BATCH, 24, STATE)
SCAN = dict(dt_softplus=True)
REFUSED = {
    "x": (lambda: mamba_chunk_scan_combined(M2.x[0], *M2.inputs[1:], 64, **SCAN), ValueError, r"\[batch, length, heads, dim\]"),
    "groups": (lambda: mamba_chunk_scan_combined(M2.x[:, :, :3], *M2.inputs[1:], 64, **SCAN), ValueError, "2 groups of B as heads, got 3"),
    "dt": (lambda: mamba_chunk_scan_combined(M2.x, M2.dt[:, :3], *M2.inputs[2:], 64, **SCAN), ValueError, r"dt: expected \[2, 17, 4\], got \[2, 3, 4\]"),
    "D": (lambda: mamba_chunk_scan_combined(*M2.inputs, 64, D=M2.A[:3], **SCAN), ValueError, r"\[4\] or \[4, 8\], got \[3\]"),
    "state": (lambda: mamba_chunk_scan_combined(*M2.inputs, 64, initial_states=S1, **SCAN), ValueError, r"\[2, 4, 8, 16\], got \[2, 24, 16\]"),
    "limits": (lambda: mamba_chunk_scan_combined(*M2.inputs, 64, dt_limit=(1, 0.5), **SCAN), ValueError, r"got \(1, 0.5\)"),
    "varlen": (lambda: mamba_chunk_scan_combined(*M2.inputs, 64, return_varlen_states=True, **SCAN), ValueError, "a batch of 1.*got a batch of 2"),
    "complex": (lambda: mamba_ssm.selective_scan_fn(M1.u, M1.delta, M1.A + 0j, M1.B, M1.C, None, None, None, True), NotImplementedError, "complex64"),
    "constant": (lambda: mamba_ssm.selective_scan_fn(M1.u, M1.delta, M1.A, M1.A, M1.C, None, None, None, True), NotImplementedError, r"got .*\[24, 16\]"),
    "A": (lambda: mamba_ssm.selective_scan_fn(M1.u, M1.delta, M1.A[:3], M1.B, M1.C, None, None, None, True), ValueError, r"A: expected \[24, 16\]"),
    "rows": (lambda: selective_state_update(S1[:1], *ONE, **SCAN), ValueError, r"state: expected \[2, 24, 16\], got \[1, 24, 16\]"),
    "slots": (lambda: selective_state_update(S1, *ONE, **SCAN, state_batch_indices=torch.tensor([1, 1])), RuntimeError, "slot"),
    "no slot": (lambda: selective_state_update(S1, *ONE, **SCAN, state_batch_indices=torch.tensor([1, 9])), RuntimeError, ">= 10"),
    "head": (lambda: mamba_split_conv1d_scan_combined(M2.z[0], S1[0], None, M2.bias, M2.A, M2.D, 64), ValueError, "headdim: expected"),
    "projection": (lambda: mamba_split_conv1d_scan_combined(M2.dt, M2.D[:, None], None, M2.bias, M2.A, M2.D, 64, headdim=1), ValueError, "zxbcdt"),
    "gradient": (lambda: mamba_ssm.selective_scan_fn(M1.u, M1.delta, M1.A.clone().requires_grad_(), M1.B, M1.C), NotImplementedError, "no backward"),
    "gradient of a step": (lambda: selective_state_update(S1, *ONE, M1.D.clone().requires_grad_(), **SCAN), NotImplementedError, "no backward pass"),
    "gradient of chunks": (
        lambda: mamba_chunk_scan_combined(*M2.inputs, 64, D=M2.D.clone().requires_grad_(), **SCAN), NotImplementedError, "no backward pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error, text = REFUSED[case]
    state = S1.clone()
    with pytest.raises(error, match=text):
        call()
    assert torch.equal(state, S1)


def test_growing_states_are_no_numbers():
    assert mamba_chunk_scan_combined(M2.x, M2.dt, -M2.A, M2.B, M2.C, 64, dt_softplus=True).isnan().all()
    assert mamba_chunk_scan_combined(M2.x, -M2.dt.abs(), M2.A, M2.B, M2.C, 64).isnan().all()  # steps below 0


@pytest.mark.parametrize("device", DEVICES)
def test_steps_without_softplus(device):
    """Small and large steps, and none at all."""
    layer, one = Mamba2(device), Mamba1(device)
    layer.dt = 10.0 ** torch.empty_like(layer.dt).uniform_(-6, 1.5)
    layer.dt[:, 3] = 0
    one.delta = 10.0 ** torch.empty_like(one.delta).uniform_(-6, 1.5)
    step = layer.dt + 0.01
    expected, state = recurrence(layer.C, layer.B, layer.x.double() * step[..., None], step * layer.A, scale=1.0)
    bias = torch.full_like(layer.A, 0.01)
    out, final = mamba_chunk_scan_combined(*layer.inputs, 64, dt_bias=bias, return_final_states=True)
    near(out, expected, 2 * FLOAT)
    near(final.transpose(2, 3), state, 2 * FLOAT)

    by_token = one.delta.transpose(1, 2).double()
    B, C = (y.transpose(1, 2).unsqueeze(2) for y in (one.B, one.C))
    values = (one.u.transpose(1, 2).double() * by_token).unsqueeze(-1)
    expected, state = recurrence(C, B, values, by_token.unsqueeze(-1) * one.A, scale=1.0)
    out, final = mamba_ssm.selective_scan_fn(one.u, one.delta, one.A, one.B, one.C, return_last_state=True)
    near(out, expected.squeeze(-1).transpose(1, 2), 2 * FLOAT)
    near(final, state.squeeze(-1), 2 * FLOAT)

    state = torch.zeros_like(final)
    for t in range(LENGTH):
        last = selective_state_update(state, one.u[..., t], one.delta[..., t], one.A, one.B[..., t], one.C[..., t])
    near(last, out[..., -1].double(), 2 * FLOAT)
    near(state, final.double(), 2 * FLOAT)


def test_rates_of_many_channels():
    """They are kept by content: tensors that are made again, that change in place in whatever way, and others that begin alike."""
    dim, d_state = 512, 16

    def step(A):
        state, x, dt = torch.randn(1, dim, d_state), torch.randn(1, dim), torch.randn(1, dim)
        B, C = torch.randn(1, d_state), torch.randn(1, d_state)
        before = state.clone()
        out = selective_state_update(state, x, dt, A, B, C, dt_softplus=True)
        steps = torch.nn.functional.softplus(dt.double())[..., None]
        after = before.double() * (A.double() * steps).exp() + steps * B.double()[:, None] * x.double()[..., None]
        near(state, after, FLOAT)
        near(out, (after * C.double()[:, None]).sum(-1), FLOAT)

    A = -torch.rand(dim, d_state)
    other = A.clone()
    other[1:] *= 3
    for given in (A, A.clone(), other, A.t().contiguous().t(), other):
        step(given)
    A.data[5:] *= 2
    step(A)
    A[0, 0] = -7
    step(A)
