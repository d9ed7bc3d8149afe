"""Shapes, types and devices of the torch functions are checked before any kernel reads a tensor, by the names of their arguments."""
import pytest

torch = pytest.importorskip("torch")

import imbrex  # noqa: E402
import imbrex.torch  # noqa: E402
from imbrex import _torch_attention, flash_attn  # noqa: E402


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def randn(*sizes, **options):
    return torch.randn(*sizes, **options)


def dense(q=(2, 4, 7, 32), k=(2, 2, 9, 32), v=(2, 2, 9, 32), mask=None, **options):
    return lambda: imbrex.torch.attention(randn(*q), randn(*k), randn(*v), mask, **options)


WRONG = {
    "batch of k": (dense(k=(1, 2, 9, 32)), r"k: expected \[2, \*, \*, 32\], got \[1, 2, 9, 32\]"),
    "batch of q": (dense(q=(1, 4, 7, 32)), r"k: expected \[1, \*, \*, 32\], got \[2, 2, 9, 32\]"),
    "far larger batch of q": (dense(q=(64, 4, 1, 32), k=(1, 2, 9, 32), v=(1, 2, 9, 32)), "k: expected"),
    "batch of v": (dense(v=(1, 2, 9, 32)), r"v: expected \[2, 2, 9, \*\], got \[1, 2, 9, 32\]"),
    "keys of v": (dense(v=(2, 2, 8, 32)), r"v: expected \[2, 2, 9, \*\]"),
    "heads of v": (dense(v=(2, 1, 9, 32)), r"v: expected \[2, 2, 9, \*\]"),
    "head_dim of k": (dense(k=(2, 2, 9, 16)), r"k: expected \[2, \*, \*, 32\]"),
    "dimensions of q": (dense(q=(7, 4, 32)), r"q: expected \[\*, \*, \*, \*\], got \[7, 4, 32\]"),
    "dimensions of k": (dense(k=(2, 9, 32)), "k: expected"),
    "type of v": (
        lambda: imbrex.torch.attention(randn(1, 2, 3, 32), randn(1, 2, 3, 32), randn(1, 2, 3, 32).half()),
        "v: expected float32, got float16",
    ),
    "device of k": (
        lambda: _torch_attention.dense(randn(1, 2, 3, 32), *(randn(1, 2, 3, 32, device="meta") for _ in "kv"), _torch_attention.Score()),
        "k: expected a tensor on cpu",
    ),
    "float mask": (dense(mask=torch.zeros(2, 1, 7, 9)), "mask: expected bool or uint8, got float32"),
    "batch of mask": (dense(mask=torch.ones(3, 1, 7, 9, dtype=torch.bool)), r"mask: expected \[2, 1, 7, 9\], got \[3, 1, 7, 9\]"),
    "keys of mask": (dense(mask=torch.ones(1, 1, 7, 8, dtype=torch.bool)), r"mask: expected \[1, 1, 7, 9\], got \[1, 1, 7, 8\]"),
    "heads of mask": (dense(mask=torch.ones(2, 4, 7, 9, dtype=torch.bool)), r"mask: expected \[2, 1, 7, 9\]"),
    "dimensions of mask": (dense(mask=torch.ones(7, 9, dtype=torch.bool)), r"mask: expected \[2, 1, 7, 9\], got \[7, 9\]"),
    "flash-attn's batch": (lambda: flash_attn.flash_attn_func(randn(2, 7, 4, 32), randn(1, 9, 2, 32), randn(1, 9, 2, 32)), "k"),
    "flash-attn's larger batch": (lambda: flash_attn.flash_attn_func(randn(1, 7, 4, 32), randn(2, 9, 2, 32), randn(2, 9, 2, 32)), "k"),
    "ragged q": (
        lambda: imbrex.torch.varlen_attention(randn(7, 32), randn(9, 2, 32), randn(9, 2, 32), int32(0, 7), int32(0, 9), 7, 9),
        "q: expected",
    ),
    "ragged v": (
        lambda: imbrex.torch.varlen_attention(randn(7, 4, 32), randn(9, 2, 32), randn(8, 2, 32), int32(0, 7), int32(0, 9), 7, 9),
        "v: expected",
    ),
    "pages": (
        lambda: imbrex.torch.paged_attention(randn(1, 4, 32), randn(3, 16, 2, 32), randn(2, 16, 2, 32), int32(0, 1), int32(9), int32(0)[None], 1, 9),
        r"v_cache: expected \[3, 16, 2, \*\]",
    ),
    "new keys": (
        lambda: imbrex.torch.write_kv(randn(3, 16, 2, 32), randn(3, 16, 2, 32), randn(2, 1, 32), randn(2, 2, 32), torch.arange(2)),
        r"k: expected \[2, 2, 32\]",
    ),
    "new values": (
        lambda: imbrex.torch.write_kv(randn(3, 16, 2, 32), randn(3, 16, 2, 32), randn(2, 2, 32), randn(1, 2, 32), torch.arange(2)),
        r"v: expected \[2, 2, 32\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name):
    call, text = WRONG[name]
    with torch.no_grad(), pytest.raises((ValueError, imbrex.Error), match=text):
        call()


# Keys beyond the rows of k and v.
RAGGED = {"too long": (0, 900), "too far": (5, 14), "far beyond": (100000000, 100000009), "below": (-4, 5)}


@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("surface", ["attention_varlen", "torch.varlen_attention", "flash_attn", "Plan"])
def test_ragged_keys_stay_within_their_rows(surface, name):
    q, k, v, starts, kv_starts = randn(7, 4, 32), randn(9, 2, 32), randn(9, 2, 32), int32(0, 7), int32(*RAGGED[name])
    longest = RAGGED[name][1] - RAGGED[name][0]
    with torch.no_grad(), pytest.raises(imbrex.Error):
        if surface == "attention_varlen":
            imbrex.attention_varlen(q, k, v, starts, kv_starts)
        elif surface == "torch.varlen_attention":
            imbrex.torch.varlen_attention(q, k, v, starts, kv_starts, 7, longest)
        elif surface == "flash_attn":
            flash_attn.flash_attn_varlen_func(q, k, v, starts, kv_starts, 7, longest)
        else:
            plan = imbrex.Plan(imbrex.AttentionSpec(4, 2, 32, q_dtype="f32", block_size=0, kind="encoder_decoder", causal=False), max_seq_len=1024)
            plan.update(starts, kv_starts.diff(), kv_start_loc=kv_starts)
            plan.run(q, (k, v))


def test_the_default_device_does_not_matter():
    """Tensors of the host are made on the host, whatever torch.set_default_device says."""
    q, k, v = randn(2, 4, 5, 32), randn(2, 2, 9, 32), randn(2, 2, 9, 32)
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    cache, slots, table = randn(4, 16, 2, 32), torch.arange(9), int32(0)[None]
    mask, starts, kv_starts, lens = torch.rand(2, 1, 5, 9) > 0.5, int32(0, 5), int32(0, 9), int32(9)

    def calls():
        pages = cache.clone()
        imbrex.torch.write_kv(pages, pages.clone(), rows[1], rows[2], slots)
        return [
            imbrex.torch.attention(q, k, v, causal=True),
            imbrex.torch.attention(q, k, v, mask),
            imbrex.torch.attention(q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
            imbrex.torch.varlen_attention(*rows, starts, kv_starts, 5, 9),
            imbrex.torch.paged_attention(rows[0], pages, pages, starts, lens, table, 5, 9),
            imbrex.attention_varlen(*rows, starts, kv_starts),
            imbrex.attention_paged(rows[0], pages, pages, starts, lens, table),
            imbrex.merge_state(rows[0], torch.zeros(5, 4, device="cpu"), rows[0], torch.zeros(5, 4, device="cpu"))[0],
        ]

    expected = calls()
    torch.set_default_device("meta")
    _torch_attention._equal_on_host.cache_clear()
    _torch_attention._equal_starts_on_host.cache_clear()
    try:
        found = calls()
    finally:
        torch.set_default_device(None)
    for a, b in zip(found, expected):
        assert a.device.type == "cpu" and torch.equal(a, b)


def test_a_mask_may_be_one_row_for_all_queries():
    q, k, v = randn(2, 4, 7, 32), randn(2, 2, 9, 32), randn(2, 2, 9, 32)
    for shape in ((2, 1, 1, 9), (1, 1, 1, 9), (1, 1, 7, 9)):
        mask = torch.rand(shape) > 0.3
        whole = mask.expand(2, 1, 7, 9).contiguous()
        assert torch.equal(imbrex.torch.attention(q, k, v, mask), imbrex.torch.attention(q, k, v, whole))
