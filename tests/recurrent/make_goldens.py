#!/usr/bin/env python3
"""Makes goldens/*.safetensors: what modules of the transformers library (5.24.0, with PyTorch on a CPU) hand to their recurrences in one
forward pass at random weights, what these return, and what the norm and the gate behind them make of that. golden_test.cpp compares the backends with it.

    make_goldens.py FOLDER
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

TOKENS, HIDDEN = 37, 64
torch.manual_seed(18)


def random_module(module):
    """Parameters of which no layer is close to doing nothing."""
    for name, parameter in module.named_parameters():
        with torch.no_grad():
            parameter.normal_(0, 0.5 if parameter.dim() > 1 else 0.7)
    return module.eval()


def captured(namespace, name, call, returns_state):
    """Runs `call` with the function of a modeling file replaced by one that keeps its arguments, and what it returns with a state."""
    original, kept = getattr(namespace, name), {}

    def wrapper(*args, **kwargs):
        kept["args"], kept["kwargs"] = args, kwargs
        kept["out"], kept["state"] = original(*args, **(kwargs | returns_state))
        return original(*args, **kwargs)

    setattr(namespace, name, wrapper)
    try:
        with torch.no_grad():
            call()
    finally:
        setattr(namespace, name, original)
    return kept


def output_of(module):
    """The last output of a module, once it has run."""
    kept = []
    module.register_forward_hook(lambda _, __, out: kept.append(out))
    return kept


def outputs_of(norm, heads):
    """What a gated norm was given last and returned, by heads, once it has run."""
    kept = {}

    def keep(module, args, out):
        shape = (TOKENS, heads, -1)
        weight = module.weight if module.weight.numel() == out.reshape(shape).shape[2] else module.weight.view(heads, -1)
        kept.update(z=args[1].reshape(shape), norm_weight=weight, finished=out.reshape(shape))

    norm.register_forward_hook(keep)
    return kept


def save(folder, name, **tensors):
    save_file({k: v.detach().float().contiguous() for k, v in tensors.items()}, Path(folder) / f"{name}.safetensors")


def hidden():
    return torch.randn(1, TOKENS, HIDDEN)


def qwen3_next(folder):
    import transformers.models.qwen3_next.modeling_qwen3_next as m

    config = m.Qwen3NextConfig(hidden_size=HIDDEN, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24, num_hidden_layers=4)
    layer = random_module(m.Qwen3NextGatedDeltaNet(config, 0))
    raw, split = {}, layer.fix_query_key_value_ordering

    def keep(*args):
        parts = split(*args)
        raw["beta"], raw["gate"] = parts[4][0], parts[5][0]
        return parts

    layer.fix_query_key_value_ordering = keep
    outputs = outputs_of(layer.norm, 4)
    kept = captured(m, "torch_chunk_gated_delta_rule", lambda: layer(hidden()), {"output_final_state": True})
    q, k, v = (x[0] for x in kept["args"])
    save(folder, "qwen3_next", q=q, k=k, v=v, gate=raw["gate"], beta=raw["beta"], rates=layer.A_log, gate_bias=layer.dt_bias, out=kept["out"][0], state=kept["state"][0], **outputs)


def kimi_linear(folder):
    import transformers.models.kimi_linear.modeling_kimi_linear as m

    config = m.KimiLinearConfig(hidden_size=HIDDEN, num_hidden_layers=4)
    config.linear_num_heads, config.linear_head_dim = 3, 16
    layer = random_module(m.KimiLinearDeltaAttention(config, 0))
    gate, beta = output_of(layer.forget_gate.f_b_proj), output_of(layer.b_proj)
    outputs = outputs_of(layer.o_norm, 3)
    kept = captured(m, "chunk_kimi_delta_attention", lambda: layer(hidden()), {"output_final_state": True})
    q, k, v = (x[0] for x in kept["args"])
    save(folder, "kimi_linear", q=q, k=k, v=v, gate=gate[0][0].view(TOKENS, 3, 16), beta=beta[0][0], rates=layer.forget_gate.A_log.view(3), gate_bias=layer.forget_gate.dt_bias.view(3, 16),
         out=kept["out"][0], state=kept["state"][0], **outputs)


def mamba2(folder, name, module, function, config, mixer, limits):
    layer = random_module(getattr(module, mixer)(config, 0))
    outputs = outputs_of(layer.norm, 4)
    kept = captured(module, function, lambda: layer(hidden()), {"return_final_states": True})
    x, dt, _, b, c = (a[0] for a in kept["args"][:5])
    assert tuple(kept["kwargs"].get("dt_limit", (0, float("inf")))) == limits, kept["kwargs"].get("dt_limit")
    save(folder, name, q=c, k=b, v=x, gate=dt, rates=layer.A_log, gate_bias=layer.dt_bias, skip=layer.D, out=kept["out"][0], state=kept["state"][0], **outputs)


def mamba2_models(folder):
    import transformers.models.mamba2.modeling_mamba2 as m
    import transformers.models.nemotron_h.modeling_nemotron_h as n

    config = m.Mamba2Config(hidden_size=HIDDEN, num_heads=4, head_dim=32, state_size=16, n_groups=2, chunk_size=8, expand=2, time_step_limit=(0.3, 1.5))
    mamba2(folder, "mamba2", m, "mamba2_chunk_scan", config, "Mamba2Mixer", (0.3, 1.5))
    config = n.NemotronHConfig(hidden_size=HIDDEN, mamba_num_heads=4, mamba_head_dim=32, ssm_state_size=16, n_groups=2, chunk_size=8)
    mamba2(folder, "nemotron_h", n, "mamba2_chunk_scan", config, "NemotronHMamba2Mixer", (0.001, float("inf")))


def falcon_mamba(folder):
    import transformers.models.falcon_mamba.modeling_falcon_mamba as m

    config = m.FalconMambaConfig(hidden_size=HIDDEN, state_size=16, intermediate_size=40, time_step_rank=8, num_hidden_layers=1)
    m.FalconMambaMixer.init_falcon_mamba_weights = lambda _: None  # in 5.24.0 it asks for norms that are made later
    layer = random_module(m.FalconMambaMixer(config, 0))
    save(folder, "falcon_mamba", **mamba1_tensors(layer, lambda: captured(m, "mamba_selective_scan", lambda: layer(hidden()), {"return_last_state": True, "z": None})))


def mamba1_tensors(layer, call):
    """What a scan of Mamba1 in its modeling file was given and returned, with the gate behind it. `call` runs the layer with the scan captured."""
    finished = []
    layer.out_proj.register_forward_pre_hook(lambda _, args: finished.append(args[0]))
    kept = call()
    u, dt, _, b, c = (a[0] for a in kept["args"][:5])
    z = kept["kwargs"]["z"][0].T[:, :, None]
    return dict(q=c.T[:, None], k=b.T[:, None], v=u.T[:, :, None], gate=dt.T, rates=layer.A_log, gate_bias=layer.dt_proj.bias, skip=layer.D, out=kept["out"][0].T[:, :, None],
                state=kept["state"][0][:, None], z=z, finished=finished[0][0][:, :, None])


def minimax(folder):
    import transformers.models.minimax.modeling_minimax as m

    config = m.MiniMaxConfig(hidden_size=HIDDEN, num_attention_heads=4, head_dim=16, num_hidden_layers=3, block_size=8, layer_types=["linear_attention"] * 3)
    layer = random_module(m.MiniMaxLightningAttention(config, 1))
    qkv, gate, before_norm, finished = output_of(layer.qkv_proj), output_of(layer.output_gate), [], []
    layer.out_proj.register_forward_pre_hook(lambda _, args: finished.append(args[0]))
    layer.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    with torch.no_grad():
        _, state = layer(hidden(), (None, None), None)
    q, k, v = layer.act_fn(qkv[0][0]).reshape(TOKENS, 4, 48).split(16, dim=2)
    save(folder, "minimax", q=q, k=k, v=v, rates=layer.slope_rate.view(4), out=before_norm[0][0].view(TOKENS, 4, 16), state=state[0],
         z=gate[0][0].view(TOKENS, 4, 16), norm_weight=layer.norm.weight.view(4, 16), finished=finished[0][0].view(TOKENS, 4, 16))


def jamba(folder):
    """Its norms of B, C and the step are in front of the scan: what the scan is given has passed them."""
    import transformers.models.jamba.modeling_jamba as m

    config = m.JambaConfig(hidden_size=HIDDEN, mamba_d_state=8, mamba_expand=1, mamba_dt_rank=8, num_hidden_layers=1)
    layer = random_module(m.JambaMambaMixer(config, 0))
    save(folder, "jamba", **mamba1_tensors(layer, lambda: captured(m, "mamba_selective_scan", lambda: layer(hidden()), {"return_last_state": True, "z": None})))


def falcon_h1(folder):
    """With what is convolved too: x, B and C behind the multipliers."""
    import transformers.models.falcon_h1.modeling_falcon_h1 as m

    for name, normed in (("falcon_h1", False), ("falcon_h1_norm", True)):
        config = m.FalconH1Config(hidden_size=HIDDEN, mamba_n_heads=4, mamba_d_head=32, mamba_d_ssm=128, mamba_d_state=16, mamba_n_groups=2, mamba_chunk_size=8, mamba_rms_norm=normed,
                                  num_hidden_layers=1, ssm_multipliers=[0.5, 0.7, 1.1, 0.9, 1.3])
        layer = random_module(m.FalconH1Mixer(config, 0))
        layer.mup_vector = m.compute_mup_vector(config)  # which the model sets
        projected, finished = output_of(layer.in_proj), []
        layer.out_proj.register_forward_pre_hook(lambda _, args: finished.append(args[0]))
        kept = captured(m, "mamba2_chunk_scan", lambda: layer(hidden()), {"return_final_states": True})
        x, dt, _, b, c = (a[0] for a in kept["args"][:5])
        z, rows, _ = (projected[0] * layer.mup_vector)[0].split([128, 128 + 2 * 2 * 16, 4], dim=-1)
        weight = {"norm_weight": layer.norm.weight.view(4, 32)} if normed else {}
        save(folder, name, q=c, k=b, v=x, gate=dt, rates=layer.A_log, gate_bias=layer.dt_bias, skip=layer.D, out=kept["out"][0], state=kept["state"][0], z=z.reshape(TOKENS, 4, 32),
             finished=finished[0][0].view(TOKENS, 4, 32), input=rows, conv_weight=layer.conv1d.weight[:, 0], conv_bias=layer.conv1d.bias, **weight)


if __name__ == "__main__":
    for make in (qwen3_next, kimi_linear, mamba2_models, falcon_mamba, minimax, jamba, falcon_h1):
        make(sys.argv[1])
        print("made", make.__name__)
