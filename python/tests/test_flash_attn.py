"""imbrex.flash_attn against the definition, with flash-attn's layouts [b, s, h, d] and options."""
import inspect

import pytest

torch = pytest.importorskip("torch")

from imbrex import flash_attn  # noqa: E402
from torch_reference import DEVICES, TOLERANCE, arrays, near, paged, reference  # noqa: E402

# Parameters of flash-attn 2.8 with their defaults.
COMMON = dict(dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False)
COMMON.update(return_attn_probs=False)
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    "flash_attn_func": (["q", "k", "v"], COMMON),
    "flash_attn_qkvpacked_func": (["qkv"], COMMON),
    "flash_attn_kvpacked_func": (["q", "kv"], COMMON),
    "flash_attn_varlen_func": (["q", "k", "v", *LENGTHS], dict(COMMON, block_table=None)),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], COMMON),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *LENGTHS], COMMON),
    "flash_attn_with_kvcache": (
        ["q", "k_cache", "v_cache"],
        dict(
            k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None,
            softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
            return_softmax_lse=False,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    required, optional = SIGNATURES[name]
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == [*required, *optional]
    assert {n: p.default for n, p in parameters.items() if p.default is not p.empty} == optional


def swap(*tensors):
    return [x.transpose(1, 2) for x in tensors]


OPTIONS = [
    {},
    dict(causal=True),
    dict(causal=True, window_size=(3, 0), softcap=7.0),
    dict(window_size=(2, 4), softmax_scale=0.2),
    dict(causal=True, alibi=True),
]


def both(options, heads, device):
    """Options as flash-attn names them, and as the reference does."""
    ours = dict(options)
    theirs = dict(
        causal=ours.get("causal", False),
        window=ours.get("window_size", (-1, -1)),
        scale=ours.get("softmax_scale"),
        soft_cap=ours.get("softcap", 0.0),
    )
    if ours.pop("alibi", False):
        ours["alibi_slopes"] = theirs["alibi_slopes"] = torch.rand(heads, device=device)
    return ours, theirs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(device, dtype, options):
    torch.manual_seed(1)
    ours, theirs = both(options, 4, device)
    for b, sq, sk, d in ((2, 5, 11, 64), (1, 9, 9, 40), (3, 1, 20, 72), (2, 6, 3, 20)):
        q, k, v = arrays(device, dtype, b, 4, 2, sq, sk, d)
        if d % 8:
            theirs = dict(theirs, scale=theirs["scale"] or d ** -0.5)
        out, lse, weights = flash_attn.flash_attn_func(*swap(q, k, v), return_attn_probs=True, **ours)
        expected, expected_lse = reference(q, k, v, **theirs)
        near(out.transpose(1, 2), expected)
        near(lse, expected_lse, 3e-2 if dtype == torch.bfloat16 else TOLERANCE[dtype])
        assert weights is None
        kv = torch.stack(swap(k, v), 2)
        assert torch.equal(out, flash_attn.flash_attn_kvpacked_func(q.transpose(1, 2), kv, **ours))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_in_one(device):
    torch.manual_seed(2)
    qkv = torch.randn(2, 7, 3, 4, 32, device=device)
    expected, _ = reference(*swap(*qkv.unbind(2)), causal=True)
    near(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True).transpose(1, 2), expected)
    starts = torch.tensor([0, 7, 14], dtype=torch.int32, device=device)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), starts, 7, causal=True)
    near(out.view(2, 7, 4, 32).transpose(1, 2), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_varlen(device, page_size, options):
    torch.manual_seed(3)
    ours, theirs = both(options, 4, device)
    q_lens, k_lens = [5, 1, 12, 0, 3], [9, 40, 12, 4, 2]
    starts, kv_starts = (torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device) for n in (q_lens, k_lens))
    q = torch.randn(sum(q_lens), 4, 64, device=device)
    k, v = (torch.randn(sum(k_lens), 2, 64, device=device) for _ in range(2))
    lengths = (starts, kv_starts, max(q_lens), max(k_lens))
    if page_size:
        padded = torch.full((5, 40, 4, 64), float("nan"), device=device)
        for r, n in enumerate(k_lens):
            padded[r, :n] = torch.cat((k, v), 1)[kv_starts[r] : kv_starts[r + 1]]
        cache, table = paged(padded, page_size)
        keys = (cache[:, :, :2], cache[:, :, 2:])
        out, lse, _ = flash_attn.flash_attn_varlen_func(q, *keys, *lengths, return_attn_probs=True, block_table=table, **ours)
    else:
        out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, return_attn_probs=True, **ours)
        assert torch.equal(out, flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *lengths, **ours))
    assert lse.shape == (4, sum(q_lens))
    for r in range(5):
        one, own = slice(starts[r], starts[r + 1]), slice(kv_starts[r], kv_starts[r + 1])
        expected, expected_lse = reference(*(x[None].transpose(1, 2) for x in (q[one], k[own], v[own])), **theirs)
        near(out[one], expected[0].transpose(0, 1))
        near(lse[:, one], expected_lse[0])


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


def test_what_is_not_there_is_refused_by_name():
    q, k, v = (x.contiguous() for x in swap(*arrays("cpu", torch.float32, 2, 4, 2, 3, 8, 32)))
    with pytest.raises(NotImplementedError, match="dropout"):
        flash_attn.flash_attn_func(q, k, v, 0.1)
    with pytest.raises(NotImplementedError, match="alibi_slopes of each request"):
        flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.rand(2, 4))
    with pytest.raises(NotImplementedError, match="alibi_slopes with keys after the query"):
        flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.rand(4))
    with pytest.raises(NotImplementedError, match="backward"):
        flash_attn.flash_attn_func(q.clone().requires_grad_(), k, v)
    with pytest.raises(NotImplementedError, match="cache_leftpad"):
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_leftpad=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="k with v"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k)
    with pytest.raises(ValueError, match="block_table or cache_batch_idx"):
        table = torch.zeros(2, 1, dtype=torch.int32)
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_batch_idx=table[0], block_table=table)
    with pytest.raises(ValueError, match="room for 8 tokens, got 9"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k[:, :3], v[:, :3], cache_seqlens=6)
