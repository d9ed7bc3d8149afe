"""Layers with a state in vLLM, against its stand-in: steps of every kind over pages of bytes, with outputs held to float64 over all tokens of a request."""

import importlib

import pytest

torch = pytest.importorskip("torch")
from recurrent_reference import recurrence  # noqa: E402
from torch.nn.functional import linear, silu, softplus  # noqa: E402
from vllm_state_runner import Runner  # noqa: E402

LAYERS = "vllm.model_executor.layers.mamba"


def layer_class(name):
    modules = {"QwenGatedDeltaNetAttention": "gdn.qwen_gdn_linear_attn", "KimiGatedDeltaNetAttention": "gdn.kimi_gdn_linear_attn"}
    modules.update(MambaMixer2="mamba_mixer2", MambaMixer="mamba_mixer", ShortConv="short_conv")
    return getattr(importlib.import_module(f"{LAYERS}.{modules[name]}"), name)


def convolved(x, linear_of, activation=silu):
    """[tokens, dim] in float64."""
    weight = linear_of.weight.double().flatten(1)
    padded = torch.cat([x.new_zeros(weight.shape[1] - 1, x.shape[1]), x])
    y = sum(padded[i : i + len(x)] * weight[:, i] for i in range(weight.shape[1]))
    return activation(y if linear_of.bias is None else y + linear_of.bias.double())


def heads(x, count):
    return x.unflatten(-1, (count, -1))[None]


def qwen(layer, rows):
    keys, values = layer.num_k_heads * layer.head_k_dim, layer.num_v_heads * layer.head_v_dim
    qkv, b, a = rows.split([layer.conv_dim, layer.num_v_heads, layer.num_v_heads], -1)
    q, k, v = convolved(qkv, layer.conv1d).split([keys, keys, values], -1)
    g = -layer.A_log.double().exp() * softplus(a + layer.dt_bias.double())
    return recurrence(heads(q, layer.num_k_heads), heads(k, layer.num_k_heads), heads(v, layer.num_v_heads), g[None], b.sigmoid()[None], norm=True)[
        0
    ][0]


def kimi(layer, rows):
    count, dim = layer.local_num_heads, layer.local_projection_size
    qkv, beta, gate, out_gate = rows.split([3 * dim, count, dim, dim], -1)
    q, k, v = (heads(x, count) for x in convolved(qkv, layer.conv1d).split(dim, -1))
    rate, x = layer.A_log.double().exp()[:, None], heads(gate + layer.dt_bias.double(), count)
    g = -rate * softplus(x) if layer.gate_lower_bound is None else layer.gate_lower_bound * torch.sigmoid(rate * x)
    return recurrence(q, k, v, g, beta.sigmoid()[None], norm=True)[0][0] * heads(out_gate, count)[0].sigmoid()


def mixer2(layer, rows):
    groups = layer.n_groups * layer.ssm_state_size
    _, xbc, dt = rows.split([layer.tped_intermediate_size, layer.tped_conv_size, layer.tped_dt_size], -1)
    x, B, C = convolved(xbc, layer.conv1d).split([layer.tped_intermediate_size, groups, groups], -1)
    step, x = softplus(dt + layer.dt_bias.double()), heads(x, layer.num_heads)
    out, _ = recurrence(heads(C, layer.n_groups), heads(B, layer.n_groups), x * step[None, ..., None], (layer.A.double() * step)[None], scale=1.0)
    return (out + layer.D.double()[:, None] * x)[0].flatten(1)


def mixer1(layer, rows):
    x, gate = linear(rows, layer.in_proj.weight.double()).chunk(2, -1)
    x = convolved(x, layer.conv1d)
    state = [layer.rank, layer.ssm_state_size, layer.ssm_state_size]
    dt, B, C = linear(x, layer.x_proj.weight.double()).split(state, -1)
    step = softplus(linear(dt, layer.dt_proj.weight.double(), layer.dt_proj.bias.double()))
    g = (layer.A.double() * step[..., None])[None]
    out, _ = recurrence(C[None, :, None], B[None, :, None], (x * step)[None, ..., None], g, scale=1.0)
    return linear((out[0, ..., 0] + layer.D.double() * x) * silu(gate), layer.out_proj.weight.double())


def short_conv(layer, rows):
    B, C, x = linear(rows, layer.in_proj.weight.double()).chunk(3, -1)
    return linear(C * convolved(B * x, layer.conv, lambda y: y), layer.out_proj.weight.double())


CASES = {
    "gdn": ("QwenGatedDeltaNetAttention", qwen, {}),
    "kda": ("KimiGatedDeltaNetAttention", kimi, {}),
    "kda with a lower bound": ("KimiGatedDeltaNetAttention", kimi, dict(gate_lower_bound=-5.0)),
    "mamba2": ("MambaMixer2", mixer2, {}),
    "mamba1": ("MambaMixer", mixer1, {}),
    "short_conv": ("ShortConv", short_conv, {}),
}


def runner_of(case, more=None, **options):
    name, reference, given = CASES[case]
    return Runner(lambda prefix: layer_class(name)(prefix, **given, **(more or {})), reference, **options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", ["none", "align"])
def test_steps(states, device, case, mode):
    runner = runner_of(case, device=device, mode=mode)
    a, b, c, d = (runner.request(n) for n in (40, 100, 90, 12))
    runner.step([(a, 16), (b, 7)])  # prompts, one of them cut
    runner.step([(a, 1), (b, 9), (c, 80)], pad=5)  # a token, a prompt's rest, a new prompt
    runner.step([(x, 1) for x in (c, a, b)])
    runner.release(b)  # preempted: its slot is another's, and it begins again
    runner.step([(d, 1), (a, 1)], pad=3)
    runner.step([(b, 48 if mode == "align" else 70), (d, 5), (c, 1)])
    for _ in range(4):
        runner.step([(x, 1) for x in (b, d, a, c)])


@pytest.mark.parametrize("case", ["gdn", "mamba2", "short_conv"])
def test_rounded_types(states, device, case):
    more = {} if case == "short_conv" else dict(state_dtype=torch.bfloat16)
    runner = runner_of(case, more, device=device, dtype=torch.bfloat16)
    a, b = runner.request(70), runner.request(30)
    runner.step([(a, 64), (b, 20)], tolerance=0.05)
    for _ in range(4):
        runner.step([(b, 1), (a, 1)], tolerance=0.05)


def test_weights_that_change_are_read_again(states):
    runner = runner_of("mamba2")
    a = runner.request(20)
    runner.step([(a, 5)])
    runner.release(a)
    for layer in runner.layers:
        layer.A.data.mul_(2)  # as weight loaders write, which autograd does not count
        layer.dt_bias.data = torch.randn_like(layer.dt_bias)
        layer.conv1d.weight.data.add_(0.5)
    runner.step([(a, 5)])


def test_weights_that_vllm_packs(states):
    """On CPUs vLLM has kernels whose weights are in an order of their own, beside which it keeps them."""
    runner = runner_of("gdn")
    for layer in runner.layers:
        layer.conv1d._cpu_unpacked_conv_weight = layer.conv1d.weight.flatten(1).clone()
        layer.conv1d.weight.data = torch.full_like(layer.conv1d.weight, float("nan")).view(-1, 1, 4).flip(0)
    a, reference = runner.request(9), runner.reference

    def unpacked(layer, rows):
        layer.conv1d.weight.data = layer.conv1d._cpu_unpacked_conv_weight.unsqueeze(1)
        return reference(layer, rows)

    runner.reference = unpacked
    runner.step([(a, 9)])


def test_a_warm_up_computes_nothing(states):
    runner = runner_of("gdn")
    metadata = runner.builder.build(common_prefix_len=0, common_attn_metadata=runner.common([1, 1, 2], [1, 1, 2], [[0]] * 3, 4))
    before = runner.memory.clone()
    for layer in runner.layers:
        assert not runner.forward(layer, runner.inputs(layer, 4), metadata).any()
    assert torch.equal(before, runner.memory)


def test_the_backend_of_the_settings(states):
    runner = runner_of("mamba2", settings={"backend": "cpu_generic"})
    plans = runner.builder.plans[runner.layers[0].kind]
    assert all(str(plan).startswith("cpu_generic (") for plan in plans)
    a = runner.request(9)
    runner.step([(a, 9)])
    other = runner_of("mamba2", settings={"backend": "FLASH_ATTN"})  # of attention: layers with a state have none of that name
    assert not str(other.builder.plans[other.layers[0].kind].conv).startswith("FLASH")


def test_the_log_says_what_runs(states, caplog):
    caplog.set_level("INFO")
    runner_of("gdn", settings={"backend": "cpu_generic"})
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("imbrex")]
    assert ": 2 layers from layers.0 on: cpu_generic (" in line and "runs short_conv d192 w4 f32 plain silu; cpu_generic (" in line
    assert "runs recurrent q2 v4 k16 v32 softplus delta" in line


def test_nothing_is_replaced_unless_it_is_asked_for(vllm, monkeypatch):
    import imbrex.vllm
    from vllm.model_executor.custom_op import op_registry_oot

    imbrex.vllm.register()
    assert not op_registry_oot
    monkeypatch.setenv("IMBREX_VLLM_STATES", "yes")
    with pytest.raises(ValueError, match="IMBREX_VLLM_STATES: expected 0 or 1, got 'yes'"):
        imbrex.vllm.register()
    monkeypatch.setenv("IMBREX_VLLM_STATES", "1")
    imbrex.vllm.register()
    imbrex.vllm.register()
    assert {name for name in op_registry_oot} == {name for name, _, _ in CASES.values()}


def test_refusals(states, monkeypatch):
    with pytest.raises(NotImplementedError, match="dual batch overlap"):
        runner_of("gdn", ubatching=True)
    with pytest.raises(NotImplementedError, match="expected states of convolutions of the model's type f32, got bf16"):
        runner_of("gdn", dict(conv_dtype=torch.bfloat16))
    with monkeypatch.context() as patch, pytest.raises(NotImplementedError, match="channels last .VLLM_SSM_CONV_STATE_LAYOUT=SD., got DS"):
        patch.setattr("vllm.model_executor.layers.mamba.mamba_utils.layout", "DS")
        runner_of("mamba2")
    monkeypatch.setattr(layer_class("MambaMixer2"), "use_replayssm", True)
    with pytest.raises(NotImplementedError, match="use_replayssm to be off, got on"):
        runner_of("mamba2")
