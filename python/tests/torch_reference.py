"""Attention in float64 on torch tensors, from the definition: what outputs are held to. Layout [b, h, s, d]."""
import pytest

torch = pytest.importorskip("torch")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
TOLERANCE = {torch.float32: 2e-3 if torch.cuda.is_available() else 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def tensors(device, b=2, h=4, hk=2, sq=5, sk=9, d=32, by_token=False, seed=3):
    """q, k, v in float32; by_token: the heads of a token lie together."""
    torch.manual_seed(seed)
    shapes = [(b, n, s, d) for n, s in ((h, sq), (hk, sk), (hk, sk))]
    if by_token:
        return [torch.randn(b, s, n, d, device=device).transpose(1, 2) for b, n, s, d in shapes]
    return [torch.randn(*shape, device=device) for shape in shapes]


def reference(q, k, v, *, causal=False, window=(-1, -1), mask=None, scale=None, soft_cap=0.0, sinks=None, alibi_slopes=None, falling_slopes=None):
    """Out and the natural log of the denominator; a row that sees no key is 0 and -inf.

    falling_slopes: [h] or [b, h], of a bias that falls on both sides of a query, as flash-attn's alibi_slopes do.
    """
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    sq, sk = logits.shape[-2:]
    position = torch.arange(sq, device=q.device)[:, None] + sk - sq
    key = torch.arange(sk, device=q.device)[None]
    if alibi_slopes is not None:
        logits = logits + alibi_slopes.double()[:, None, None] * (key - position)
    if falling_slopes is not None:
        logits = logits - falling_slopes.double()[..., None, None] * (key - position).abs()
    seen = key <= position if causal else key >= 0
    if window[0] >= 0:
        seen = seen & (key >= position - window[0])
    if window[1] >= 0:
        seen = seen & (key <= position + window[1])
    seen = seen.expand(logits.shape) if mask is None else seen & mask
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    return torch.nan_to_num(logits.softmax(-1))[..., :sk] @ v, logits.logsumexp(-1).masked_fill(~seen.any(-1), float("-inf"))


def near(out, expected, tolerance=None):
    """Of one shape, infinite in the same places, and near everywhere else."""
    assert out.shape == expected.shape
    infinite = torch.isinf(expected)
    assert torch.equal(infinite, torch.isinf(out)) and torch.isfinite(out[~infinite]).all()
    if (~infinite).any():
        error = (out.double() - expected)[~infinite].abs().max().item()
        assert error <= (TOLERANCE[out.dtype] if tolerance is None else tolerance), error


def arrays(device, dtype, b, h, hk, sq, sk, d, dv=None, layout="bhsd"):
    """Random q, k, v that lie as [b, h, s, d], as [b, s, h, d], or in a part of larger tensors."""

    def one(heads, s, dim):
        if layout == "bhsd":
            return torch.randn(b, heads, s, dim, device=device).to(dtype)
        if layout == "bshd":
            return torch.randn(b, s, heads, dim, device=device).to(dtype).transpose(1, 2)
        return torch.randn(b, s + 2, heads + 1, dim, device=device).to(dtype)[:, 1:-1, :-1].transpose(1, 2)

    return one(h, sq, d), one(hk, sk, d), one(hk, sk, dv or d)


def paged(x, page_size, spare=3):
    """x [b, s, h, d] in pages in random order, NaN elsewhere: cache [n, page_size, h, d] and int32 table [b, columns]."""
    b, s, h, d = x.shape
    columns = -(-s // page_size)
    table = torch.randperm(b * columns + spare)[: b * columns].view(b, columns)
    cache = torch.full((b * columns + spare, page_size, h, d), float("nan"), device=x.device).to(x.dtype)
    for r in range(b):
        for t in range(s):
            cache[table[r, t // page_size], t % page_size] = x[r, t]
    return cache, table.to(device=x.device, dtype=torch.int32)
