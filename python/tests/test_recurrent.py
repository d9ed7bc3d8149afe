"""Recurrent layers beside their definition in NumPy."""
import numpy as np
import pytest

import imbrex


def int32(*values):
    return np.array(values, np.int32)


def softplus(x):
    return np.log1p(np.exp(x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gated_delta_net(t, state=None):
    """Outputs and the state, [heads, dim_k, dim_v], of a request's tokens; float64. Two value heads share a key head."""
    t = {name: array.astype(np.float64) for name, array in t.items()}
    tokens, heads, dim_v = t["v"].shape
    dim_k = t["q"].shape[2]
    s = np.zeros((heads, dim_k, dim_v)) if state is None else state.copy()
    norm = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)  # noqa: E731
    q, k = (norm(t[name]).repeat(heads // t[name].shape[1], 1) for name in ("q", "k"))
    out = np.empty((tokens, heads, dim_v))
    for i in range(tokens):
        s *= np.exp(-np.exp(t["rates"]) * softplus(t["gate"][i] + t["gate_bias"]))[:, None, None]
        u = sigmoid(t["beta"][i])[:, None] * (t["v"][i] - np.einsum("hkv,hk->hv", s, k[i]))
        s += k[i][:, :, None] * u[:, None, :]
        out[i] = np.einsum("hkv,hk->hv", s, q[i]) / np.sqrt(dim_k)
    return out, s


def tensors(rng, tokens, k_heads=2, v_heads=4, dim_k=16, dim_v=24):
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    return {
        "q": normal(tokens, k_heads, dim_k),
        "k": normal(tokens, k_heads, dim_k),
        "v": normal(tokens, v_heads, dim_v),
        "gate": normal(tokens, v_heads),
        "beta": normal(tokens, v_heads),
    }


PER_TOKEN = ("q", "k", "v", "gate", "beta")


def gdn(**more):
    return imbrex.RecurrentSpec(2, 4, 16, 24, delta=True, sigmoid_beta=True, qk_norm=True, dtype="f32", **more)


@pytest.mark.parametrize("order", ["before_gate", "after_gate"])
@pytest.mark.parametrize("groups", [0, 2])
def test_norm_and_gate_of_outputs(order, groups):
    rng = np.random.default_rng(3)
    arrays, parameters = tensors(rng, 7), {"rates": np.zeros(4, np.float32), "gate_bias": np.zeros(4, np.float32)}
    projection = rng.standard_normal((7, 5 + 4 * 24), np.float32)  # z is a part of wider rows
    z, weight = projection[:, 5:].reshape(7, 4, 24), rng.standard_normal((4, 24), np.float32)
    plan = imbrex.RecurrentPlan(gdn(out_gate="silu", out_norm=order, norm_groups=groups, norm_eps=1e-3))
    plan.update(int32(0, 7), int32(7), int32(0))
    q, k, v = (arrays.pop(name) for name in ("q", "k", "v"))
    out = plan.run(q, k, v, np.zeros((1, *plan.spec.state_shape), np.float32), **arrays, **parameters, z=z, norm_weight=weight)
    y, _ = gated_delta_net({"q": q, "k": k, "v": v, **arrays, **parameters})
    gate = z * sigmoid(z.astype(np.float64))
    x = y * gate if order == "after_gate" else y
    of_groups = x.reshape(7, groups or 4, -1)
    x = (of_groups / np.sqrt((of_groups**2).mean(-1, keepdims=True) + 1e-3)).reshape(y.shape) * weight
    np.testing.assert_allclose(out, x if order == "after_gate" else x * gate, atol=1e-5)


def test_convolution_in_front():
    rng = np.random.default_rng(4)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    spec = gdn(conv="qkv", conv_width=3, conv_bias=True)
    channels = 2 * 2 * 16 + 4 * 24
    assert spec.conv_state_shape == (2, channels)
    projection, weight, bias = normal(7, channels + 9), normal(channels, 3), normal(channels)
    gate, beta, zeros = normal(7, 4), normal(7, 4), np.zeros(4, np.float32)
    conv_state, state = np.full((2, *spec.conv_state_shape), np.nan, np.float32), np.zeros((2, *spec.state_shape), np.float32)
    plan, out = imbrex.RecurrentPlan(spec), []
    for begin, end in ((0, 5), (5, 7)):
        plan.update(int32(0, end - begin), int32(end), int32(1))
        rows = slice(begin, end)
        x = projection[rows, :channels]
        out.append(plan.run_convolved(x, weight, conv_state, state, conv_bias=bias, gate=gate[rows], beta=beta[rows], rates=zeros, gate_bias=zeros))
    padded = np.concatenate([np.zeros((2, channels)), projection[:, :channels]])
    sums = bias + sum(padded[i : i + 7] * weight[:, i] for i in range(3))
    q, k, v = np.split(sums * sigmoid(sums), [32, 64], axis=1)
    expected, _ = gated_delta_net(
        {"q": q.reshape(7, 2, 16), "k": k.reshape(7, 2, 16), "v": v.reshape(7, 4, 24), "gate": gate, "beta": beta, "rates": zeros, "gate_bias": zeros}
    )
    np.testing.assert_allclose(np.concatenate(out), expected, atol=1e-5)
    np.testing.assert_array_equal(conv_state[1], projection[5:, :channels])
    with pytest.raises(imbrex.Error, match="q: not used by the spec"):
        plan.run(*(np.zeros((2, h, d), np.float32) for h, d in ((2, 16), (2, 16), (4, 24))), state, gate=gate[:2], beta=beta[:2], rates=zeros)


@pytest.mark.parametrize("layout", ["k_first", "v_first"])
def test_prompts_and_decode(layout):
    rng = np.random.default_rng(1)
    spec = gdn(layout=layout)
    plan = imbrex.RecurrentPlan(spec, max_num_tokens=64)
    parameters = {"rates": rng.standard_normal(4, np.float32), "gate_bias": rng.standard_normal(4, np.float32)}
    requests = [tensors(rng, n) for n in (9, 5)]
    expected = [gated_delta_net({**t, **parameters}) for t in requests]
    state = np.full((3, *spec.state_shape), np.nan, np.float32)

    def step(*parts):
        return plan.run(
            *(np.concatenate([t[name][a:b] for t, a, b in parts]) for name in PER_TOKEN[:3]),
            state,
            gate=np.concatenate([t["gate"][a:b] for t, a, b in parts]),
            beta=np.concatenate([t["beta"][a:b] for t, a, b in parts]),
            **parameters,
        )

    plan.update(int32(0, 6, 8), int32(6, 2), int32(2, 0))
    out = step((requests[0], 0, 6), (requests[1], 0, 2))
    np.testing.assert_allclose(out[:6], expected[0][0][:6], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(out[6:], expected[1][0][:2], rtol=1e-4, atol=1e-5)
    plan.update(int32(0, 3, 6), int32(9, 5), int32(2, 0))
    out = step((requests[0], 6, 9), (requests[1], 2, 5))
    np.testing.assert_allclose(out, np.concatenate([expected[0][0][6:], expected[1][0][2:]]), rtol=1e-4, atol=1e-5)
    for slot, (_, s) in ((2, expected[0]), (0, expected[1])):
        np.testing.assert_allclose(state[slot, 0], s if layout == "k_first" else s.swapaxes(1, 2), rtol=1e-4, atol=1e-5)
    assert np.isnan(state[1]).all()
    assert "2 requests" in str(plan)


def test_mamba1_and_lightning_attention():
    rng = np.random.default_rng(2)
    channels, tokens, dim_k = 40, 7, 16
    mamba = imbrex.RecurrentSpec(1, channels, dim_k, 1, channel_rates=True, scaled_values=True, skip=True, scale=1.0, dtype="f32")
    c, b = rng.standard_normal((2, tokens, 1, dim_k), np.float32)
    x, dt = rng.standard_normal((2, tokens, channels), np.float32)
    a_log, d = rng.standard_normal((channels, dim_k), np.float32), rng.standard_normal(channels, np.float32)
    plan = imbrex.RecurrentPlan(mamba)
    plan.update(int32(0, tokens), int32(tokens), int32(0))
    out = plan.run(c, b, x[:, :, None], np.zeros((1, *mamba.state_shape), np.float32), gate=dt, rates=a_log, skip=d)
    h = np.zeros((channels, dim_k))
    for i in range(tokens):
        step = softplus(dt[i].astype(np.float64))[:, None]
        h = np.exp(-np.exp(a_log.astype(np.float64)) * step) * h + step * x[i][:, None] * b[i]
        np.testing.assert_allclose(out[i, :, 0], h @ c[i, 0] + d * x[i], rtol=1e-4, atol=1e-5)

    lightning = imbrex.RecurrentSpec(2, 2, 8, 8, gate="fixed", scale=1.0, dtype="f32")
    q, k, v = rng.standard_normal((3, tokens, 2, 8), np.float32)
    slopes = np.array([0.5, 0.25], np.float32)
    plan = imbrex.RecurrentPlan(lightning)
    plan.update(int32(0, tokens), int32(tokens), int32(0))
    out = plan.run(q, k, v, np.zeros((1, *lightning.state_shape), np.float32), rates=slopes)
    s = np.zeros((2, 8, 8))
    for i in range(tokens):
        s = np.exp(-slopes)[:, None, None] * s + k[i][:, :, None] * v[i][:, None, :]
        np.testing.assert_allclose(out[i], np.einsum("hkv,hk->hv", s, q[i]), rtol=1e-4, atol=1e-4)


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    spec = imbrex.RecurrentSpec(2, 4, 16, 24, delta=True, sigmoid_beta=True, qk_norm=True)
    plan = imbrex.RecurrentPlan(spec)
    given = {name: torch.from_numpy(array).bfloat16() for name, array in tensors(rng, 6).items()}
    parameters = {"rates": torch.zeros(4), "gate_bias": torch.zeros(4)}
    state = torch.zeros(2, *spec.state_shape)
    plan.update(int32(0, 6), int32(6), int32(1))
    out = plan.run(given["q"], given["k"], given["v"], state, gate=given["gate"], beta=given["beta"], **parameters)
    expected, _ = gated_delta_net({name: array.float().numpy() for name, array in {**given, **parameters}.items()})
    assert out.dtype == torch.bfloat16 and not state[0].any() and state[1].any()
    torch.testing.assert_close(out.float(), torch.from_numpy(expected).float(), rtol=2e-2, atol=2e-2)
    with pytest.raises(NotImplementedError, match="backward"):
        plan.run(given["q"].float().requires_grad_(), given["k"], given["v"], state, gate=given["gate"], beta=given["beta"], **parameters)


def test_drafts_that_are_taken_back():
    rng = np.random.default_rng(5)
    spec = gdn(num_drafts=3)
    plan = imbrex.RecurrentPlan(spec)
    parameters = {"rates": rng.standard_normal(4, np.float32), "gate_bias": rng.standard_normal(4, np.float32)}
    right, wrong = tensors(rng, 6), tensors(rng, 2)
    expected, _ = gated_delta_net({**right, **parameters})
    state = np.zeros((1, *spec.state_shape), np.float32)
    assert state.shape == (1, 4, 4, 24, 16)

    def run(t):
        return plan.run(t["q"], t["k"], t["v"], state, gate=t["gate"], beta=t["beta"], **parameters)

    plan.update(int32(0, 4), int32(4), int32(0), num_drafts=int32(3), accepted_drafts=int32(0))
    run({name: np.concatenate([right[name][:2], wrong[name]]) for name in PER_TOKEN})  # one draft of three is kept
    plan.update(int32(0, 4), int32(6), int32(0), num_drafts=int32(0), accepted_drafts=int32(1))
    np.testing.assert_allclose(run({name: right[name][2:] for name in PER_TOKEN}), expected[2:], rtol=1e-4, atol=1e-5)


def test_trees_of_drafts_and_sources():
    rng = np.random.default_rng(7)
    spec = gdn(num_drafts=3, tree_drafts=True)
    plan = imbrex.RecurrentPlan(spec)
    parameters = {"rates": rng.standard_normal(4, np.float32), "gate_bias": rng.standard_normal(4, np.float32)}
    tree = tensors(rng, 5)
    state = np.zeros((3, *spec.state_shape), np.float32)

    def run(t):
        return plan.run(t["q"], t["k"], t["v"], state, gate=t["gate"], beta=t["beta"], **parameters)

    # Drafts 1 and 2 follow the token that is certain, draft 3 follows draft 2. It is kept: the next token goes on from it, in two slots.
    plan.update(int32(0, 4), int32(4), int32(0), num_drafts=int32(3), draft_parents=int32(-1, 0, 0, 2))
    out = run({name: tree[name][:4] for name in PER_TOKEN})
    for path in ([0, 1], [0, 2, 3]):
        expected, _ = gated_delta_net({**{name: tree[name][path] for name in PER_TOKEN}, **parameters})
        np.testing.assert_allclose(out[path], expected, rtol=1e-4, atol=1e-5)
    kept = state[0].copy()
    expected, _ = gated_delta_net({**{name: tree[name][[0, 2, 3, 4]] for name in PER_TOKEN}, **parameters})
    plan.update(int32(0, 1, 2), int32(4, 4), int32(1, 2), accepted_drafts=int32(3, 3), source_slots=int32(0, 0))
    out = run({name: tree[name][[4, 4]] for name in PER_TOKEN})
    np.testing.assert_allclose(out, expected[[3, 3]], rtol=1e-4, atol=1e-5)
    assert np.array_equal(state[0], kept) and np.array_equal(state[1, 0], state[2, 0])
    with pytest.raises(imbrex.Error) as error:
        plan.update(int32(0, 4), int32(4), int32(0), num_drafts=int32(3), draft_parents=int32(-1, 0, 0, 3))
    assert error.value.code == "batch.draft_parents.range"


def test_padding():
    rng = np.random.default_rng(8)
    spec = gdn()
    plan = imbrex.RecurrentPlan(spec)
    parameters = {"rates": rng.standard_normal(4, np.float32), "gate_bias": rng.standard_normal(4, np.float32)}
    t = tensors(rng, 5)
    state = rng.standard_normal((2, *spec.state_shape)).astype(np.float32)
    before = state.copy()
    plan.update(int32(0, 1, 3, 5), int32(7, 2, 9), int32(-1, 1, -1), pad_slot=-1)
    out = plan.run(t["q"], t["k"], t["v"], state, gate=t["gate"], beta=t["beta"], **parameters)
    expected, _ = gated_delta_net({**{name: t[name][1:3] for name in PER_TOKEN}, **parameters})
    np.testing.assert_allclose(out[1:3], expected, rtol=1e-4, atol=1e-5)
    assert not out[[0, 3, 4]].any() and np.array_equal(state[0], before[0]) and not np.array_equal(state[1], before[1])
    with pytest.raises(imbrex.Error) as error:
        plan.update(int32(0, 1, 3, 5), int32(7, 2, 9), int32(-1, 1, -1))
    assert error.value.code == "batch.state.slot"


def test_what_is_refused():
    def code(call):
        with pytest.raises(imbrex.Error) as error:
            call()
        return error.value.code

    assert code(lambda: imbrex.RecurrentSpec(3, 4, 16, 16)) == "recurrent.num_v_heads"
    assert code(lambda: imbrex.RecurrentSpec(1, 1, 16, 16, gate="tanh")) == "python.name"
    assert code(lambda: imbrex.RecurrentSpec(1, 1, 16, 16, layout="any")) == "python.name"
    spec = gdn()
    plan = imbrex.RecurrentPlan(spec)
    assert code(lambda: plan.update(int32(0, 1, 2), int32(1, 1), int32(3, 3))) == "batch.state.shared"
    plan.update(int32(0, 1), int32(1), int32(3))
    t = tensors(np.random.default_rng(6), 1)
    rates, state = np.zeros(4, np.float32), np.zeros((4, *spec.state_shape), np.float32)
    args = (t["q"], t["k"], t["v"])
    rest = {"gate": t["gate"], "beta": t["beta"], "rates": rates}
    assert code(lambda: plan.run(*args, state[:3].copy(), **rest)) == "recurrent.run.tensor"
    assert code(lambda: plan.run(*args, state, gate=t["gate"], rates=rates)) == "recurrent.run.missing"
    assert code(lambda: plan.run(*args, state, **rest, skip=rates)) == "recurrent.run.missing"
    assert code(lambda: plan.run(*args, state, **rest, out=state[0, 0, :, 0][None, :, :1])) in ("recurrent.run.tensor", "python.overlap")
    assert code(lambda: plan.run(*args, state, **rest, out=t["v"])) == "python.overlap"
    assert code(lambda: plan.update_on_device(int32(0, 1), int32(1), int32(3))) == "update.on_device"
    assert plan.device_problems() == [] and not plan.capturable


def test_selection():
    spec = gdn(state_dtype="bf16")
    assert spec == gdn(state_dtype="bf16") and spec != gdn() and spec.state_bytes == 4 * 16 * 24 * 2
    assert (spec.gate, spec.layout, spec.head_dim_v, spec.delta) == ("softplus", "v_first", 24, True)
    chosen = imbrex.select(spec, "avx512,4 threads")
    assert chosen.backend == "cpu_avx512" and chosen.candidates[-1][0] == "reference"
    assert "cpu_generic" in imbrex.explain(spec, "cpu", forced="cpu_generic").splitlines()[0]
    assert imbrex.select(spec, "cpu", forced="gdn").backend in ("cpu_avx512", "cpu_generic")
