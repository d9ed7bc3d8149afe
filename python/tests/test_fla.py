"""imbrex.fla against the definition, with FLA's layouts [batch, length, heads, dim] and options."""
import inspect

import pytest

torch = pytest.importorskip("torch")

from imbrex.fla import ops  # noqa: E402
from recurrent_reference import FLOAT, near, recurrence  # noqa: E402
from torch_reference import DEVICES  # noqa: E402

TOLERANCE = {torch.float32: FLOAT, torch.bfloat16: 1e-2, torch.float16: 2e-3}
B, T, H, HV, K, V = 2, 19, 2, 4, 16, 24

# Parameters of fla-core 0.6 with their defaults.
QKV, STATE = ["q", "k", "v"], dict(initial_state=None, output_final_state=False)
BETA = dict(use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False)
GATE = dict(use_gate_in_kernel=False, A_log=None, dt_bias=None)
SIGNATURES = {
    "chunk_gated_delta_rule": (
        [*QKV, "g", "beta"],
        dict(
            scale=None, **STATE, use_qk_l2norm_in_kernel=False, **BETA, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None,
            cp_context=None,
        ),
    ),
    "chunk_gated_delta_product": (
        [*QKV, "g", "beta", "num_householder"],
        dict(scale=None, **STATE, use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None),
    ),
    "fused_recurrent_gated_delta_rule": (
        QKV, dict(g=None, gk=None, gv=None, beta=None, scale=None, **STATE, use_qk_l2norm_in_kernel=False, **GATE, **BETA, state_v_first=False, cu_seqlens=None),
    ),
    "chunk_kda": (
        [*QKV, "g", "beta"],
        dict(
            scale=None, **STATE, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, **BETA, safe_gate=False, lower_bound=None, disable_recompute=False,
            return_intermediate_states=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None,
        ),
    ),
    "fused_recurrent_kda": (
        [*QKV, "g", "beta"],
        dict(
            A_log=None, dt_bias=None, scale=None, **STATE, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, **BETA, lower_bound=None,
            state_v_first=False, cu_seqlens=None,
        ),
    ),
    "chunk_simple_gla": (QKV, dict(g=None, g_gamma=None, scale=None, **STATE, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None)),
    "fused_recurrent_simple_gla": (QKV, dict(g=None, g_gamma=None, scale=None, **STATE, reverse=False, state_v_first=False, cu_seqlens=None)),
    "chunk_lightning_attn": ([*QKV, "layer_idx", "num_layers"], dict(scale=None, **STATE, cu_seqlens=None)),
    "fused_recurrent_lightning_attn": ([*QKV, "layer_idx", "num_layers"], dict(scale=None, **STATE, reverse=False, cu_seqlens=None)),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    required, optional = SIGNATURES[name]
    parameters = inspect.signature(getattr(ops, name)).parameters
    named = {n: p for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    assert list(named) == [*required, *optional]
    assert {n: p.default for n, p in named.items() if p.default is not p.empty} == optional


@pytest.fixture(autouse=True)
def seed(one_thread):
    torch.manual_seed(9)


def numbers(device, dtype, *shape):
    return torch.randn(*shape, device=device).to(dtype)


class Layer:
    """q, k, v of a batch, betas, gates of heads and channels, and states."""

    def __init__(self, device="cpu", dtype=torch.float32, b=B, t=T):
        self.q, self.k = numbers(device, dtype, 2, b, t, H, K)
        self.v = numbers(device, dtype, b, t, HV, V)
        self.beta = torch.rand(b, t, HV, device=device)
        self.g, self.gk = -torch.rand(b, t, HV, device=device), -torch.rand(b, t, HV, K, device=device)
        self.raw, self.raw_channels = numbers(device, dtype, b, t, HV), numbers(device, dtype, b, t, HV, K)
        self.a_log, self.bias, self.channel_bias = (numbers(device, torch.float32, n) for n in (HV, HV, HV * K))
        self.state = numbers(device, torch.float32, b, HV, K, V)

    @property
    def qkv(self):
        return self.q, self.k, self.v

    def softplus_gate(self):
        return -self.a_log.double().exp() * torch.nn.functional.softplus(self.raw.double() + self.bias)

    def channels(self):
        return self.raw_channels.double() + self.channel_bias.view(HV, K)


# name -> (a function, how it is called for a layer, gates and betas of the reference, other options of the reference)
def normal_already(layer):
    layer.k = torch.nn.functional.normalize(layer.k.float(), dim=-1).to(layer.k.dtype)
    return (layer.g, layer.beta), {}, layer.g, layer.beta, {}


def normal(layer):
    return (layer.g, layer.beta), dict(use_qk_l2norm_in_kernel=True), layer.g, layer.beta, dict(norm=True)


def gate_in_kernel(layer):
    options = dict(use_gate_in_kernel=True, A_log=layer.a_log, dt_bias=layer.bias, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    logits = 4 * layer.beta - 2
    return (layer.raw, logits), dict(options, use_qk_l2norm_in_kernel=True), layer.softplus_gate(), 2 * logits.double().sigmoid(), dict(norm=True)


def kda(layer):
    return (layer.gk, layer.beta), dict(use_qk_l2norm_in_kernel=True), layer.gk, layer.beta, dict(norm=True)


def kda_gate(layer):
    gate = -layer.a_log.double().exp()[:, None] * torch.nn.functional.softplus(layer.channels())
    options = dict(use_gate_in_kernel=True, A_log=layer.a_log, dt_bias=layer.channel_bias, use_qk_l2norm_in_kernel=True)
    return (layer.raw_channels, layer.beta), options, gate, layer.beta, dict(norm=True)


def kda_bounded(layer):
    gate = -5 * (layer.a_log.double().exp()[:, None] * layer.channels()).sigmoid()
    options = dict(
        use_gate_in_kernel=True, A_log=layer.a_log[None, None, :, None], dt_bias=layer.channel_bias, lower_bound=-5.0, use_qk_l2norm_in_kernel=True
    )
    return (layer.raw_channels, layer.beta), options, gate, layer.beta, dict(norm=True)


def kda_bounded_without_rates(layer):
    options = dict(use_gate_in_kernel=True, lower_bound=-2.0, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True)
    return (layer.raw_channels, layer.raw), options, -2 * layer.raw_channels.double().sigmoid(), layer.raw.double().sigmoid(), dict(norm=True)


def gla(layer):
    return (layer.g,), {}, layer.g, None, {}


def gamma(layer):
    return (), dict(g_gamma=layer.g[0, 0]), layer.g[0, 0].expand(layer.g.shape), None, {}


def undecayed(layer):
    return (), dict(scale=0.3), torch.zeros_like(layer.g), None, dict(scale=0.3)


def lightning(layer):
    layer.q, layer.k = layer.q.repeat_interleave(2, 2), layer.k.repeat_interleave(2, 2)
    slopes = torch.tensor([0.0, -2.0, -4.0, -6.0], device=layer.g.device) * (1 - 3 / 8)
    return (3, 8), {}, slopes.expand(layer.g.shape), None, {}


def both_gates(layer):
    return (layer.g, layer.gk, None, layer.beta), dict(use_qk_l2norm_in_kernel=True), layer.gk + layer.g[..., None], layer.beta, dict(norm=True)


def no_beta(layer):
    return (layer.g,), dict(use_qk_l2norm_in_kernel=True), layer.g, torch.ones_like(layer.beta), dict(norm=True)


def keyword_beta(layer):
    return (), dict(g=layer.g, beta=layer.beta, use_qk_l2norm_in_kernel=True), layer.g, layer.beta, dict(norm=True)


CASES = {
    "gdn": (ops.chunk_gated_delta_rule, normal),
    "gdn, keys of length 1": (ops.chunk_gated_delta_rule, normal_already),
    "gdn, scale": (ops.chunk_gdn, lambda x: ((x.g, x.beta), dict(scale=2.0, use_qk_l2norm_in_kernel=True), x.g, x.beta, dict(scale=2.0, norm=True))),
    "gdn, gate in kernel": (ops.chunk_gated_delta_rule, gate_in_kernel),
    "gdn, recurrent": (ops.fused_recurrent_gated_delta_rule, keyword_beta),
    "gdn, recurrent, gates of channels": (ops.fused_recurrent_gdn, both_gates),
    "gdn, recurrent, no beta": (ops.fused_recurrent_gated_delta_rule, no_beta),
    "kda": (ops.chunk_kda, kda),
    "kda, recurrent": (ops.fused_recurrent_kda, kda),
    "kda, gate in kernel": (ops.chunk_kda, kda_gate),
    "kda, gate with a bound": (ops.fused_recurrent_kda, kda_bounded),
    "kda, gate with a bound, no rates": (ops.chunk_kda, kda_bounded_without_rates),
    "gla": (ops.chunk_simple_gla, gla),
    "gla, recurrent": (ops.fused_recurrent_simple_gla, gla),
    "gla, one decay": (ops.chunk_simple_gla, gamma),
    "gla, no decay": (ops.fused_recurrent_simple_gla, undecayed),
    "lightning": (ops.chunk_lightning_attn, lightning),
    "lightning, recurrent": (ops.fused_recurrent_lightning_attn, lightning),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_states(case, dtype, device):
    function, case = CASES[case]
    layer = Layer(device, dtype)
    arguments, options, g, beta, reference = case(layer)
    out, state = function(*layer.qkv, *arguments, **options)
    expected, _ = recurrence(*layer.qkv, g, beta, **reference)
    near(out, expected, TOLERANCE[dtype])
    assert out.dtype == dtype and state is None

    before = layer.state.clone()
    out, state = function(*layer.qkv, *arguments, initial_state=layer.state, output_final_state=True, **options)
    expected, final = recurrence(*layer.qkv, g, beta, state=layer.state, **reference)
    near(out, expected, TOLERANCE[dtype])
    near(state, final, TOLERANCE[dtype])
    assert state.dtype == torch.float32 and torch.equal(layer.state, before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [c for c in CASES if "lightning" not in c and "one decay" not in c])
def test_token_by_token(case, device):
    """A prompt of three tokens more or fewer and steps of one are one recurrence."""
    function, case = CASES[case]
    layer = Layer(device)
    arguments, options, *_ = case(layer)
    whole, final = function(*layer.qkv, *arguments, output_final_state=True, **options)

    def part(x, begin, end):
        return x[:, begin:end] if torch.is_tensor(x) and x.shape[:2] == (B, T) else x

    outs, state, at = [], None, 0
    for length in (1, 3, 1, T - 5):
        own = {name: part(x, at, at + length) for name, x in options.items()}
        inputs = [part(x, at, at + length) for x in (*layer.qkv, *arguments)]
        out, state = function(*inputs, initial_state=state, output_final_state=True, **own)
        outs.append(out)
        at += length
    near(torch.cat(outs, 1), whole.double(), FLOAT)
    near(state, final.double(), FLOAT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("given", [False, True])
def test_sequences_of_different_lengths(device, given):
    layer = Layer(device, b=1, t=23)
    starts = [0, 5, 5, 6, 23]
    states = numbers(device, torch.float32, 4, HV, K, V) if given else None
    cu_seqlens = torch.tensor(starts, device=device)
    tensors = (*layer.qkv, layer.g, layer.beta)
    out, final = ops.chunk_gated_delta_rule(
        *tensors, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens.cpu()
    )
    for i, (begin, end) in enumerate(zip(starts, starts[1:])):
        own = None if states is None else states[i : i + 1]
        expected, state = recurrence(*(x[:, begin:end] for x in tensors), state=own, norm=True)
        if end > begin:
            near(out[:, begin:end], expected, FLOAT)
        near(final[i : i + 1], state, FLOAT)


def delta_product(q, k, v, g, beta, steps, state):
    """Token by token and step by step, in float64."""
    q, k, v, beta, state = (x.double() for x in (q, k, v, beta, state))
    repeats = v.shape[2] // q.shape[2]
    q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(repeats, 2) for x in (q, k))
    outs = []
    for t in range(q.shape[1]):
        state = state if g is None else state * g[:, t].double().exp()[..., None, None]
        for i in range(t * steps, (t + 1) * steps):
            missing = v[:, i] - torch.einsum("bhk,bhkv->bhv", k[:, i], state)
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], beta[:, i, :, None] * missing)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1), state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("gated", [True, False])
def test_delta_products(steps, gated, dtype, device):
    t = 75  # more than a chunk of 64 steps
    layer, of_tokens = Layer(device, dtype, t=t * steps), Layer(device, dtype, t=t)
    g = of_tokens.g if gated else None
    options = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    out, state = ops.chunk_gated_delta_product(of_tokens.q, layer.k, layer.v, g, layer.beta, steps, initial_state=layer.state, **options)
    expected, final = delta_product(of_tokens.q, layer.k, layer.v, g, layer.beta, steps, layer.state)
    near(out, expected, TOLERANCE[dtype])
    near(state, final, TOLERANCE[dtype])
    assert out.dtype == dtype and out.shape == (B, t, HV, V)


def test_delta_products_of_different_lengths():
    steps, starts = 2, [0, 4, 4, 11]
    layer, of_tokens = Layer(b=1, t=11 * steps), Layer(b=1, t=11)
    states, options = numbers("cpu", torch.float32, 3, HV, K, V), dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    out, final = ops.chunk_gated_delta_product(
        of_tokens.q, layer.k, layer.v, of_tokens.g, layer.beta, steps, initial_state=states, cu_seqlens=torch.tensor(starts), **options
    )
    for i, (begin, end) in enumerate(zip(starts, starts[1:])):
        own = slice(begin * steps, end * steps)
        alone = (of_tokens.q[:, begin:end], layer.k[:, own], layer.v[:, own], of_tokens.g[:, begin:end], layer.beta[:, own])
        if end > begin:
            expected, state = delta_product(*alone, steps, states[i : i + 1])
            near(out[:, begin:end], expected, FLOAT)
            near(final[i : i + 1], state, FLOAT)
        else:
            assert torch.equal(final[i], states[i])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(num_householder=0), "num_householder: expected a number of steps, 1 or more, got 0"),
        (dict(num_householder=3), r"k: expected .*57"),
        (dict(cp_context=object()), "cp_context"),
    ],
)
def test_delta_products_refused(changed, message):
    layer, of_tokens = Layer(t=2 * T), Layer()
    arguments = dict(q=of_tokens.q, k=layer.k, v=layer.v, g=of_tokens.g, beta=layer.beta, num_householder=2)
    with pytest.raises(Exception, match=message):
        ops.chunk_gated_delta_product(**dict(arguments, **changed))


@pytest.mark.parametrize("name", ["state_v_first", "transpose_state_layout"])
def test_states_with_values_first(name):
    layer = Layer()
    expected, final = recurrence(*layer.qkv, layer.g, layer.beta, state=layer.state, norm=True)
    turned = layer.state.transpose(2, 3)
    options = dict(initial_state=turned, output_final_state=True, use_qk_l2norm_in_kernel=True)
    for function in (ops.chunk_gated_delta_rule, ops.fused_recurrent_gated_delta_rule):
        out, state = function(*layer.qkv, g=layer.g, beta=layer.beta, **options, **{name: True})
        near(out, expected, FLOAT)
        near(state.transpose(2, 3), final, FLOAT)


def test_parts_of_a_wider_projection():
    """Rows of q, k and v that lie apart are read where they are, and betas of another type are not refused."""
    layer = Layer()
    wide = torch.randn(B, T, 2 * H * K + HV * V)
    q, k, v = wide.split((H * K, H * K, HV * V), -1)
    tensors = q.view(B, T, H, K), k.view(B, T, H, K), v.view(B, T, HV, V)
    beta = layer.beta.to(torch.bfloat16)
    out, _ = ops.chunk_gated_delta_rule(*tensors, layer.g, beta, use_qk_l2norm_in_kernel=True, chunk_size=32)
    near(out, recurrence(*tensors, layer.g, beta, norm=True)[0], FLOAT)


def test_empty():
    layer = Layer(t=0)
    out, state = ops.chunk_gated_delta_rule(*layer.qkv, layer.g, layer.beta, initial_state=layer.state, output_final_state=True)
    assert out.shape == (B, 0, HV, V) and torch.equal(state, layer.state)
    _, state = ops.chunk_kda(*layer.qkv, layer.gk, layer.beta, output_final_state=True)
    assert state.shape == (B, HV, K, V) and not state.any()


L = Layer()
GDN = (*L.qkv, L.g, L.beta)
REFUSED = {
    "heads": (lambda: ops.chunk_kda(L.q, L.k, L.v[:, :, :3], L.gk, L.beta), ValueError, "a multiple of the 2 heads of q, got 3"),
    "keys": (
        lambda: ops.chunk_gated_delta_rule(L.q, L.k[..., :8], L.v, L.g, L.beta),
        ValueError,
        r"k: expected \[2, 19, 2, 16\], got \[2, 19, 2, 8\]",
    ),
    "dims": (lambda: ops.chunk_simple_gla(L.q[0], L.k[0], L.v[0]), ValueError, r"\[batch, length, heads, dim\], got \[19, 2, 16\]"),
    "float64": (lambda: ops.chunk_simple_gla(*(x.double() for x in L.qkv)), TypeError, "float64"),
    "gate": (lambda: ops.chunk_gated_delta_rule(*L.qkv, L.gk, L.beta), ValueError, r"g: expected \[2, 19, 4\], got \[2, 19, 4, 16\]"),
    "beta": (lambda: ops.chunk_kda(*L.qkv, L.gk, L.v), ValueError, r"beta: expected \[2, 19, 4\], got \[2, 19, 4, 24\]"),
    "state": (lambda: ops.chunk_gated_delta_rule(*GDN, initial_state=L.state[:1]), ValueError, r"\[2, 4, 16, 24\], got \[1, 4, 16, 24\]"),
    "scale": (lambda: ops.chunk_gated_delta_rule(*GDN, scale=0.0), ValueError, "other than 0, got 0.0"),
    "gv": (lambda: ops.fused_recurrent_gated_delta_rule(*L.qkv, gv=L.v), NotImplementedError, "gv: expected None or False, got Tensor"),
    "reverse": (lambda: ops.fused_recurrent_simple_gla(*L.qkv, reverse=True), NotImplementedError, "reverse: expected None or False, got True"),
    "context parallel": (lambda: ops.chunk_kda(*L.qkv, L.gk, L.beta, cp_context=L), NotImplementedError, "cp_context.* got Layer"),
    "states between": (
        lambda: ops.chunk_kda(*L.qkv, L.gk, L.beta, return_intermediate_states=True),
        NotImplementedError,
        "return_intermediate_states",
    ),
    "graph": (lambda: ops.chunk_kda(*L.qkv, L.gk, L.beta, use_graph=True), NotImplementedError, "use_graph"),
    "head first": (lambda: ops.chunk_simple_gla(*L.qkv, head_first=True), NotImplementedError, "head_first: expected False, got True"),
    "unknown": (lambda: ops.chunk_gated_delta_rule(*GDN, flavour=1), TypeError, "expected no argument 'flavour'"),
    "chunks": (lambda: ops.chunk_gated_delta_rule(*GDN, chunk_size=48), ValueError, "a power of two, got 48"),
    "both gates": (lambda: ops.chunk_simple_gla(*L.qkv, g=L.g, g_gamma=L.a_log), ValueError, "one of them, or neither, got both"),
    "no rates": (lambda: ops.chunk_gated_delta_rule(*GDN, use_gate_in_kernel=True), ValueError, "g and A_log, and no gk, got g"),
    "no rates of channels": (lambda: ops.chunk_kda(*L.qkv, L.gk, L.beta, use_gate_in_kernel=True), ValueError, "without lower_bound, got None"),
    "bound": (lambda: ops.chunk_kda(*L.qkv, L.gk, L.beta, use_gate_in_kernel=True, lower_bound=1.0), ValueError, "below 0, got 1.0"),
    "no bound": (
        lambda: ops.chunk_kda(*L.qkv, L.gk, L.beta, use_gate_in_kernel=True, safe_gate=True, A_log=L.a_log),
        ValueError,
        "lower_bound: expected",
    ),
    "negative": (lambda: ops.chunk_gated_delta_rule(*GDN, allow_neg_eigval=True), ValueError, "use_beta_sigmoid_in_kernel, got True"),
    "batch": (lambda: ops.chunk_gated_delta_rule(*GDN, cu_seqlens=torch.tensor([0, 19])), ValueError, "a batch of 1 with cu_seqlens, got 2"),
    "starts": (lambda: ops.chunk_simple_gla(*(x[:1] for x in L.qkv), cu_seqlens=torch.tensor([0, 18])), ValueError, r"from 0 to 19, got \[0, 18\]"),
    "gradient": (lambda: ops.chunk_gated_delta_rule(*L.qkv, L.g, L.beta.clone().requires_grad_()), NotImplementedError, "no backward pass"),
    "wide heads": (lambda: ops.chunk_simple_gla(*(torch.randn(1, 2, 1, 512) for _ in "qkv")), RuntimeError, "512"),
}


@pytest.mark.parametrize("types", [(torch.float32, torch.float32, torch.float16), (torch.float16, torch.bfloat16, torch.bfloat16)], ids=str)
def test_types_may_differ_and_the_output_has_that_of_v(types):
    layer = Layer()
    q, k, v = (x.to(dtype) for x, dtype in zip(layer.qkv, types))
    out, _ = ops.fused_recurrent_gated_delta_rule(q, k, v, layer.g, beta=layer.beta, use_qk_l2norm_in_kernel=True)
    expected, _ = ops.fused_recurrent_gated_delta_rule(q.float(), k.float(), v.float(), layer.g, beta=layer.beta, use_qk_l2norm_in_kernel=True)
    assert torch.equal(out, expected.to(v.dtype))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        call()


def test_threads_have_plans_of_their_own():
    from concurrent.futures import ThreadPoolExecutor

    layers = [Layer(t=5 + i) for i in range(4)]

    def run(layer):
        for _ in range(20):
            out, _ = ops.chunk_gated_delta_rule(*layer.qkv, layer.g, beta=layer.beta, use_qk_l2norm_in_kernel=True)
        return out

    with ThreadPoolExecutor(4) as pool:
        for layer, out in zip(layers, pool.map(run, layers)):
            near(out, recurrence(*layer.qkv, layer.g, layer.beta, norm=True)[0], FLOAT)
