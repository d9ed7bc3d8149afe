"""imbrex.flash_mla beside FlashMLA's definitions: shapes as its own test of dense decoding has them, and records of fp8 made as it makes them."""
import math

import pytest

torch = pytest.importorskip("torch")

from imbrex import flash_mla  # noqa: E402

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
OUT_OF_ORDER = 2147480000  # what block tables have behind a request's blocks


class Case:
    """Pages in a random order; what is no key is NaN, and what is no block of a request a number that is no block."""

    def __init__(self, lens, query_len=1, heads=4, kv_heads=1, page=64, dtype=torch.bfloat16, device="cpu", dim=576, dim_v=512):
        random = torch.Generator().manual_seed(len(lens) + heads)
        normal = lambda *shape: (torch.randn(*shape, generator=random) / 10).clamp(-1, 1).to(dtype)  # noqa: E731
        blocks = [-(-n // page) for n in lens]
        self.lens, self.dim_v, self.page = lens, dim_v, page
        self.q = normal(len(lens), query_len, heads, dim)
        self.rows = [normal(n, kv_heads, dim) for n in lens]
        order = torch.randperm(sum(blocks) + 2, generator=random).int()
        self.table = torch.full((len(lens), max(blocks) + 1), OUT_OF_ORDER, dtype=torch.int32)
        self.pages = torch.full((sum(blocks) + 2, page, kv_heads, dim), float("nan"), dtype=dtype)
        for r, rows in enumerate(self.rows):
            mine, order = order[: blocks[r]], order[blocks[r] :]
            self.table[r, : blocks[r]] = mine
            for j, block in enumerate(mine.tolist()):
                part = rows[j * page : (j + 1) * page]
                self.pages[block, : len(part)] = part
        self.arrays = [x.to(device) for x in (self.table, torch.tensor(lens, dtype=torch.int32))]
        self.on = lambda x: x.to(device)

    def run(self, causal, metadata=None, pages=None, **options):
        metadata = flash_mla.get_mla_metadata()[0] if metadata is None else metadata
        pages = self.on(self.pages) if pages is None else pages
        return flash_mla.flash_mla_with_kvcache(self.on(self.q), pages, *self.arrays, self.dim_v, metadata, None, causal=causal, **options)

    def expected(self, causal, scale=None):
        """float64, by the definition."""
        outs, lses = [], []
        for q, keys in zip(self.q.double(), self.rows):
            keys = keys.double().repeat_interleave(q.shape[1] // keys.shape[1], 1)
            logits = torch.einsum("thd,shd->hts", q, keys) * (q.shape[2] ** -0.5 if scale is None else scale)
            if causal:
                hidden = torch.arange(len(keys)) > torch.arange(len(q))[:, None] + len(keys) - len(q)
                logits = logits.masked_fill(hidden, -math.inf)
            lse = torch.logsumexp(logits, -1)
            weights = torch.nan_to_num(torch.softmax(logits, -1), 0.0)
            outs.append(torch.einsum("hts,shd->thd", weights, keys[..., : self.dim_v]))
            lses.append(lse.masked_fill(lse == -math.inf, math.inf))
        return torch.stack(outs), torch.stack(lses)

    def check(self, result, causal, scale=None):
        """By FlashMLA's own bounds, but a little more for sums in another order."""
        (out, lse), (out_expected, lse_expected) = result, self.expected(causal, scale)
        assert out.shape == out_expected.shape and out.dtype == self.q.dtype
        assert lse.shape == lse_expected.shape and lse.dtype == torch.float32
        torch.testing.assert_close(out.double().cpu(), out_expected, atol=8e-4, rtol=2.01 / 128)
        # The matrix unit of a CPU sums weights that are rounded to bf16.
        torch.testing.assert_close(lse.double().cpu(), lse_expected, atol=2e-4, rtol=8.01 / 65536)


@devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 1), (16, 2), (9, 3), (63, 1)])
@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_as_flashmla_tests_it(device, query_len, heads, kv_heads, causal):
    case = Case([140, 20, 77, 64, 4], query_len, heads, kv_heads, device=device)
    case.check(case.run(causal), causal)


@devices
@pytest.mark.parametrize("page", [1, 16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pages_types_and_scales(device, page, dtype):
    case = Case([65, 128, 3], 2, 8, page=page, dtype=dtype, device=device)
    case.check(case.run(True, softmax_scale=0.1), True, 0.1)


@devices
@pytest.mark.parametrize("causal", [False, True])
def test_requests_without_keys_and_with_fewer_than_queries(device, causal):
    case = Case([0, 70, 0, 1], 2, 6, device=device)
    out, lse = case.run(causal)
    case.check((out, lse), causal)
    assert not out[0].any() and torch.isposinf(lse[0]).all()
    assert bool(torch.isposinf(lse[3, :, 0]).all()) == causal


def records(pages):
    """fp8 records [.., 1, 656] of pages of 576 numbers, each group of 128 with a power of two as its scale; and the numbers they stand for."""
    latent, rope = pages[..., :512].float(), pages[..., 512:].bfloat16()
    groups = latent.unflatten(-1, (4, 128))
    scales = torch.exp2(torch.ceil(torch.log2((groups.abs().amax(-1) / 448).clamp(min=1e-4))))
    elements = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    parts = elements.flatten(-2).view(torch.uint8), scales.contiguous().view(torch.uint8), rope.contiguous().view(torch.uint8)
    numbers = torch.cat([(elements.float() * scales[..., None]).flatten(-2), rope.float()], -1)
    return torch.cat(parts, -1), numbers


@devices
@pytest.mark.parametrize("dtype", ["bytes", "fp8"])
@pytest.mark.parametrize("query_len", [1, 3])
def test_records_of_fp8(device, query_len, dtype):
    case = Case([140, 20, 77], query_len, 8, device=device)
    known = torch.nan_to_num(case.pages, 0.0)
    cache, _ = records(known)
    room = torch.zeros(cache.shape[0], cache.shape[1] + 1, 1, 656, dtype=torch.uint8)[:, :-1]  # FlashMLA's test leaves a row between blocks
    room.copy_(cache)
    case.rows = [records(x.float())[1] for x in case.rows]
    pages = room.view(torch.float8_e4m3fn) if dtype == "fp8" else room
    if device == "cuda":
        pages = cache.to(device).view(pages.dtype)
    case.check(case.run(True, pages=pages, is_fp8_kvcache=True), True)


@devices
def test_layers_share_a_step_and_other_lengths_are_planned_again(device, monkeypatch):
    from imbrex.plan import Plan

    updates = []
    for name in ("update", "update_on_device"):
        real = getattr(Plan, name)
        monkeypatch.setattr(Plan, name, lambda self, *a, _real=real, **k: updates.append(1) or _real(self, *a, **k))
    case = Case([70, 3], device=device)
    metadata, _ = flash_mla.get_mla_metadata(case.arrays[1], 4, 1)  # arguments of older versions
    for layer in range(3):
        case.pages = case.pages * 0.5
        case.rows = [x * 0.5 for x in case.rows]
        case.check(case.run(True, metadata), True)
    assert len(updates) == 1
    if device == "cpu":
        case.arrays[1] -= 1
        case.rows = [x[:-1] for x in case.rows]
        case.check(case.run(True, metadata), True)
        assert len(updates) == 2
    other = Case([70, 3], 2, device=device)
    with pytest.raises(ValueError, match="seq_len_q 1, that of its first call, got 2"):
        other.run(True, metadata)


@devices
def test_expanded_keys(device):
    lens_q, lens_k, random = [5, 1, 30], [9, 64, 30], torch.Generator().manual_seed(3)
    starts = [torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32, device=device) for x in (lens_q, lens_k)]
    q, k, v = (torch.randn(sum(n), 4, d, generator=random).to(device) for n, d in ((lens_q, 192), (lens_k, 192), (lens_k, 128)))
    out, lse = flash_mla.flash_attn_varlen_func(q, k, v, *starts, 30, 64, causal=True, softmax_scale=0.07)
    packed = flash_mla.flash_attn_varlen_kvpacked_func(q, torch.cat([k, v], -1), *starts, 30, 64, 192, causal=True, softmax_scale=0.07)
    assert torch.equal(packed[0], out) and torch.equal(packed[1], lse)
    at = 0
    for n, m, qs, ks, vs in zip(lens_q, lens_k, q.split(lens_q), k.split(lens_k), v.split(lens_k)):
        logits = 0.07 * torch.einsum("thd,shd->hts", qs.double(), ks.double())
        logits = logits.masked_fill(torch.arange(m, device=device) > torch.arange(n, device=device)[:, None] + m - n, -math.inf)
        expected = torch.einsum("hts,shd->thd", torch.softmax(logits, -1), vs.double())
        tolerance = 2e-2 if device == "cuda" else 1e-5
        torch.testing.assert_close(out[at : at + n].double(), expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[at : at + n].double(), torch.logsumexp(logits, -1).t(), atol=2e-3, rtol=2e-3)
        at += n
    qkv = torch.cat([q, q, q[..., :128]], -1)
    alone = flash_mla.flash_attn_varlen_func(q, q, q[..., :128], starts[0], starts[0], 30, 30)
    assert torch.equal(flash_mla.flash_attn_varlen_qkvpacked_func(qkv, starts[0], 30, 192)[0], alone[0])


def test_what_is_wrong_or_refused_is_named():
    case = Case([70, 3])
    for name in ("indices", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"):
        with pytest.raises(NotImplementedError, match=f"{name}= is not there: sparse attention"):
            case.run(True, **{name: torch.zeros(1)})
    with pytest.raises(NotImplementedError, match="attn_sink= is not there"):
        case.run(True, attn_sink=torch.zeros(4))
    with pytest.raises(NotImplementedError, match="sparse"):
        flash_mla.flash_mla_sparse_fwd()
    with pytest.raises(ValueError, match="what get_mla_metadata"):
        case.run(True, metadata=torch.zeros(1))
    with pytest.raises(ValueError, match=r"k_cache: expected torch.bfloat16 \[.., 576\], as q has, got torch.float16"):
        case.run(True, pages=case.pages.half())
    with pytest.raises(ValueError, match="k_cache: expected elements of a byte"):
        case.run(True, is_fp8_kvcache=True)
    table, lens = case.arrays
    for arrays, match in (
        ((None, lens), "block_table: expected torch.int32"),
        ((table.long(), lens), r"block_table: expected torch.int32 \[2, .*, got torch.int64"),
        ((table, lens[:1]), r"cache_seqlens: expected torch.int32 \[2\], got"),
        ((table, lens + 1000), r"cache_seqlens: expected 0 to 192, for which block_table has blocks, got \[1070, 1003\]"),
    ):
        case.arrays = arrays
        with pytest.raises(ValueError, match=match):
            case.run(True)
    with pytest.raises(NotImplementedError, match="dropout_p"):
        flash_mla.flash_attn_varlen_func(*[torch.zeros(1, 1, 8)] * 3, lens, lens, 1, 1, 0.1)


@on_gpu
def test_a_graph_replays_other_lengths():
    case = Case([70, 3], 2, device="cuda")
    q, pages = case.q.cuda(), case.pages.cuda()
    call = lambda: flash_mla.flash_mla_with_kvcache(q, pages, *case.arrays, 512, flash_mla.get_mla_metadata()[0], causal=True)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    case.arrays[1].copy_(torch.tensor([50, 2], dtype=torch.int32))
    case.rows = [x[:n] for x, n in zip(case.rows, (50, 2))]
    graph.replay()
    case.check(result, True)
