"""Batches for the tests of imbrex.flashinfer, in torch, and attention in float64 that their outputs are held to."""
import pytest

torch = pytest.importorskip("torch")

import imbrex.flashinfer as flashinfer  # noqa: E402

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
LOG2E = 1.4426950408889634
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 2e-5}


def slopes_of(heads):
    """As the paper on ALiBi has them, by recursion."""
    if heads & (heads - 1) == 0:
        return torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)], dtype=torch.float64)
    below = 2 ** (heads.bit_length() - 1)
    return torch.cat([slopes_of(below), slopes_of(2 * below)[0::2][: heads - below]])


def seen_by(q_len, kv_len, causal=False, window_left=-1, mask=None):
    """bool [q_len, kv_len]. A mask stands for causal; a window holds beside it."""
    position = kv_len - q_len + torch.arange(q_len)[:, None]
    key = torch.arange(kv_len)[None, :]
    seen = mask.cpu().clone() if mask is not None else (key <= position) if causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    return seen & (key >= position - window_left) if window_left >= 0 else seen


def attention(q, k, v, *, causal=False, window_left=-1, soft_cap=0.0, scale=None, sinks=None, mask=None, alibi=False):
    """q [t, hq, d], k and v [s, hkv, d] of one request. Out and LSE in base 2, float64 on the CPU."""
    q, k, v = (x.detach().double().cpu() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("thd,shd->hts", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if alibi:
        position = k.shape[0] - q.shape[0] + torch.arange(q.shape[0])
        logits = logits + slopes_of(q.shape[1])[:, None, None] * (torch.arange(k.shape[0])[None, :] - position[:, None])
    seen = seen_by(q.shape[0], k.shape[0], causal, window_left, mask)
    logits = logits.masked_fill(~seen, float("-inf"))
    sees = seen.any(-1)[None, :, None]
    if sinks is not None:
        column = sinks.double().cpu()[:, None, None].expand(-1, q.shape[0], 1)
        logits = torch.cat([logits, column.masked_fill(~sees, float("-inf"))], -1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    lse = torch.logsumexp(logits, -1)
    weights = torch.where(sees, torch.exp(logits - torch.where(sees[..., 0], lse, 0.0)[..., None]), 0.0)
    return torch.einsum("hts,shd->thd", weights, v), lse.t() * LOG2E


class Batch:
    """Requests of random lengths: queries, their keys, and the pages that hold the keys. What is no key is NaN."""

    def __init__(
        self,
        seed,
        q_lens,
        kv_lens,
        *,
        heads=4,
        kv_heads=2,
        dim=64,
        dim_v=None,
        page_size=4,
        dtype=torch.bfloat16,
        kv_dtype=None,
        device="cpu",
    ):
        self.random = torch.Generator().manual_seed(seed)
        self.q_lens, self.kv_lens, self.page_size, self.device = list(q_lens), list(kv_lens), page_size, device
        self.heads, self.kv_heads, self.dim, self.dim_v = heads, kv_heads, dim, dim_v or dim
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self.q = self.normal(sum(q_lens), heads, dim).to(dtype).to(device)
        self.k = [self.normal(n, kv_heads, dim).to(self.kv_dtype) for n in kv_lens]
        self.v = [self.normal(n, kv_heads, self.dim_v).to(self.kv_dtype) for n in kv_lens]
        pages = [-(-n // page_size) for n in kv_lens]
        self.num_pages = sum(pages) + 3
        order = torch.randperm(self.num_pages, generator=self.random)[: sum(pages)]
        self.qo_indptr = self.starts(q_lens)
        self.indptr, self.indices = self.starts(pages), order.to(torch.int32)
        self.last = torch.tensor([n - (p - 1) * page_size if p else 0 for n, p in zip(kv_lens, pages)], dtype=torch.int32)
        self.kv_indptr = self.starts(kv_lens)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.random)

    @staticmethod
    def starts(counts):
        return torch.tensor([0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)

    def arrays(self, where):
        """indptr, indices and last_page_len on a device."""
        return self.indptr.to(where), self.indices.to(where), self.last.to(where)

    def _pages(self, rows):
        pages = torch.full((self.num_pages, self.page_size, *rows[0].shape[1:]), float("nan")).to(self.kv_dtype)
        for r, x in enumerate(rows):
            mine = self.indices[self.indptr[r] : self.indptr[r + 1]].long()
            for t in range(len(x)):
                pages[mine[t // self.page_size], t % self.page_size] = x[t]
        return pages.to(self.device)

    def cache(self, layout="NHD", form="pair"):
        """A pair, one tensor, or a pair of views that skip memory."""
        k, v = self._pages(self.k), self._pages(self.v)
        if layout == "HND":
            k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
        if form == "one":
            return torch.stack([k, v], 1)
        if form == "views":
            return tuple(torch.stack([x, x.clone().fill_(7)], 3)[:, :, :, 0] for x in (k, v))
        return k, v

    def ragged(self, layout="NHD"):
        k, v = torch.cat(self.k).to(self.device), torch.cat(self.v).to(self.device)
        return (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())

    def masks(self):
        """A random mask for each request that hides some rows altogether."""
        return [torch.rand(t, s, generator=self.random) < 0.6 * (torch.arange(t)[:, None] % 5 != 3) for t, s in zip(self.q_lens, self.kv_lens)]

    def expected(self, masks=None, k_scale=1.0, v_scale=1.0, **options):
        """Of all requests."""
        outs, lses = [], []
        for r, q in enumerate(self.q.cpu().split(self.q_lens)):
            mask = None if masks is None else masks[r]
            out, lse = attention(q, self.k[r].float() * k_scale, self.v[r].float() * v_scale, mask=mask, **options)
            outs.append(out), lses.append(lse)
        return torch.cat(outs), torch.cat(lses)


def flat(masks):
    return torch.cat([m.reshape(-1) for m in masks])


def check(result, expected, dtype=torch.bfloat16, tolerance=None):
    """out, or (out, lse), against out and LSE in float64."""
    out, lse = result if isinstance(result, tuple) else (result, None)
    tolerance = tolerance or TOLERANCE[dtype]
    assert out.shape == expected[0].shape
    torch.testing.assert_close(out.double().cpu(), expected[0], atol=tolerance, rtol=tolerance)
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == expected[1].shape
        torch.testing.assert_close(lse.double().cpu(), expected[1], atol=2e-3, rtol=2e-3)


DECODE = [17, 0, 1, 64, 33]


def workspace(device):
    return torch.empty(0, device=device)


def decode_batch(device, **options):
    return Batch(1, [1] * len(DECODE), DECODE, device=device, **options)


def planned_decode(batch, layout="NHD", where="cpu", **options):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(batch.device), layout)
    types = dict(q_data_type=batch.dtype, kv_data_type=batch.kv_dtype)
    wrapper.plan(*batch.arrays(where), batch.heads, batch.kv_heads, batch.dim, batch.page_size, **{**types, **options})
    return wrapper


def planned_prefill(batch, layout="NHD", where="cpu", **options):
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(batch.device), layout)
    types = dict(q_data_type=batch.dtype, kv_data_type=batch.kv_dtype, head_dim_vo=batch.dim_v)
    arrays = (batch.qo_indptr.to(where), *batch.arrays(where))
    wrapper.plan(*arrays, batch.heads, batch.kv_heads, batch.dim, batch.page_size, **{**types, **options})
    return wrapper


def planned_ragged(batch, layout="NHD", where="cpu", **options):
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(batch.device), layout)
    types = dict(q_data_type=batch.dtype, kv_data_type=batch.kv_dtype, head_dim_vo=batch.dim_v)
    wrapper.plan(batch.qo_indptr.to(where), batch.kv_indptr.to(where), batch.heads, batch.kv_heads, batch.dim, **{**types, **options})
    return wrapper
