"""imbrex.torch in eager mode: an operator is called only where something has to see it, and answers are the same either way."""

import pytest

torch = pytest.importorskip("torch")
import imbrex.torch  # noqa: E402
from torch_reference import tensors  # noqa: E402


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def seen(monkeypatch):
    """How many operators were called."""
    calls = []
    operator = imbrex.torch._attention
    monkeypatch.setattr(imbrex.torch, "_attention", lambda *a: calls.append(1) or operator(*a))
    return calls


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("sizes", [dict(), dict(b=1), dict(sq=1), dict(b=1, sq=1), dict(h=2, hk=2, sq=1)])
def test_both_ways_give_the_same(device, seen, sizes, by_token):
    x = tensors(device, **sizes, by_token=by_token)
    mask = torch.rand(x[0].shape[0], 1, x[0].shape[2], x[1].shape[2], device=device) > 0.3
    mask[..., 0] = True
    for options in (dict(), dict(causal=True), dict(mask=mask)):
        direct = imbrex.torch.attention(*x, return_lse=True, **options)
        assert not seen
        arguments = (options.get("mask"), options.get("causal", False), -1, -1, None, 0.0, None, None, True)
        assert all(torch.equal(a, b) for a, b in zip(direct, torch.ops.imbrex.attention(*x, *arguments)))


def test_heads_of_a_token_are_not_copied(device, seen):
    """[b, s, h, d] memory gives [b, s, h, d] memory."""
    out = imbrex.torch.attention(*tensors(device, by_token=True))
    assert out.transpose(1, 2).is_contiguous() and not out.is_contiguous()


def test_a_gradient_needs_the_operator(device, seen):
    q, k, v = tensors(device)
    out = imbrex.torch.attention(q.requires_grad_(), k, v)
    assert seen and out.requires_grad
    with torch.no_grad():
        imbrex.torch.attention(q, k, v)
    assert len(seen) == 1


def test_what_traces_sees_the_operator(device, seen):
    from torch.fx.experimental.proxy_tensor import make_fx

    x = tensors(device)
    graph = make_fx(lambda *x: imbrex.torch.attention(*x))(*x)
    assert any("imbrex.attention" in str(node.target) for node in graph.graph.nodes)
    traced = torch.jit.trace(lambda *x: imbrex.torch.attention(*x), x, check_trace=False)
    assert "imbrex::attention" in str(traced.graph)
    with torch.profiler.profile() as profile:
        imbrex.torch.attention(*x)
    assert any("imbrex::attention" in event.key for event in profile.key_averages())


def test_tensors_without_memory(seen):
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert imbrex.torch.attention(*tensors("meta")).shape == (2, 4, 5, 32)
    with FakeTensorMode():
        assert imbrex.torch.attention(*tensors("cpu")).shape == (2, 4, 5, 32)
    assert len(seen) == 2


def test_transforms_see_the_operator(device, seen):
    q, k, v = tensors(device)
    mapped = torch.vmap(lambda q: imbrex.torch.attention(q, k, v))(torch.stack([q, 2 * q]))
    assert seen
    assert torch.equal(mapped, torch.stack([imbrex.torch.attention(x, k, v) for x in (q, 2 * q)]))


def test_tangents_are_not_dropped(device):
    import torch.autograd.forward_ad as forward_ad

    q, k, v = tensors(device)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="imbrex has no forward derivative"):
            imbrex.torch.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        imbrex.torch.attention(q, k, v)
