"""imbrex.flash_attn against the definition, with flash-attn's layouts [b, s, h, d] and options."""
import functools
import inspect

import pytest

torch = pytest.importorskip("torch")

import imbrex  # noqa: E402
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
    dict(causal=True, alibi=1),
    dict(alibi=1),
    dict(alibi=2, window_size=(6, 2), softcap=9.0),
    dict(alibi=2, causal=True),
]


def both(options, batch, heads, device):
    """Options as flash-attn names them, and as the reference does. alibi: dimensions of the slopes, which may be one row for each request."""
    ours = dict(options)
    theirs = dict(
        causal=ours.get("causal", False),
        window=ours.get("window_size", (-1, -1)),
        scale=ours.get("softmax_scale"),
        soft_cap=ours.get("softcap", 0.0),
    )
    dims = ours.pop("alibi", 0)
    if dims:
        ours["alibi_slopes"] = theirs["falling_slopes"] = torch.rand((batch, heads)[-dims:], device=device)
    return ours, theirs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(device, dtype, options):
    torch.manual_seed(1)
    for b, sq, sk, d in ((2, 5, 11, 64), (1, 9, 9, 40), (3, 1, 20, 72), (2, 6, 3, 20)):
        ours, theirs = both(options, b, 4, device)
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
    ours, theirs = both(options, 5, 4, device)
    slopes = theirs.pop("falling_slopes", None)
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
        falling = slopes if slopes is None or slopes.dim() == 1 else slopes[r]
        expected, expected_lse = reference(*(x[None].transpose(1, 2) for x in (q[one], k[own], v[own])), falling_slopes=falling, **theirs)
        near(out[one], expected[0].transpose(0, 1))
        near(lse[:, one], expected_lse[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_expanded_keys(device, dtype):
    """k and v that all requests or heads share, without memory of their own."""
    torch.manual_seed(5)
    q = torch.randn(3, 5, 4, 64, device=device).to(dtype)
    for shape in ((1, 7, 1, 64), (1, 7, 2, 64), (3, 7, 1, 64), (1, 1, 1, 64)):
        shared = torch.randn(shape, device=device).to(dtype)
        k = v = shared.expand(3, 7, max(shape[2], 2) if shape[0] == 3 else shape[2], 64)
        expected, _ = reference(*swap(q, k, v), causal=True)
        near(flash_attn.flash_attn_func(q, k, v, causal=True).transpose(1, 2), expected)
        starts = [torch.arange(4, dtype=torch.int32, device=device) * n for n in (5, 7)]
        flat = shared[:, :1].expand(3, 7, 2, 64)[0] if shape[2] == 1 else k[0]
        out = flash_attn.flash_attn_varlen_func(q[0], flat, flat, starts[0][:2], starts[1][:2], 5, 7)
        near(out.transpose(0, 1)[None], reference(*swap(q[:1], flat[None], flat[None]))[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alibi", [None, 1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_at_all(device, alibi, causal):
    q, k = torch.randn(5, 4, 64, device=device), torch.randn(0, 2, 64, device=device)
    slopes = None if alibi is None else torch.rand((2, 4)[-alibi:], device=device)
    starts = [torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 2, 5], [0, 0, 0])]
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, k, *starts, 3, 0, causal=causal, alibi_slopes=slopes, return_attn_probs=True)
    assert torch.equal(out, torch.zeros_like(q)) and torch.equal(lse, torch.full((4, 5), float("-inf"), device=device))


def test_what_is_not_there_is_refused_by_name():
    q, k, v = (x.contiguous() for x in swap(*arrays("cpu", torch.float32, 2, 4, 2, 3, 8, 32)))
    with pytest.raises(NotImplementedError, match="dropout"):
        flash_attn.flash_attn_func(q, k, v, 0.1)
    with pytest.raises(NotImplementedError, match="backward"):
        flash_attn.flash_attn_func(q.clone().requires_grad_(), k, v)
    k_cache = k.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="backward"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v)
    for name in ("fwd", "varlen_fwd", "fwd_kvcache"):
        with pytest.raises(NotImplementedError, match=f"flash_attn_2_cuda.{name} is not there"):
            getattr(flash_attn.flash_attn_gpu, name)(q, k, v)
    for name in ("_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward", "_flash_attn_varlen_backward"):
        with pytest.raises(NotImplementedError, match=f"imbrex.flash_attn: {name} is not there: .+"):
            getattr(flash_attn.flash_attn_interface, name)(q, k, v)


def wrong(match):
    return pytest.raises(ValueError, match="imbrex.flash_attn: " + match)


def test_wrong_arguments_are_named():
    q, k, v = (x.contiguous() for x in swap(*arrays("cpu", torch.float32, 2, 4, 2, 3, 8, 32)))
    starts, kv_starts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32)
    with wrong(r"q: expected \[batch, seqlen_q, heads, d\], got \[3, 4, 32\]"):
        flash_attn.flash_attn_func(q[0], k, v)
    with wrong(r"k: expected a batch of 2, as q has, got \[1, 8, 2, 32\]"):
        flash_attn.flash_attn_func(q, k[:1], v[:1])
    with wrong(r"v: expected a batch of 1, as q has, got \[2, 8, 2, 32\]"):
        flash_attn.flash_attn_func(q[:1], k[:1], v)
    for shape in ((3,), (3, 4), (1, 2, 4)):
        with wrong(r"alibi_slopes: expected \[4\] or \[2, 4\], got"):
            flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.rand(shape))
    varlen = functools.partial(flash_attn.flash_attn_varlen_func, q[0], k[0], v[0])
    with wrong(r"cu_seqlens_q: expected contiguous torch.int32 \[batch \+ 1\], got torch.int64"):
        varlen(starts.long(), kv_starts, 3, 8)
    with wrong(r"cu_seqlens_k: expected contiguous torch.int32 \[2\], got torch.int32 \[3\]"):
        varlen(starts, torch.tensor([0, 4, 8], dtype=torch.int32), 3, 8)
    with wrong(r"k: expected \[total_k, heads_k, d\], got \[2, 8, 2, 32\]"):
        flash_attn.flash_attn_varlen_func(q[0], k, v, starts, kv_starts, 3, 8)
    with wrong(r"k: expected \[num_blocks, page_size, heads_k, d\], got \[8, 2, 32\]"):
        varlen(starts, kv_starts, 3, 8, block_table=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(imbrex.Error, match="needs 2 blocks of 8"):
        long = torch.tensor([0, 9], dtype=torch.int32)
        flash_attn.flash_attn_varlen_func(q[0], k, v, starts, long, 3, 9, block_table=torch.zeros(1, 1, dtype=torch.int32))
