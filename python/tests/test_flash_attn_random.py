"""imbrex.flash_attn against float64 in random configurations: types, dims, layouts, masks, biases, lengths, pages. A seed names each."""
import random

import pytest

torch = pytest.importorskip("torch")

from imbrex import flash_attn  # noqa: E402
from torch_reference import DEVICES, TOLERANCE, near, paged, reference  # noqa: E402

SEEDS = range(40)


class Draw:
    """Options of one configuration, with what the reference is told of them."""

    def __init__(self, seed, device, function):
        self.random = random.Random(f"{function} {seed}")
        torch.manual_seed(self.random.randrange(1 << 30))
        pick = self.random.choice
        self.device, self.dtype = device, pick([torch.float32, torch.float16, torch.bfloat16])
        self.batch, self.heads_k = pick([1, 2, 3, 5]), pick([1, 2, 3])
        self.heads, self.dim = self.heads_k * pick([1, 2, 4]), pick([16, 32, 40, 64, 96, 128])
        self.theirs = dict(causal=pick([False, True]))
        self.ours = dict(self.theirs, softmax_scale=pick([None, 0.3]), softcap=pick([0.0, 0.0, 4.0]))
        if pick([False, True]):
            window = pick([-1, 0, 5]), pick([-1, 0, 3])
            self.theirs["window"] = self.ours["window_size"] = window
        self.theirs.update(scale=self.ours["softmax_scale"] or self.dim ** -0.5, soft_cap=self.ours["softcap"])
        dims = pick([0, 0, 1, 2])
        self.slopes = torch.rand((self.batch, self.heads)[-dims:], device=device) * 0.5 if dims else None
        self.ours["alibi_slopes"] = self.slopes

    def tensor(self, *shape):
        """Values in memory that is contiguous, transposed, a part of more, or shared along the first dimension."""
        x = torch.randn(shape, device=self.device).to(self.dtype)
        form = self.random.choice(["plain", "plain", "transposed", "part", "shared"])
        if form == "transposed":
            return x.transpose(0, -2).contiguous().transpose(0, -2)
        if form == "part":
            return torch.stack((x, x), -2).flatten(-3, -2)[..., : shape[-2], :] if shape[-2] == 1 else torch.cat((x, x), -2)[..., : shape[-2], :]
        return x[:1].expand(shape) if form == "shared" and shape[0] else x

    def check(self, r, out, lse, q, k, v):
        """One request: q [s, h, d], keys and values [s, hk, d], lse [h, s]."""
        falling = self.slopes if self.slopes is None or self.slopes.dim() == 1 else self.slopes[r]
        expected, expected_lse = reference(*(x[None].transpose(1, 2) for x in (q, k, v)), falling_slopes=falling, **self.theirs)
        near(out, expected[0].transpose(0, 1))
        near(lse, expected_lse[0], 3e-2 if self.dtype == torch.bfloat16 else max(TOLERANCE[self.dtype], 1e-4))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", SEEDS)
def test_func(device, seed):
    c = Draw(seed, device, "func")
    sq, sk, dim_k = c.random.choice([1, 2, 7, 20]), c.random.choice([1, 5, 20, 70]), c.random.choice([c.dim, c.dim, 33])
    c.theirs["scale"] = c.ours["softmax_scale"] or dim_k ** -0.5
    q, k, v = c.tensor(c.batch, sq, c.heads, dim_k), c.tensor(c.batch, sk, c.heads_k, dim_k), c.tensor(c.batch, sk, c.heads_k, c.dim)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **c.ours)
    for r in range(c.batch):
        c.check(r, out[r], lse[r], q[r], k[r], v[r])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", SEEDS)
def test_varlen_func(device, seed):
    c = Draw(seed, device, "varlen")
    q_lens, k_lens = ([c.random.choice([0, 1, 3, 17, 40]) for _ in range(c.batch)] for _ in range(2))
    starts, kv_starts = (torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device) for n in (q_lens, k_lens))
    q, k, v = c.tensor(sum(q_lens), c.heads, c.dim), c.tensor(sum(k_lens), c.heads_k, c.dim), c.tensor(sum(k_lens), c.heads_k, c.dim)
    keys, pages = (k, v), {}
    page_size = c.random.choice([0, 0, 1, 16, 24])
    if page_size and max(k_lens):
        rows = torch.zeros(c.batch, max(k_lens), 2 * c.heads_k, c.dim, device=device, dtype=c.dtype)
        for r, n in enumerate(k_lens):
            rows[r, :n] = torch.cat((k, v), 1)[kv_starts[r] : kv_starts[r + 1]]
        cache, pages["block_table"] = paged(rows, page_size)
        keys = cache.chunk(2, 2)
    lengths = starts, kv_starts, max(q_lens), max(k_lens)
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, *keys, *lengths, return_attn_probs=True, **pages, **c.ours)
    for r in range(c.batch):
        one, own = slice(starts[r], starts[r + 1]), slice(kv_starts[r], kv_starts[r + 1])
        c.check(r, out[one], lse[:, one], q[one], k[own], v[own])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", SEEDS)
def test_with_kvcache(device, seed):
    c = Draw(seed, device, "kvcache")
    pick = c.random.choice
    room, sq, new = pick([48, 64, 33]), pick([1, 2, 5]), pick([0, 1, 2, 5])
    lens = [pick([0, 1, 9, room - new]) for _ in range(c.batch)]
    lens = lens[:1] * c.batch if pick([False, True]) else lens
    pads = [c.random.randint(0, n) for n in lens] if pick([False, False, True]) else [0] * c.batch
    old = torch.full((c.batch, room, 2 * c.heads_k, c.dim), float("nan"), device=device, dtype=c.dtype)
    for r, n in enumerate(lens):
        old[r, pads[r] : n] = torch.randn(n - pads[r], 2 * c.heads_k, c.dim, device=device).to(c.dtype)
    q, k, v = c.tensor(c.batch, sq, c.heads, c.dim), *(c.tensor(c.batch, new, c.heads_k, c.dim) for _ in range(2))
    as_int = len(set(lens)) == 1 and pick([False, True])
    options = dict(c.ours, cache_seqlens=lens[0] if as_int else torch.tensor(lens, dtype=torch.int32, device=device), num_splits=pick([0, 3]))
    if any(pads):
        options["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32, device=device)
    if new:
        options.update(k=k, v=v)
    form = pick(["rows", "rows of an index", "pages"])
    rows = list(range(c.batch))
    if form == "pages":
        cache, options["block_table"] = paged(old, pick([1, 16, 256]))
    elif form == "rows":
        cache = old.clone()
    else:
        rows = c.random.sample(range(c.batch + 2), c.batch)
        cache = torch.full((c.batch + 2, room, *old.shape[2:]), float("nan"), device=device, dtype=c.dtype)
        cache[rows] = old
        options["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32, device=device)
    out, lse = flash_attn.flash_attn_with_kvcache(q, *cache.chunk(2, 2), return_softmax_lse=True, **options)
    for r, n in enumerate(lens):
        keys, values = (torch.cat((x, y[r])) for x, y in zip(old[r, pads[r] : n].chunk(2, 1), (k, v)))
        c.check(r, out[r], lse[r], q[r], keys, values)
        if form != "pages":
            assert torch.equal(torch.cat((k[r], v[r]), 1), cache[rows[r], n : n + new]) and torch.isnan(cache[rows[r], n + new :]).all()
