"""The short convolution beside its definition in NumPy and PyTorch."""
import numpy as np
import pytest

import imbrex


def int32(*values):
    return np.array(values, np.int32)


def by_definition(bcx, weight, bias, history):
    """Outputs and all of h, history first; float64."""
    b, c, x = np.split(bcx.astype(np.float64), 3, 1)
    h = np.concatenate([history, (b * x).astype(np.float32)])
    width = weight.shape[1]
    sums = sum(weight[:, i].astype(np.float64) * h[i : i + len(x)] for i in range(width))
    return c * (sums + (0 if bias is None else bias)), h


@pytest.mark.parametrize("width, with_bias", [(3, False), (4, True)])
def test_prompts_and_decode(width, with_bias):
    rng = np.random.default_rng(width)
    spec = imbrex.ShortConvSpec(40, width=width, bias=with_bias, dtype="f32")
    plan = imbrex.ShortConvPlan(spec, max_num_tokens=64)
    weight = rng.standard_normal((40, width), np.float32)
    bias = rng.standard_normal(40, np.float32) if with_bias else None
    tokens = [rng.standard_normal((n, 120), np.float32) for n in (9, 5)]
    expected = [by_definition(t, weight, bias, np.zeros((width - 1, 40))) for t in tokens]
    state = np.full((3, spec.state_rows, 40), np.nan, np.float32)

    plan.update(int32(0, 6, 8), int32(6, 2), int32(2, 0))
    out = plan.run(np.concatenate([tokens[0][:6], tokens[1][:2]]), weight, state, bias=bias)
    np.testing.assert_allclose(out[:6], expected[0][0][:6], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out[6:], expected[1][0][:2], rtol=1e-5, atol=1e-5)
    plan.update(int32(0, 3, 6), int32(9, 5), int32(2, 0))
    out = plan.run(np.concatenate([tokens[0][6:], tokens[1][2:]]), weight, state, bias=bias)
    np.testing.assert_allclose(out, np.concatenate([expected[0][0][6:], expected[1][0][2:]]), rtol=1e-5, atol=1e-5)
    for slot, (_, h) in ((2, expected[0]), (0, expected[1])):
        np.testing.assert_array_equal(state[slot], h[1 - width :].astype(np.float32))
    assert np.isnan(state[1]).all()
    assert "2 requests" in str(plan)


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_plain_form(activation):
    """As causal_conv1d: x is a part of a wider projection, and comes in two steps."""
    rng = np.random.default_rng(7)
    spec = imbrex.ShortConvSpec(24, width=4, bias=True, dtype="f32", form="plain", activation=activation)
    assert (spec.form, spec.activation) == ("plain", activation)
    plan = imbrex.ShortConvPlan(spec, max_num_tokens=64)
    weight, bias = rng.standard_normal((24, 4), np.float32), rng.standard_normal(24, np.float32)
    projection = rng.standard_normal((11, 80), np.float32)
    x = projection[:, 16:40]
    h = np.concatenate([np.zeros((3, 24)), x.astype(np.float64)])
    expected = bias + sum(weight[:, i].astype(np.float64) * h[i : i + 11] for i in range(4))
    if activation == "silu":
        expected = expected / (1 + np.exp(-expected))
    state = np.full((2, spec.state_rows, 24), np.nan, np.float32)
    parts = []
    for begin, end in ((0, 2), (2, 11)):
        plan.update(int32(0, end - begin), int32(end), int32(1))
        parts.append(plan.run(x[begin:end], weight, state, bias=bias))
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(state[1], x[-3:])
    assert np.isnan(state[0]).all()
    out = plan.run(x[2:], weight, state.copy(), bias=bias, out=projection[2:, 40:64])  # beside x, in the same rows
    assert out.shape == (9, 24)
    with pytest.raises(imbrex.Error) as error:
        plan.run(x[2:], weight, state, bias=bias, out=x[2:])
    assert error.value.code == "python.overlap"


def test_tensors_of_pytorch():
    torch = pytest.importorskip("torch")
    torch.manual_seed(1)
    spec = imbrex.ShortConvSpec(64)
    plan = imbrex.ShortConvPlan(spec)
    bcx, weight = torch.randn(7, 192).bfloat16(), torch.randn(64, 3).bfloat16()
    state = torch.zeros(2, spec.state_rows, 64, dtype=torch.bfloat16)
    plan.update(int32(0, 7), int32(7), int32(1))
    out = plan.run(bcx, weight, state)
    b, c, x = bcx.split(64, 1)
    h = (b * x).float()
    padded = torch.nn.functional.pad(h.t()[None], (2, 0))
    expected = c.float() * torch.nn.functional.conv1d(padded, weight.float()[:, None], groups=64)[0].t()
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    assert out.dtype == torch.bfloat16 and torch.equal(state[1].float(), h[-2:]) and not state[0].any()
    with pytest.raises(NotImplementedError, match="backward"):
        plan.run(bcx.float().requires_grad_(), weight, state)


def test_drafts_that_are_taken_back():
    rng = np.random.default_rng(5)
    spec = imbrex.ShortConvSpec(16, dtype="f32", num_drafts=3)
    plan = imbrex.ShortConvPlan(spec)
    weight, tokens = rng.standard_normal((16, 3), np.float32), rng.standard_normal((6, 48), np.float32)
    expected, _ = by_definition(tokens, weight, None, np.zeros((2, 16)))
    state = np.zeros((1, spec.state_rows, 16), np.float32)
    wrong = rng.standard_normal((2, 48), np.float32)
    plan.update(int32(0, 4), int32(4), int32(0), num_drafts=int32(3), accepted_drafts=int32(0))
    plan.run(np.concatenate([tokens[:2], wrong]), weight, state)  # one draft of three is kept
    plan.update(int32(0, 4), int32(6), int32(0), num_drafts=int32(0), accepted_drafts=int32(1))
    out = plan.run(tokens[2:], weight, state)
    np.testing.assert_allclose(out, expected[2:], rtol=1e-5, atol=1e-5)


def test_trees_of_drafts_and_sources():
    rng = np.random.default_rng(8)
    spec = imbrex.ShortConvSpec(16, dtype="f32", num_drafts=3, tree_drafts=True)
    plan = imbrex.ShortConvPlan(spec)
    weight, tokens = rng.standard_normal((16, 3), np.float32), rng.standard_normal((5, 48), np.float32)
    assert spec.state_rows == 8
    state = np.zeros((2, spec.state_rows, 16), np.float32)
    plan.update(int32(0, 4), int32(4), int32(0), num_drafts=int32(3), draft_parents=int32(-1, 0, 0, 2))
    out = plan.run(tokens[:4], weight, state)
    for path in ([0, 1], [0, 2, 3]):
        expected, _ = by_definition(tokens[path], weight, None, np.zeros((2, 16)))
        np.testing.assert_allclose(out[path], expected, rtol=1e-5, atol=1e-5)
    plan.update(int32(0, 1), int32(4), int32(1), accepted_drafts=int32(3), source_slots=int32(0))
    expected, _ = by_definition(tokens[[0, 2, 3, 4]], weight, None, np.zeros((2, 16)))
    np.testing.assert_allclose(plan.run(tokens[4:], weight, state), expected[3:], rtol=1e-5, atol=1e-5)


def test_what_is_refused():
    with pytest.raises(imbrex.Error) as error:
        imbrex.ShortConvSpec(8, width=1)
    assert error.value.code == "short_conv.width"
    for arguments, code in (({"form": "round"}, "short_conv.form"), ({"activation": "silu"}, "short_conv.activation")):
        with pytest.raises(imbrex.Error) as error:
            imbrex.ShortConvSpec(8, **arguments)
        assert error.value.code == code
    spec = imbrex.ShortConvSpec(8, dtype="f32")
    plan = imbrex.ShortConvPlan(spec)
    with pytest.raises(imbrex.Error) as error:
        plan.update(int32(0, 1, 2), int32(1, 1), int32(3, 3))
    assert error.value.code == "batch.state.shared"
    plan.update(int32(0, 1), int32(1), int32(3))
    bcx, weight = np.ones((1, 24), np.float32), np.ones((8, 3), np.float32)
    for state, code in ((np.zeros((3, 2, 8), np.float32), "short_conv.run.tensor"), (bcx, "short_conv.run.tensor")):
        with pytest.raises(imbrex.Error) as error:
            plan.run(bcx, weight, state.copy())
        assert error.value.code == code
    with pytest.raises(imbrex.Error) as error:  # lengths are on the host, of a CPU
        plan.update_on_device(int32(0, 1), int32(1), int32(3))
    assert error.value.code == "update.on_device"
    assert plan.device_problems() == []
    whole = np.zeros((4, 2, 8), np.float32)
    with pytest.raises(imbrex.Error) as error:
        plan.run(bcx, weight, whole, out=whole[3, :1])
    assert error.value.code == "python.overlap"


def test_one_workspace_for_all_layers():
    shared = imbrex.Workspace("cpu")
    attention = imbrex.Plan(imbrex.AttentionSpec(4, 2, 64), workspace=shared)
    plan = imbrex.ShortConvPlan(imbrex.ShortConvSpec(8, dtype="f32"), workspace=shared)
    plan.update(int32(0, 1), int32(1), int32(0))
    assert plan.run(np.ones((1, 24), np.float32), np.ones((8, 3), np.float32), np.zeros((1, 2, 8), np.float32)).tolist() == [[1.0] * 8]
    assert shared.nbytes == 0 and str(attention)


def test_selection():
    spec = imbrex.ShortConvSpec(2048, bias=True)
    assert spec == imbrex.ShortConvSpec(2048, bias=True) and spec != imbrex.ShortConvSpec(2048) and spec.state_bytes == 2 * 2048 * 2
    chosen = imbrex.select(spec, "avx512,4 threads")
    assert chosen.backend == "cpu_avx512" and chosen.candidates[-1][0] == "reference"
    assert imbrex.select(spec, "h200").backend == "cuda_sm80"
    assert "cpu_generic" in imbrex.explain(spec, "cpu", forced="cpu_generic").splitlines()[0]


@pytest.mark.parametrize("on_device", [False, True])
def test_on_a_gpu(on_device):
    """Steps from host lengths or device lengths, on a stream that is not the default one, beside the CPU; the second one in a graph."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    rng = np.random.default_rng(3)
    spec = imbrex.ShortConvSpec(96, dtype="f32", bias=True)
    plan, cpu = imbrex.ShortConvPlan(spec, "cuda:0", on_device=on_device), imbrex.ShortConvPlan(spec)
    weight, bias = rng.standard_normal((96, 3), np.float32), rng.standard_normal(96, np.float32)
    state = np.full((4, 2, 96), np.nan, np.float32)
    to = lambda x: torch.from_numpy(x).cuda()  # noqa: E731
    w, b, s, stream = to(weight), to(bias), to(state), torch.cuda.Stream()
    x, out = torch.empty(8, 288, device="cuda"), torch.empty(8, 96, device="cuda")
    steps = [(int32(0, 5, 8), int32(5, 3), int32(3, 1)), (int32(0, 1, 2), int32(6, 4), int32(3, 1)), (int32(0, 2, 5), int32(8, 7), int32(3, 1))]
    where = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (3, 2, 2)]
    graph = torch.cuda.CUDAGraph()

    def call():
        if on_device:
            plan.update_on_device(*where, max_num_tokens=8)
        plan.run(x, w, s, bias=b, out=out)

    with torch.cuda.stream(stream):
        for i, step in enumerate(steps):
            tokens = rng.standard_normal((step[0][-1], 288), np.float32)
            x[: len(tokens)].copy_(torch.from_numpy(tokens))
            for array, values in zip(where, step):
                array.copy_(torch.from_numpy(values))
            if not on_device:
                plan.update(*step)
            if i == 1:
                with torch.cuda.graph(graph, stream=stream):
                    call()
            call() if i == 0 else graph.replay()
            cpu.update(*step)
            expected = cpu.run(tokens, weight, state, bias=bias)
            stream.synchronize()
            np.testing.assert_allclose(out[: len(tokens)].cpu().numpy(), expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(s.cpu().numpy()[[1, 3]], state[[1, 3]])
    assert plan.capturable and (not on_device or plan.device_problems() == [])
    if on_device:
        where[2].fill_(1)  # one slot for two
        plan.update_on_device(*where, max_num_tokens=8)
        assert [reason.code for reason in plan.device_problems()] == ["batch.state.shared"]
