"""imbrex.flash_attn.flash_attn_with_kvcache: appended keys, rotary positions, pages, caches of any strides, and lengths beyond them."""
import functools

import pytest

torch = pytest.importorskip("torch")

from imbrex import flash_attn  # noqa: E402
from imbrex.flash_attn import _cache  # noqa: E402
from torch_reference import DEVICES, near, paged, reference  # noqa: E402


def rotated(x, cos, sin, positions, interleaved):
    """The definition, dim by dim: x [s, h, d]."""
    y, half = x.clone(), cos.shape[1]
    for t, position in enumerate(positions):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            c, s = cos[position, i], sin[position, i]
            y[t, :, a], y[t, :, b] = x[t, :, a] * c - x[t, :, b] * s, x[t, :, a] * s + x[t, :, b] * c
    return y


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("lens", [(20, 20, 20), (5, 0, 43)], ids=str)
@pytest.mark.parametrize("new", [(1, 1), (3, 3), (2, 4), (2, 0)], ids=str)
def test_cache(device, page_size, rotary, lens, new):
    torch.manual_seed(4)
    sq, sn = new
    if rotary and not sn:
        pytest.skip("rotary needs new keys")
    b, room = 3, 48
    q = torch.randn(b, sq, 4, 32, device=device)
    k, v = (torch.randn(b, sn, 2, 32, device=device) for _ in range(2))
    old = torch.full((b, room, 4, 32), float("nan"), device=device)
    for r, n in enumerate(lens):
        old[r, :n] = torch.randn(n, 4, 32, device=device)
    cos, sin = (f(torch.rand(64, 8, device=device) * 6) for f in (torch.cos, torch.sin)) if rotary else (None, None)
    options = dict(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=rotary == "interleaved", causal=True, return_softmax_lse=True)
    seqlens = lens[0] if len(set(lens)) == 1 else torch.tensor(lens, dtype=torch.int32, device=device)
    new_kv = (k, v) if sn else (None, None)
    if page_size:
        cache, table = paged(old, page_size)
        k_cache, v_cache = cache[:, :, :2].contiguous(), cache[:, :, 2:].contiguous()
        out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *new_kv, cache_seqlens=seqlens, block_table=table, **options)
        k_rows, v_rows = (torch.stack([c[table[r].long()].flatten(0, 1) for r in range(b)]) for c in (k_cache, v_cache))
    else:
        rows = torch.tensor([2, 0, 3], dtype=torch.int32, device=device)
        k_cache, v_cache = (torch.full((4, room, 2, 32), float("nan"), device=device) for _ in range(2))
        k_cache[rows.long()], v_cache[rows.long()] = old[:, :, :2], old[:, :, 2:]
        out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, *new_kv, cache_seqlens=seqlens, cache_batch_idx=rows, **options)
        k_rows, v_rows = k_cache[rows.long()], v_cache[rows.long()]
    for r, n in enumerate(lens):
        qr, kr = q[r], k[r]
        if rotary:
            qr = rotated(qr, cos, sin, range(n, n + sq), rotary == "interleaved")
            kr = rotated(kr, cos, sin, range(n, n + sn), rotary == "interleaved")
        keys, values = torch.cat((old[r, :n, :2], kr)), torch.cat((old[r, :n, 2:], v[r]))
        assert torch.isnan(k_rows[r, n + sn :]).all() and torch.equal(v_rows[r, : n + sn], values)
        near(k_rows[r, : n + sn], keys.double())
        expected, expected_lse = reference(*(x[None].transpose(1, 2) for x in (qr, keys, values)), causal=True)
        near(out[r], expected[0].transpose(0, 1))
        near(lse[r], expected_lse[0])


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def with_gaps(x, layout):
    """x [rows, tokens, heads, d] as a view of memory in which rows do not lie one after the other."""
    rows, tokens, heads, d = x.shape
    if layout == "part of rows":
        view = torch.full((rows, 2 * tokens, heads, d), float("nan"), device=x.device).to(x.dtype)[:, :tokens]
    elif layout == "head by head":
        view = torch.empty((rows, heads, tokens, d), device=x.device).to(x.dtype).transpose(1, 2)
    elif layout == "odd gaps":
        view = torch.empty(rows * (tokens * heads * d + 8), device=x.device).to(x.dtype)
        view = view.as_strided(x.shape, (tokens * heads * d + 8, heads * d, d, 1))
    else:
        view = torch.empty((rows, tokens, 2 * heads, d), device=x.device).to(x.dtype)[:, :, heads:]
    return view.copy_(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["part of rows", "head by head", "odd gaps", "half of the heads"])
@pytest.mark.parametrize("room", [64, 21, 200])
def test_caches_of_any_strides(device, layout, room):
    torch.manual_seed(6)
    lens, rows = (4, room - 1, 0), (3, 0, 1)
    q, k, v = (torch.randn(3, 1, h, 32, device=device) for h in (4, 2, 2))
    plain = [torch.randn(4, room, 2, 32, device=device) for _ in range(2)]
    v_layout = layout if layout != "half of the heads" else "part of rows"  # k and v need not be alike
    k_cache, v_cache = with_gaps(plain[0], layout), with_gaps(plain[1], v_layout)
    options = dict(cache_seqlens=ints(device, *lens), cache_batch_idx=ints(device, *rows), causal=True)
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options)
    for r, (row, n) in enumerate(zip(rows, lens)):
        plain[0][row, n], plain[1][row, n] = k[r, 0], v[r, 0]
        expected, _ = reference(*(x[None].transpose(1, 2) for x in (q[r], plain[0][row, : n + 1], plain[1][row, : n + 1])))
        near(out[r], expected[0].transpose(0, 1))
    assert torch.equal(k_cache, plain[0]) and torch.equal(v_cache, plain[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_leftpad(device, page_size, new):
    """Keys in front of cache_leftpad are not seen; rotary positions count from the beginning of the cache."""
    torch.manual_seed(7)
    lens, pads, room, sq = (9, 20, 33), (3, 0, 33), 48, 2
    q = torch.randn(3, sq, 4, 32, device=device)
    k, v = (torch.randn(3, new, 2, 32, device=device) for _ in range(2))
    cos, sin = (f(torch.rand(room, 8, device=device) * 6) for f in (torch.cos, torch.sin))
    old = torch.full((3, room, 4, 32), float("nan"), device=device)
    for r, n in enumerate(lens):
        old[r, pads[r] : n] = torch.randn(n - pads[r], 4, 32, device=device)
    options = dict(cache_seqlens=ints(device, *lens), cache_leftpad=ints(device, *pads), causal=True, return_softmax_lse=True)
    if new:
        options.update(k=k, v=v, rotary_cos=cos, rotary_sin=sin)
    if page_size:
        cache, options["block_table"] = paged(old, page_size)
        k_cache, v_cache = cache[:, :, :2].contiguous(), cache[:, :, 2:].contiguous()
    else:
        k_cache, v_cache = old[:, :, :2].contiguous(), old[:, :, 2:].contiguous()
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    for r, n in enumerate(lens):
        qr, kr = q[r], k[r]
        if new:
            qr, kr = rotated(qr, cos, sin, range(n, n + sq), True), rotated(kr, cos, sin, range(n, n + new), True)
        keys, values = torch.cat((old[r, pads[r] : n, :2], kr)), torch.cat((old[r, pads[r] : n, 2:], v[r]))
        expected, expected_lse = reference(*(x[None].transpose(1, 2) for x in (qr, keys, values)), causal=True)
        near(out[r], expected[0].transpose(0, 1))
        near(lse[r], expected_lse[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_rotary_of_queries_alone(device, causal):
    torch.manual_seed(8)
    q, k, v = (torch.randn(2, n, h, 32, device=device) for n, h in ((3, 4), (16, 2), (16, 2)))
    cos, sin = (f(torch.rand(16, 16, device=device) * 6) for f in (torch.cos, torch.sin))
    lens = (7, 16)
    rotary = dict(rotary_cos=cos[:16], rotary_sin=sin, rotary_interleaved=False)
    out = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=ints(device, *lens), causal=causal, **rotary)
    for r, n in enumerate(lens):
        positions = [min(n + i * causal, 15) for i in range(3)]
        qr = rotated(q[r], cos, sin, positions, False)
        expected, _ = reference(*(x[None].transpose(1, 2) for x in (qr, k[r, :n], v[r, :n])), causal=causal)
        near(out[r], expected[0].transpose(0, 1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alibi", [1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi_over_a_cache(device, alibi, causal):
    torch.manual_seed(9)
    lens, slopes = (5, 0, 11), torch.rand((3, 4)[-alibi:], device=device)
    q, k, v = (torch.randn(3, 2, h, 32, device=device) for h in (4, 2, 2))
    cache = torch.randn(2, 3, 16, 2, 32, device=device)
    old = cache.clone()
    options = dict(cache_seqlens=ints(device, *lens), causal=causal, alibi_slopes=slopes)
    out = flash_attn.flash_attn_with_kvcache(q, *cache, k, v, **options)
    for r, n in enumerate(lens):
        keys, values = torch.cat((old[0, r, :n], k[r])), torch.cat((old[1, r, :n], v[r]))
        falling = slopes if alibi == 1 else slopes[r]
        expected, _ = reference(*(x[None].transpose(1, 2) for x in (q[r], keys, values)), causal=causal, falling_slopes=falling)
        near(out[r], expected[0].transpose(0, 1))


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_lengths_beyond_the_cache_are_refused_on_the_host(table, new):
    q, cache = torch.randn(2, 1, 4, 32), torch.randn(2, 2, 64, 2, 32)
    before = cache.clone()
    more = dict(k=torch.randn(2, new, 2, 32), v=torch.randn(2, new, 2, 32)) if new else {}
    more.update(block_table=ints("cpu", [0], [1])) if table else None
    call = functools.partial(flash_attn.flash_attn_with_kvcache, q, *cache, **more)
    for seqlens in (65 - new, ints("cpu", 3, 65 - new)):
        with pytest.raises(ValueError, match=f"cache_seqlens: the cache has room for 64 tokens, got 65 for request ., {new} of them new"):
            call(cache_seqlens=seqlens)
    for seqlens in (-1, ints("cpu", 3, -1)):
        with pytest.raises(ValueError, match="cache_seqlens: expected 0 or more for request ., got -1"):
            call(cache_seqlens=seqlens)
    with pytest.raises(ValueError, match="cache_seqlens: expected 4 or more for request 1, got 3 with cache_leftpad 4"):
        call(cache_seqlens=3, cache_leftpad=ints("cpu", 0, 4))
    assert torch.equal(cache, before)


def test_tokens_without_a_place_have_no_slot():
    """What a GPU does with them, where nobody can look at lengths in time: their slot is -1, and no index leaves the table."""
    pages = _cache._Pages(*torch.empty(2, 6, 16, 2, 8), ints("cpu", [5, 2], [0, 9]))
    positions = torch.tensor([[0, 17, 31, 32, 1 << 30], [-1, 15, 16, 20, -17]])
    assert _cache.slots_of(pages, positions, 2).tolist() == [80, 33, 47, -1, -1, -1, 15, -1, -1, -1]  # page 9 is not there
    assert _cache.slots_of(pages, positions, torch.tensor([[1], [0]])).tolist() == [80, -1, -1, -1, -1, -1, -1, -1, -1, -1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_lengths_beyond_the_cache_on_a_gpu(table, new):
    """The others are right; what does not fit is not written, and its request has output 0."""
    torch.manual_seed(10)
    q, (k, v) = torch.randn(3, 1, 4, 32, device="cuda"), torch.randn(2, 3, new, 2, 32, device="cuda")
    cache = torch.randn(2, 4, 64, 2, 32, device="cuda")  # the last row is no request's
    before = cache.clone()
    more = dict(k=k, v=v) if new else {}
    more.update(block_table=ints("cuda", [0], [1], [2])) if table else None
    out, lse = flash_attn.flash_attn_with_kvcache(q, *cache, cache_seqlens=ints("cuda", 3, 64, 65), return_softmax_lse=True, causal=True, **more)
    for r, n in enumerate((3, 64)):
        if n + new > 64:
            continue
        keys, values = torch.cat((before[0, r, :n], k[r])), torch.cat((before[1, r, :n], v[r]))
        near(out[r], reference(*(x[None].transpose(1, 2) for x in (q[r], keys, values)), causal=True)[0][0].transpose(0, 1))
    lost = [1, 2] if new else [2]
    assert not out[lost].any() and torch.isneginf(lse[lost]).all()
    assert torch.equal(cache[:, 1:], before[:, 1:]) and torch.equal(cache[0, 0, 3 : 3 + new], k[0])
    torch.cuda.synchronize()


def test_wrong_arguments_of_a_cache_are_named():
    q, cache = torch.randn(2, 3, 4, 32), torch.randn(2, 8, 2, 32)
    call = functools.partial(flash_attn.flash_attn_with_kvcache, q, cache, cache)

    def wrong(match, **options):
        with pytest.raises(ValueError, match=match):
            call(**options)

    wrong("k with v", k=cache)
    wrong("rotary_cos with rotary_sin", rotary_cos=cache[0, :, 0])
    wrong("block_table or cache_batch_idx", cache_batch_idx=ints("cpu", 0, 1), block_table=ints("cpu", [0], [1]))
    wrong("cache_batch_idx: expected 0 to 1, rows of k_cache", cache_batch_idx=ints("cpu", 0, 2))
    wrong(r"cache_seqlens: expected contiguous torch.int32 \[2\], got torch.int64", cache_seqlens=torch.tensor([3, 3]))
    wrong(r"cache_leftpad: expected contiguous torch.int32 \[2\]", cache_leftpad=ints("cpu", 1))
    wrong(r"block_table: expected torch.int32 \[2, max_blocks\], got torch.int32 \[1, 1\]", block_table=ints("cpu", [0]))
    wrong(r"rotary_cos: expected 8 positions or more", rotary_cos=torch.ones(4, 8), rotary_sin=torch.ones(4, 8))
    wrong(r"rotary_dim <= 32", rotary_cos=torch.ones(8, 20), rotary_sin=torch.ones(8, 20))
    wrong(r"k: expected \[2, 1, heads_k, d\]", k=cache[:1, :1], v=cache[:1, :1])
    for shapes, match in (
        ([(2, 3, 4)] + [(2, 8, 2, 32)] * 2, r"q: expected \[batch, seqlen_q, heads, d\]"),
        ([(2, 3, 4, 32), (2, 8, 32), (2, 8, 32)], r"k_cache: expected \[batch_cache, seqlen_cache, heads_k, d\]"),
        ([(2, 3, 4, 32), (2, 8, 2, 32), (2, 9, 2, 32)], "v_cache: expected .* as k_cache has"),
        ([(3, 3, 4, 32), (2, 8, 2, 32), (2, 8, 2, 32)], "k_cache: expected 3 rows or more"),
    ):
        with pytest.raises(ValueError, match=match):
            flash_attn.flash_attn_with_kvcache(*(torch.randn(s) for s in shapes))
    with pytest.raises(NotImplementedError, match="k_cache with head_dim 59 is not there: make caches"):
        flash_attn.flash_attn_with_kvcache(*(torch.randn(2, 3, h, 59) for h in (4, 2, 2)))
