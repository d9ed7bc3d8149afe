"""Kernels of linear attention in SGLang, against its stand-in: the calls that its backends make, over a pool of states."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from recurrent_reference import FLOAT, near, recurrence  # noqa: E402
from torch.nn.functional import softplus  # noqa: E402

NEAR = max(2e-5, FLOAT)
HEADS = {"gdn": (2, 4, 16, 32), "kda": (2, 2, 32, 32)}  # of keys and values, and their dimensions


def backend_of(registry, kind, device="cpu", conv=None, pool=None, **phases):
    """conv: the pool of states of convolutions [layers, slots, dim, width - 1]; pool: what else it has."""
    from sglang.srt.runtime_context import get_exec

    names = ("linear_attn_decode_backend", "linear_attn_prefill_backend", "linear_attn_verify_backend")
    asked = dict(dict.fromkeys(names), **dict(dict(linear_attn_backend="triton"), **phases))
    get_exec().mamba = SimpleNamespace(**asked)
    cache = SimpleNamespace(conv=[torch.zeros(1, 9, 8, 3, device=device) if conv is None else conv], **(pool or {}))
    runner = SimpleNamespace(device=device, kind=kind, req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache)))
    made = registry.attn_backend_wrapper(runner, None)
    assert [x.value for x in (runner.linear_attn_backends.decode, runner.linear_attn_backends.prefill)] == [
        "triton" if (name or asked["linear_attn_backend"]) == "triton" else "custom"
        for name in (asked["linear_attn_decode_backend"], asked["linear_attn_prefill_backend"])
    ]
    return made, cache


def dispatcher_of(registry, kind, device="cpu", **phases):
    return backend_of(registry, kind, device, **phases)[0].kernel_dispatcher


@pytest.mark.parametrize("kind", HEADS)
def test_each_phase_has_the_kernel_that_is_asked_for(registry, kind):
    from sglang.srt.layers.attention.linear import gdn_backend, kda_backend

    own = gdn_backend.GDNAttnBackend, kda_backend.KDAAttnBackend
    plain = dispatcher_of(registry, kind)
    assert (plain.decode_kernel, plain.extend_kernel, plain.supports_packed_decode) == ("triton", "triton", True)
    both = dispatcher_of(registry, kind, linear_attn_backend="imbrex")
    assert both.decode_kernel is both.extend_kernel and type(both.decode_kernel).__module__ == "imbrex.sglang.linear"
    assert (both.supports_packed_decode, both.supports_packed_decode_safe_gate) == (False, False)
    decode = dispatcher_of(registry, kind, linear_attn_decode_backend="imbrex")
    assert decode.extend_kernel == "triton" and decode.decode_kernel != "triton"
    prefill = dispatcher_of(registry, kind, linear_attn_prefill_backend="imbrex")
    assert prefill.decode_kernel == "triton" and prefill.supports_packed_decode and prefill.extend_kernel != "triton"
    assert own == (gdn_backend.GDNAttnBackend, kda_backend.KDAAttnBackend)
    with pytest.raises(ValueError, match="Unsupported decode backend"):  # another plug-in's name is not imbrex's
        dispatcher_of(registry, kind, linear_attn_backend="another")


class Layer:
    """Its parameters, a pool, and requests: a slot and the state in float64 of each."""

    def __init__(self, kind, device, lower_bound=None):
        self.kind, self.device, self.lower_bound = kind, device, lower_bound
        self.k_heads, self.v_heads, self.k_dim, self.v_dim = HEADS[kind]
        gates = (self.v_heads,) if kind == "gdn" else (self.v_heads, self.k_dim)
        self.gates = gates
        self.A_log = torch.rand(self.v_heads, device=device) if kind == "gdn" else torch.rand(1, 1, self.v_heads, 1, device=device)
        self.dt_bias = torch.randn(*gates, device=device) if kind == "gdn" else torch.randn(self.v_heads * self.k_dim, device=device)
        self.pool = torch.full((9, self.v_heads, self.v_dim, self.k_dim), float("nan"), device=device)
        self.state = {}

    def inputs(self, count):
        def make(*shape):
            return torch.randn(1, count, *shape, device=self.device)

        q, k, v = make(self.k_heads, self.k_dim), make(self.k_heads, self.k_dim), make(self.v_heads, self.v_dim)
        return q, k, v, make(*self.gates), make(self.v_heads)

    def decays(self, a):
        rate, x = self.A_log.double().flatten().exp(), a.double() + self.dt_bias.double().view(self.gates)
        rate = rate if self.kind == "gdn" else rate[:, None]
        return -rate * softplus(x) if self.lower_bound is None else self.lower_bound * torch.sigmoid(rate * x)

    def check(self, out, inputs, slots, counts):
        q, k, v, a, b = inputs
        at = 0
        for slot, count in zip(slots, counts):
            part = slice(at, at + count)
            expected, state = recurrence(
                q[:, part], k[:, part], v[:, part], self.decays(a[:, part]), b[:, part].sigmoid(), state=self.state.get(slot), norm=True
            )
            near(out[:, part], expected, NEAR)
            near(self.pool[slot].double().transpose(-1, -2)[None], state, NEAR)
            self.state[slot] = state
            at += count
        assert out.shape == v.shape

    def common(self, slots, counts):
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        indices = torch.tensor(slots, dtype=torch.int32)
        return dict(ssm_states=self.pool, cache_indices=indices.to(self.device), query_start_loc=starts.to(self.device))

    def extend(self, kernel, slots, counts, **options):
        for slot in slots:
            if slot not in self.state:
                self.pool[slot] = 0  # as SGLang's pool does for a new request
        inputs = self.inputs(sum(counts))
        q, k, v, a, b = inputs
        if self.kind == "gdn":  # SGLang's gates are made before
            out, last, chunks = kernel.extend(q, k, v, self.decays(a).float(), b.sigmoid(), **self.common(slots, counts), **options)
            assert last is None and chunks is None
        else:
            more = dict(A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=self.lower_bound, beta_is_raw=True)
            out = kernel.extend(q, k, v, a.flatten(2), b, **more, **self.common(slots, counts), **options)
        self.check(out, inputs, slots, counts)

    def decode(self, kernel, slots):
        inputs = self.inputs(len(slots))
        q, k, v, a, b = inputs
        more = (
            dict(A_log=self.A_log, dt_bias=self.dt_bias)
            if self.kind == "gdn"
            else dict(A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=self.lower_bound)
        )
        gate, beta = (a[0], b[0]) if self.kind == "gdn" else (a.flatten(2).transpose(0, 1), b.transpose(0, 1))
        out = kernel.decode(q, k, v, gate, beta, **more, **self.common(slots, [1] * len(slots)))
        self.check(out, inputs, slots, [1] * len(slots))


@pytest.mark.parametrize("kind, bound", [("gdn", None), ("kda", None), ("kda", -5.0)])
def test_steps(registry, device, kind, bound):
    kernel = dispatcher_of(registry, kind, device, linear_attn_backend="imbrex").decode_kernel
    layers = [Layer(kind, device, bound) for _ in range(2)]
    for layer in layers:
        layer.extend(kernel, [3, 7], [70, 5])
    for _ in range(2):
        for layer in layers:
            layer.decode(kernel, [7, 3])
    for layer in layers:
        layer.extend(kernel, [1, 7, 3], [1, 20, 1])  # a new request, and prompts that are cut
        layer.decode(kernel, [3, 1, 7])
        assert torch.isnan(layer.pool[[0, 2, 4, 5, 6, 8]]).all()


def test_what_is_refused(registry):
    gdn = dispatcher_of(registry, "gdn", linear_attn_backend="imbrex").extend_kernel
    kda = dispatcher_of(registry, "kda", linear_attn_backend="imbrex").extend_kernel
    layer = Layer("gdn", "cpu")
    with pytest.raises(NotImplementedError, match="--mamba-radix-cache-strategy no_buffer does without"):
        layer.extend(gdn, [3], [4], track_state=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="inplace_update=False"):
        layer.extend(gdn, [3], [4], inplace_update=False)
    layer = Layer("kda", "cpu")
    with pytest.raises(NotImplementedError, match="expected A_log and dt_bias"):
        kda.extend(*layer.inputs(3), **layer.common([3], [3]))
    q, k, v, a, b = layer.inputs(3)
    with pytest.raises(NotImplementedError, match="keys and values of one shape"):
        kda.extend(q, k, v[..., :16], a, b, A_log=layer.A_log, dt_bias=layer.dt_bias, **layer.common([3], [3]))
