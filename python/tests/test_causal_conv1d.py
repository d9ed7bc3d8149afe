"""imbrex.causal_conv1d against the definition: a token's sum is over those of its own sequence, oldest first."""
import inspect

import pytest

torch = pytest.importorskip("torch")

from imbrex import causal_conv1d  # noqa: E402
from imbrex.causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states  # noqa: E402
from torch_reference import DEVICES, near  # noqa: E402

TOLERANCE = {torch.float32: 2e-5 if torch.cuda.is_available() else 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BATCH, DIM = 3, 20

# Parameters of causal_conv1d 1.7 with their defaults.
SIGNATURES = {
    "causal_conv1d_fn": (
        ["x", "weight"],
        dict(bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None, activation=None),
    ),
    "causal_conv1d_update": (["x", "conv_state", "weight"], dict(bias=None, activation=None, cache_seqlens=None, conv_state_indices=None)),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    required, optional = SIGNATURES[name]
    parameters = inspect.signature(getattr(causal_conv1d, name)).parameters
    assert list(parameters) == [*required, *optional]
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == optional


def reference(x, weight, bias, silu, earlier=None, sequence=None):
    """In float64: x [batch, dim, length] behind `earlier` ones; sequence [batch, length] says which tokens see each other."""
    x, weight = x.double(), weight.double()
    width, length = weight.shape[1], x.shape[2]
    before = x.new_zeros((*x.shape[:2], width - 1)) if earlier is None else earlier.double()[..., earlier.shape[2] - width + 1 :]
    inputs = torch.cat((before, x), -1)
    out = torch.zeros_like(x) if bias is None else bias.double().view(1, -1, 1).expand(x.shape).clone()
    for t in range(length):
        for i in range(width):
            at = t - width + 1 + i
            term = weight[:, i] * inputs[:, :, at + width - 1]
            if sequence is not None:
                first = sequence[:, 0] if earlier is not None else torch.full_like(sequence[:, 0], -1)
                term = term * (sequence[:, t] == (sequence[:, at] if at >= 0 else first))[:, None]
            out[:, :, t] += term
    if sequence is not None:
        out = out * (sequence >= 0)[:, None]
    out = torch.nn.functional.silu(out) if silu else out
    return out, inputs[..., length:]


def numbers(device, dtype, *shape, by_token=False):
    x = torch.randn(*shape, device=device).to(dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if by_token else x


@pytest.fixture(autouse=True)
def seed(one_thread):
    torch.manual_seed(5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_forward(device, dtype, width, by_token, given):
    for length in (1, 2, 11):
        x = numbers(device, dtype, BATCH, DIM, length, by_token=by_token)
        weight, bias = numbers(device, dtype, DIM, width), numbers(device, dtype, DIM)
        states = numbers(device, dtype, BATCH, DIM, width - 1) if given else None
        for own_bias, activation in ((bias, "silu"), (None, None), (bias, "swish")):
            expected, final = reference(x, weight, own_bias, activation is not None, states)
            out, got = causal_conv1d.causal_conv1d_fn(x, weight, own_bias, None, states, True, activation=activation)
            near(out, expected, TOLERANCE[dtype] * max(1, expected.abs().max()))
            assert out.dtype == got.dtype == dtype and torch.equal(got, final.to(dtype))


def test_given_memory_and_types():
    x, weight = numbers("cpu", torch.bfloat16, BATCH, DIM, 7), numbers("cpu", torch.float32, DIM, 4)
    into = torch.empty(BATCH, DIM, 3, dtype=torch.bfloat16)
    out, final = causal_conv1d.causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=into)
    assert final is into and torch.equal(into, x[..., -3:]) and out.dtype == torch.bfloat16
    assert torch.equal(out, reference(x, weight, None, False)[0].to(torch.bfloat16))  # the weight is not rounded


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [False, True])
def test_packed_sequences(device, given):
    sequence = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2, 2, -1, -1], [0] * 11, [3, 4, 4, 4, 4, 4, 4, 4, 4, 9, 9]], dtype=torch.int32, device=device)
    x, weight, bias = numbers(device, torch.float32, BATCH, DIM, 11), numbers(device, torch.float32, DIM, 4), numbers(device, torch.float32, DIM)
    states = numbers(device, torch.float32, BATCH, DIM, 3) if given else None
    out = causal_conv1d.causal_conv1d_fn(x, weight, bias, sequence, states, activation="silu")
    near(out, reference(x, weight, bias, True, states, sequence)[0], TOLERANCE[torch.float32])
    assert (out[0, :, -2:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("held", [3, 4, 6, 9])
@pytest.mark.parametrize("by_token", [False, True])
def test_update(device, dtype, held, by_token):
    """One token, and some, behind a state that holds as many as are needed, or more."""
    weight, bias = numbers(device, dtype, DIM, 4), numbers(device, dtype, DIM)
    state = numbers(device, dtype, BATCH, DIM, held, by_token=by_token)
    for length in (None, 1, 3):
        x = numbers(device, dtype, BATCH, DIM, *([] if length is None else [length]))
        columns = x if length else x[..., None]
        expected, _ = reference(columns, weight, bias, True, state)
        kept = torch.cat((state, columns), -1)[..., -held:]
        out = causal_conv1d.causal_conv1d_update(x, state, weight, bias, "silu")
        near(out, expected if length else expected[..., 0], TOLERANCE[dtype] * max(1, expected.abs().max()))
        assert torch.equal(state, kept)


@pytest.mark.parametrize("device", DEVICES)
def test_circular_state(device):
    weight, state = numbers(device, torch.float32, DIM, 4), torch.zeros(BATCH, DIM, 5, device=device)
    x = numbers(device, torch.float32, BATCH, DIM, 12)
    expected, _ = reference(x, weight, None, False)
    at = 0
    for length in (2, 1, 5, 3, 1):
        places = torch.full((BATCH,), at, dtype=torch.int32, device=device)
        out = causal_conv1d.causal_conv1d_update(x[..., at : at + length], state, weight, cache_seqlens=places)
        near(out, expected[..., at : at + length], TOLERANCE[torch.float32])
        at += length
    assert torch.equal(state, torch.stack([x[..., t] for t in (10, 11, 7, 8, 9)], -1))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_larger_state(device):
    weight = numbers(device, torch.float32, DIM, 4)
    state = numbers(device, torch.float32, 8, DIM, 3)
    slots = torch.tensor([5, -1, 2], dtype=torch.int32, device=device)
    x, before = numbers(device, torch.float32, BATCH, DIM), state.clone()
    out = causal_conv1d.causal_conv1d_update(x, state, weight, conv_state_indices=slots)
    for row, slot in ((0, 5), (2, 2)):
        near(out[row], reference(x[row, :, None][None], weight, None, False, before[slot][None])[0][0, :, 0], TOLERANCE[torch.float32])
        assert torch.equal(state[slot], torch.cat((before[slot][:, 1:], x[row, :, None]), -1))
        before[slot] = state[slot]
    assert (out[1] == 0).all() and torch.equal(state, before)


def test_varlen_states():
    x = torch.arange(14.0).view(7, 2)
    states = causal_conv1d_varlen_states(x, torch.tensor([0, 5, 5, 7]), 3)
    assert states[:, 0].tolist() == [[4, 6, 8], [0, 0, 0], [0, 10, 12]]


def test_empty():
    weight, states = torch.randn(DIM, 4), torch.randn(2, DIM, 3)
    out, final = causal_conv1d.causal_conv1d_fn(torch.randn(2, DIM, 0), weight, None, None, states, True)
    assert out.shape == (2, DIM, 0) and torch.equal(final, states)
    assert causal_conv1d.causal_conv1d_fn(torch.randn(0, DIM, 4), weight).shape == (0, DIM, 4)


X, W, STATE = torch.randn(2, DIM, 6), torch.randn(DIM, 4), torch.randn(2, DIM, 3)
REFUSED = {
    "activation": (lambda: causal_conv1d.causal_conv1d_fn(X, W, activation="gelu"), NotImplementedError, "activation: expected .* got 'gelu'"),
    "x": (lambda: causal_conv1d.causal_conv1d_fn(X[0], W), ValueError, r"x: expected \[batch, dim, seqlen\], got \[20, 6\]"),
    "weight": (lambda: causal_conv1d.causal_conv1d_fn(X, W[:9]), ValueError, r"weight: expected \[20, width\], got \[9, 4\]"),
    "bias": (lambda: causal_conv1d.causal_conv1d_fn(X, W, W), ValueError, r"bias: expected \[20\], got \[20, 4\]"),
    "initial_states": (lambda: causal_conv1d.causal_conv1d_fn(X, W, initial_states=X), ValueError, r"\[2, 20, 3\], got \[2, 20, 6\]"),
    "seq_idx": (lambda: causal_conv1d.causal_conv1d_fn(X, W, seq_idx=torch.tensor([[0, 1, 0, 0, 0, 0]] * 2)), NotImplementedError, "together"),
    "final of packed": (
        lambda: causal_conv1d.causal_conv1d_fn(X, W, seq_idx=torch.zeros(2, 6), return_final_states=True),
        NotImplementedError,
        "expected False with seq_idx, got True",
    ),
    "conv_state": (lambda: causal_conv1d.causal_conv1d_update(X, STATE[..., 1:], W), ValueError, "3 or more.*got .2, 20, 2"),
    "rows": (lambda: causal_conv1d.causal_conv1d_update(X, STATE[:1], W), ValueError, r"\[2, 20, 3\], got \[1, 20, 3\]"),
    "slots": (lambda: causal_conv1d.causal_conv1d_update(X, STATE, W, conv_state_indices=torch.tensor([1, 1])), ValueError, r"got \[1, 1\]"),
    "circle": (lambda: causal_conv1d.causal_conv1d_update(X, STATE, W, cache_seqlens=torch.tensor([0, 0])), ValueError, "at most 3 tokens.* got 6"),
    "float64": (lambda: causal_conv1d.causal_conv1d_fn(X.double(), W), TypeError, "float64"),
    "integers": (lambda: causal_conv1d.causal_conv1d_fn(X.to(torch.uint16), W.to(torch.uint16)), TypeError, "torch.float16, got torch.uint16"),
    "cu_seqlens": (lambda: causal_conv1d_varlen_states(X[0].t(), torch.tensor([0, 7]), 3), ValueError, r"from 0 to 6, got \[0, 7\]"),
    "gradient": (lambda: causal_conv1d.causal_conv1d_fn(X, W.clone().requires_grad_()), NotImplementedError, "no backward pass"),
    "gradient of update": (lambda: causal_conv1d.causal_conv1d_update(X, STATE, W.clone().requires_grad_()), NotImplementedError, "no backward pass"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error, text = REFUSED[case]
    state = STATE.clone()
    with pytest.raises(error, match=text):
        call()
    assert torch.equal(STATE, state)


def test_no_gradient_is_wanted_without_grad_mode():
    with torch.no_grad():
        causal_conv1d.causal_conv1d_fn(X, W.clone().requires_grad_())
