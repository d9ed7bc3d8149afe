"""Drafts of layers with a state in SGLang, against its stand-in: chains and trees are verified from the pool's states, and the states behind each token kept."""

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
from recurrent_reference import near, recurrence  # noqa: E402
from test_sglang_linear import HEADS, NEAR, Layer, backend_of, dispatcher_of  # noqa: E402
from test_sglang_mamba import convolved, mixed  # noqa: E402

COUNT = 5  # tokens of a request; its pool has room for one more
TREES = [  # of each token the one that it follows
    [[0, 0, 0, 1, 1], [0, 0, 1, 2, 0], [0, 0, 0, 0, 0]],
    [[0, 0, 1, 2, 3], [0, 0, 1, 1, 3], [0, 0, 0, 2, 2]],
]


def links(parents, device):
    """SGLang's first children, next siblings, and a place for parents."""
    child, sibling = torch.full((2, len(parents), COUNT), -1, dtype=torch.int64)
    for r, tree in enumerate(parents):
        for token in range(COUNT):
            children = [i for i in range(1, COUNT) if tree[i] == token]
            child[r, token] = children[0] if children else -1
            for elder, younger in zip(children, children[1:]):
                sibling[r, elder] = younger
    return child.to(device), sibling.to(device), torch.full_like(child, 99, device=device)


def path(tree, token):
    """The tokens of a request from its first to this one."""
    return [token] if token == 0 else [*path(tree, tree[token]), token]


def trees_of(parents, count):
    return [list(range(-1, COUNT - 1)) for _ in range(count)] if parents is None else parents


@pytest.mark.parametrize("parents", [None, *TREES])
def test_parents(registry, parents):
    from imbrex.sglang.drafts import parents_of

    if parents is not None:
        child, sibling, _ = links(parents, "cpu")
        assert parents_of(child, sibling).tolist() == parents
    one = torch.tensor([[-1]])
    assert parents_of(one, one).tolist() == [[0]]


@pytest.mark.parametrize("kind", HEADS)
def test_who_verifies(registry, kind):
    def kernels(**phases):
        made = dispatcher_of(registry, kind, **phases)
        return made.verify_kernel, made.tree_verify_kernel, made.decode_kernel

    chain, tree, decode = kernels(linear_attn_backend="imbrex")
    assert chain is tree is decode and decode != "triton"
    chain, tree, decode = kernels(linear_attn_decode_backend="imbrex")
    assert chain is tree is decode
    assert kernels(linear_attn_prefill_backend="imbrex") == ("triton",) * 3
    assert kernels(linear_attn_backend="imbrex", linear_attn_verify_backend="triton")[:2] == ("triton", "triton")
    chain, _, decode = kernels(linear_attn_verify_backend="imbrex")
    assert type(chain).__module__ == "imbrex.sglang.linear" and decode == "triton"
    made, _ = backend_of(registry, kind, pool=dict(replayssm_rawv=torch.zeros(1)), linear_attn_backend="imbrex")
    assert made.kernel_dispatcher.verify_kernel == "triton"  # no states are kept to commit


@pytest.mark.parametrize("kind, bound", [("gdn", None), ("kda", None), ("kda", -5.0)])
@pytest.mark.parametrize("parents", [None, *TREES])
def test_recurrences(registry, device, kind, bound, parents):
    kernel = dispatcher_of(registry, kind, device, linear_attn_backend="imbrex").verify_kernel
    layer, slots, counts = Layer(kind, device, bound), [3, 7, 1], [30, 2, 70]
    layer.extend(kernel, slots, counts)
    kept = torch.full((7, COUNT + 1, *layer.pool.shape[1:]), float("nan"), device=device)
    rows = torch.arange(1, 7, dtype=torch.int32, device=device)  # more than requests, as SGLang's
    tree = None if parents is None else torch.tensor(parents, dtype=torch.int32, device=device)
    for chosen in ([2, 0, 4], [4, 3, 1]):
        before, inputs = layer.pool.clone(), layer.inputs(3 * COUNT)
        q, k, v, a, b = inputs
        more = {} if kind == "gdn" else dict(lower_bound=bound)
        out = kernel.target_verify(
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            q=q,
            k=k,
            v=v,
            a=a[0] if kind == "gdn" else a.flatten(2),
            b=b[0],
            **layer.common(slots, [COUNT] * 3),
            intermediate_states_buffer=kept,
            intermediate_state_indices=rows,
            cache_steps=COUNT,
            retrieve_parent_token=tree,
            **more,
        )
        assert torch.equal(layer.pool.nan_to_num(0), before.nan_to_num(0)) and out.shape == v.shape
        for r, (slot, last, of) in enumerate(zip(slots, chosen, trees_of(parents, 3))):
            for token in range(COUNT):
                part = [r * COUNT + t for t in path(of, token)]
                y, state = recurrence(
                    *(x[:, part] for x in (q, k, v)), layer.decays(a[:, part]), b[:, part].sigmoid(), state=layer.state[slot], norm=True
                )
                near(out[:, part[-1:]], y[:, -1:], NEAR)
                near(kept[rows[r], token].double().transpose(-1, -2)[None], state, NEAR)
                if token == last:
                    after = state
            layer.state[slot] = after
            layer.pool[slot] = kept[rows[r], last]  # as SGLang commits it
        assert torch.isnan(kept[0]).all() and torch.isnan(kept[4:]).all() and torch.isnan(kept[:, COUNT:]).all()
        layer.decode(kernel, slots)


def test_requests_of_other_lengths_are_chains(registry):
    """As in Kimi-Linear's ragged steps, whose rows may be more than the requests have."""
    kernel, layer = dispatcher_of(registry, "kda", linear_attn_backend="imbrex").verify_kernel, Layer("kda", "cpu")
    layer.extend(kernel, [3, 7], [9, 2])
    kept, inputs = torch.zeros(4, COUNT, *layer.pool.shape[1:]), layer.inputs(8)
    q, k, v, a, b = inputs
    place = dict(intermediate_states_buffer=kept, intermediate_state_indices=torch.arange(4, dtype=torch.int32), cache_steps=COUNT)
    common = dict(layer.common([3, 7], [2, 5]), A_log=layer.A_log, dt_bias=layer.dt_bias)
    out = kernel.target_verify(q=q, k=k, v=v, a=a.flatten(2), b=b, **common, **place, retrieve_parent_token=None)
    for r, (slot, part) in enumerate(((3, slice(0, 2)), (7, slice(2, 7)))):
        y, state = recurrence(*(x[:, part] for x in (q, k, v)), layer.decays(a[:, part]), b[:, part].sigmoid(), state=layer.state[slot], norm=True)
        near(out[:, part], y, NEAR)
        near(kept[r, part.stop - part.start - 1].double().transpose(-1, -2)[None], state, NEAR)
    with pytest.raises(NotImplementedError, match="expected the parents of 8 drafts of trees, got \\[2, 5\\]"):
        kernel.target_verify(q=q, k=k, v=v, a=a.flatten(2), b=b, **common, **place, retrieve_parent_token=torch.zeros(2, 5, dtype=torch.int32))


def windows_of(layers, rows, dim, shared, device):
    """[layers, rows, tokens, dim, 3]; those behind neighbouring tokens may share memory, in chains."""
    if not shared:
        return torch.full((layers, rows, COUNT + 1, dim, 3), float("nan"), device=device)
    memory = torch.full((layers, rows, dim, COUNT + 3), float("nan"), device=device)
    strides = memory.stride()
    return memory.as_strided((layers, rows, COUNT + 1, dim, 3), (*strides[:2], 1, *strides[2:]))


@dataclass(frozen=True)
class Caches:
    """As SGLang has them of all layers."""

    conv: list
    temporal: torch.Tensor
    intermediate_ssm: torch.Tensor
    intermediate_conv_window: list


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("parents, shared", [(None, False), (None, True), *((tree, False) for tree in TREES)])
def test_convolutions(registry, device, kind, parents, shared):
    from sglang.srt.layers.attention import hybrid_linear_attn_backend

    pool = torch.randn(2, 9, 8, 3, device=device)
    if kind == "kda":
        pool = pool.transpose(-1, -2).contiguous().transpose(-1, -2)
    backend, cache = backend_of(registry, kind, device, pool, linear_attn_backend="imbrex")
    states, (weight, bias) = cache.conv[0], (torch.randn(8, 4, device=device), torch.randn(8, device=device))
    before, windows = states.clone(), windows_of(2, 6, 8, shared, device)
    slots, rows = torch.tensor([5, 2, 8], dtype=torch.int32, device=device), torch.arange(6, dtype=torch.int32, device=device)
    tree = () if parents is None else links(parents, device)
    x = torch.randn(3, COUNT, 8, device=device)
    out = backend.forward_extend(x.transpose(1, 2), states[1], weight, bias, slots, None, None, windows[1], rows, *tree)
    if parents is not None:
        assert tree[2].tolist() == parents
    expected = torch.zeros(3, COUNT, 8, 3, device=device)
    for r, of in enumerate(trees_of(parents, 3)):
        for token in range(COUNT):
            seen = torch.cat([before[1, slots[r]].T, x[r, path(of, token)]])
            near(out[r, :, token], convolved(seen, weight, bias)[-1], NEAR)
            expected[r, token] = seen[-3:].T
    assert torch.equal(windows[1, :3, :COUNT], expected) and torch.equal(states, before)
    caches = Caches([states], torch.zeros(2, 9, 1), torch.ones(2, 6, COUNT + 1, 1), [windows])
    hybrid_linear_attn_backend.update_after_verify(caches, slots, torch.tensor([3, -1, 0]), None, None)
    assert torch.equal(states[1, 5], expected[0, 3]) and torch.equal(states[1, 8], expected[2, 0])
    assert torch.equal(states[:, [0, 1, 2, 3, 4, 6, 7]], before[:, [0, 1, 2, 3, 4, 6, 7]]) and caches.temporal.sum() == 4


def test_sglang_verifies_with_its_own_kernels(registry):
    backend, cache = backend_of(registry, "gdn", linear_attn_backend="imbrex", linear_attn_verify_backend="triton")
    x = torch.randn(3, 8, COUNT)
    assert backend.forward_extend(x, cache.conv[0][0], None, None, None, None, None, None, None) == "SGLang's tokens"


@pytest.mark.parametrize("parents", [None, *TREES])
def test_mamba2(registry, device, parents):
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    mixer = MambaMixer2(device)
    channels = len(mixer.bias)
    backend, cache = backend_of(registry, "mamba2", device, torch.zeros(1, 9, channels, 3, device=device), linear_attn_backend="imbrex")
    states = torch.zeros(9, mixer.heads, mixer.dim, mixer.d_state, device=device)
    slots, own = torch.tensor([7, 3, 1], dtype=torch.int32, device=device), torch.arange(3, dtype=torch.int32, device=device)
    first = torch.randn(3, 1, channels + mixer.heads, device=device)

    def split(rows):
        return rows.split([channels, mixer.heads], -1)

    backend.forward(mixer, *split(first[:, 0]), cache.conv[0][0], states, slots, None, None)
    before, conv_before = states.clone(), cache.conv[0].clone()
    kept, windows = torch.zeros(4, COUNT + 1, *states.shape[1:], device=device), windows_of(1, 4, channels, False, device)
    rows = torch.randn(3, COUNT, channels + mixer.heads, device=device)
    tree = () if parents is None else links(parents, device)
    out = backend.forward(mixer, *split(rows), cache.conv[0][0], states, slots, None, None, kept, windows[0], own, *tree)
    for r, of in enumerate(trees_of(parents, 3)):
        for token in range(COUNT):
            seen = torch.cat([first[r], rows[r, path(of, token)]])
            near(out[r, token], mixed(mixer, seen)[-1], NEAR)
    assert torch.equal(states, before) and torch.equal(cache.conv[0], conv_before)
    chosen = [2, 4, 0]
    for r, (slot, token) in enumerate(zip(slots.tolist(), chosen)):
        states[slot], cache.conv[0][0, slot] = kept[r, token], windows[0, r, token]
    after = torch.randn(3, channels + mixer.heads, device=device)
    out = backend.forward(mixer, *split(after), cache.conv[0][0], states, slots, None, None)
    for r, (of, token) in enumerate(zip(trees_of(parents, 3), chosen)):
        near(out[r], mixed(mixer, torch.cat([first[r], rows[r, path(of, token)], after[r : r + 1]]))[-1], NEAR)
