"""Recurrent layers in float64 on torch tensors, token by token from the definition: what outputs are held to."""
import pytest

torch = pytest.importorskip("torch")

FLOAT = 1e-4 if torch.cuda.is_available() else 5e-6  # how far float32 may be off, of the largest number


def l2_normal(x):
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def recurrence(q, k, v, g, beta=None, scale=None, state=None, norm=False):
    """q, k [b, t, h, d_k], v [b, t, hv, d_v], g [b, t, hv] or [b, t, hv, d_k]. beta [b, t, hv]: with the delta rule. Returns out and the state [b, hv, d_k, d_v]."""
    q, k, v, g = (x.double() for x in (q, k, v, g))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if norm:
        q, k = l2_normal(q), l2_normal(k)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    state = v.new_zeros((v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])) if state is None else state.double()
    out = torch.zeros_like(v)
    for t in range(v.shape[1]):
        state = state * g[:, t].exp()[..., None]
        u = v[:, t]
        if beta is not None:
            u = beta[:, t].double()[..., None] * (u - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t][..., None] * u[..., None, :]
        out[:, t] = scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out, state


def near(out, expected, tolerance):
    """Of one shape, and within a part of the largest number."""
    assert out.shape == expected.shape and torch.isfinite(out).all()
    error = (out.double() - expected).abs().max().item() / max(expected.abs().max().item(), 1e-3)
    assert error <= tolerance, error
