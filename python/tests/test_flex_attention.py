"""imbrex.torch.flex_attention against PyTorch's own, and what cannot be traced."""
import math
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
import imbrex.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from imbrex import _expressions, _flex_attention  # noqa: E402
from torch.nn.attention.flex_attention import (  # noqa: E402
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

B, H, SQ, SK, D = 2, 4, 150, 150, 64
torch.manual_seed(3)
DOCUMENTS = torch.sort(torch.randint(0, 5, (B, SK)), dim=1).values
PREFIX = torch.tensor([20, 70])
SLOPES = torch.rand(H)
BIAS = torch.randn(H, SQ, SK)
SHOWN = torch.rand(SK) < 0.7


def causal(b, h, q, kv):
    return q >= kv


def window(b, h, q, kv):
    return (q >= kv) & (q - kv < 30)


def documents(b, h, q, kv):
    return (DOCUMENTS[b, q] == DOCUMENTS[b, kv]) & (q >= kv)


def prefix(b, h, q, kv):
    return (kv < PREFIX[b]) | (q >= kv)


def of_heads(b, h, q, kv):
    return torch.where(h % 2 == 0, q >= kv, torch.abs(q - kv) < 9)


def columns(b, h, q, kv):
    return SHOWN[kv] | ~(q < kv)


def scaled(score, b, h, q, kv):
    return score * 1.5


def capped(score, b, h, q, kv):
    return 20 * torch.tanh(score / 20)


def alibi(score, b, h, q, kv):
    return score + SLOPES[h] * (kv - q)


def biased(score, b, h, q, kv):
    return score + BIAS[h, q, kv]


def hidden(score, b, h, q, kv):
    return torch.where(q >= kv, score, -float("inf"))


def roots(score, b, h, q, kv):
    return score - (torch.clamp(q - kv, min=0) / 4).sqrt() - torch.minimum(kv, q) // 7 % 2


MASKS, SCORES = [causal, window, documents, prefix, of_heads, columns], [scaled, capped, alibi, biased, hidden, roots]


def tensors(sq=SQ, sk=SK, kv_heads=H):
    return torch.randn(B, H, sq, D), torch.randn(B, kv_heads, sk, D), torch.randn(B, kv_heads, sk, D)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mask_mod", MASKS)
def test_masks(mask_mod):
    q, k, v = tensors()
    block_mask = create_block_mask(mask_mod, B, H, SQ, SK, device="cpu")
    expected = flex_attention(q, k, v, block_mask=block_mask)
    close(imbrex.torch.flex_attention(q, k, v, block_mask=block_mask), expected)
    close(imbrex.torch.flex_attention(q, k, v, block_mask=mask_mod), expected)


@pytest.mark.parametrize("score_mod", SCORES)
def test_scores(score_mod):
    q, k, v = tensors()
    close(imbrex.torch.flex_attention(q, k, v, score_mod), flex_attention(q, k, v, score_mod))


def test_both_with_groups_scale_and_lse():
    q, k, v = tensors(kv_heads=2)
    block_mask = create_block_mask(documents, B, H, SQ, SK, device="cpu")
    options = dict(block_mask=block_mask, scale=0.3, enable_gqa=True, return_lse=True)
    for ours, theirs in zip(imbrex.torch.flex_attention(q, k, v, alibi, **options), flex_attention(q, k, v, alibi, **options)):
        close(ours, theirs)


@pytest.mark.parametrize("sq,sk", [(40, 150), (150, 40), (1, 150)])
def test_indices_count_from_zero(sq, sk):
    q, k, v = tensors(sq, sk)
    close(
        imbrex.torch.flex_attention(q, k, v, alibi, lambda b, h, i, j: i + 20 >= j),
        flex_attention(q, k, v, alibi, create_block_mask(lambda b, h, i, j: i + 20 >= j, B, H, sq, sk, device="cpu")),
    )


def test_tensors_of_a_call_are_that_call_s():
    q, k, v = tensors()
    for slopes in (torch.rand(H), torch.rand(H)):
        score_mod = lambda s, b, h, i, j: s + slopes[h] * (j - i)  # noqa: E731
        close(imbrex.torch.flex_attention(q, k, v, score_mod), flex_attention(q, k, v, score_mod))


def test_texts():
    traced = _expressions.trace_mask_mod(lambda b, h, i, j: (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (j % 3 != 1), 10, 12)
    assert traced.text == "int t0[,]; ((t0[batch, (q - 2)] == t0[batch, kv]) & ((kv % 3) != 1))"
    assert traced.tensors["t0"].dtype == torch.int32
    assert _expressions.trace_score_mod(lambda s, b, h, i, j: s - 2, 5, 5).text == "(score - 2)"


@pytest.mark.parametrize(
    "score_mod,what",
    [
        (lambda s, b, h, i, j: s if i > j else -s, "a branch"),
        (lambda s, b, h, i, j: torch.lgamma(s), "the function lgamma"),
        (lambda s, b, h, i, j: s.unsqueeze(0), "the function unsqueeze"),
        (lambda s, b, h, i, j: s + BIAS[h], "1 indices"),
        (lambda s, b, h, i, j: s + SLOPES, "not indexed"),
        (lambda s, b, h, i, j: "text", "a result"),
        (lambda s, b, h, i, j: s**2.5, "powers"),
        (lambda s, b, h, i, j: s & 1, "& of floats"),
        (lambda s, b, h, i, j: s + BIAS[h, :, j], "no ints"),
        (lambda s, b, h, i, j: s + s.new_zeros(3), "a new tensor"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(score_mod, what):
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match=what):
        imbrex.torch.flex_attention(q, k, v, score_mod)


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = tensors(kv_heads=2)
    with pytest.raises(ValueError, match="enable_gqa"):
        imbrex.torch.flex_attention(q, k, v)
    with pytest.raises(ValueError, match="do not fit"):
        imbrex.torch.flex_attention(q, k[..., :32], v, enable_gqa=True)
    with pytest.raises(RuntimeError):
        imbrex.torch.flex_attention(q.requires_grad_(), k, v, enable_gqa=True).sum()


TABLE = torch.randn(B, H, SQ, SK)
INTERVALS = torch.tensor([[0, 60], [20, 130], [0, 0], [90, 150], [140, 150]])
FUNCTIONS = {
    "waves": lambda s, b, h, i, j: torch.sin(torch.cos(s)) + torch.tan(b),
    "powers": lambda s, b, h, i, j: s**3 + (j - i) * 2 ** (-((h + 1) * 8.0 / H)) + torch.rsqrt(s * s + 1) + (s.abs() + 1) ** -1,
    "of two": lambda s, b, h, i, j: s * torch.exp2(-((h + 1) * 8.0 / H)) + torch.log2(s.abs() + 1) + torch.log10(s * s + 1),
    "near one": lambda s, b, h, i, j: torch.log1p(s.abs()) + torch.expm1(-s.abs()) + torch.reciprocal(s * s + 1),
    "whole": lambda s, b, h, i, j: torch.round(s * 2) / 2 + torch.trunc(s) + torch.ceil(s) + torch.sign(s) + torch.frac(s),
    "quotients": lambda s, b, h, i, j: s + torch.fmod(i - j, 7) + torch.div(i - j, 5, rounding_mode="trunc") + torch.remainder(i - j, 3),
    "bits": lambda s, b, h, i, j: torch.where(((i ^ j) & 3) == 0, s, s - 1) + ((i << 1 | j >> 2) % 5) + (~j % 3),
    "likes": lambda s, b, h, i, j: torch.where(i >= j, s, torch.full_like(s, -1e9)) + torch.zeros_like(s) + s.new_full((), 2.0),
    "types": lambda s, b, h, i, j: s + (i > j).float() + (i - j).to(s.dtype) * 0.01 + (i == j).type_as(s) + s.long() * 0.1,
    "logical": lambda s, b, h, i, j: torch.where(torch.logical_and(i - j, torch.logical_not(b)), s, s * 0.5),
    "fill": lambda s, b, h, i, j: s.masked_fill((i < j) | torch.isnan(s) | torch.isinf(s), -math.inf),
    "activations": lambda s, b, h, i, j: F.gelu(s)
    + F.silu(s)
    + F.relu(s)
    + F.softplus(s, 2.0)
    + F.elu(s, 0.5)
    + F.leaky_relu(s)
    + F.gelu(s, approximate="tanh"),
    "four dimensions": lambda s, b, h, i, j: s + TABLE[b, h, i, j],
    "one index after another": lambda s, b, h, i, j: s + TABLE[b][h, i][j] + BIAS[0][i][j] + torch.ops.aten.index(BIAS, [h, i, j]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    q, k, v = tensors()
    close(imbrex.torch.flex_attention(q, k, v, FUNCTIONS[name]), flex_attention(q, k, v, FUNCTIONS[name]))


def in_interval(b, h, q, kv):
    first, last = INTERVALS[kv // 30]
    return (q >= first) & (q < last) | (q == kv)


@pytest.mark.parametrize("mask_mod", [and_masks(causal, columns), or_masks(prefix, window), noop_mask, in_interval])
def test_masks_of_masks(mask_mod):
    test_masks(mask_mod)


def lists(blocks, size, mask_mod=None, full=None):
    """A BlockMask of blocks, bool [b, h, rows, columns]."""
    sort = lambda x: (x.sum(-1).int(), torch.argsort(~x, dim=-1, stable=True).int())  # noqa: E731
    length = (blocks.shape[2] * size[0], blocks.shape[3] * size[1])
    return BlockMask.from_kv_blocks(*sort(blocks), *((None, None) if full is None else sort(full)), size, mask_mod, seq_lengths=length)


@pytest.mark.parametrize("heads", [1, H])
@pytest.mark.parametrize("mask_mod", [None, causal])
def test_lists_count_where_they_hide_what_the_function_shows(heads, mask_mod):
    draw = torch.Generator().manual_seed(heads)
    blocks, full = (torch.rand((B, heads, 4, 5), generator=draw) < 0.5 for _ in range(2))
    block_mask = lists(blocks & ~full, (32, 16), mask_mod, full)
    q, k, v = tensors(128, 80)
    seen = lambda x: x.repeat_interleave(32, 2).repeat_interleave(16, 3)  # noqa: E731
    inside = torch.ones(128, 80, dtype=torch.bool) if mask_mod is None else torch.arange(128)[:, None] >= torch.arange(80)
    scores = (q @ k.transpose(2, 3) / 8).masked_fill(~(seen(full) | seen(blocks) & inside), -math.inf)
    close(imbrex.torch.flex_attention(q, k, v, block_mask=block_mask), torch.nan_to_num(torch.softmax(scores, -1)) @ v)
    block_mask.full_kv_num_blocks.zero_()  # what is written to the lists afterwards counts too
    scores = (q @ k.transpose(2, 3) / 8).masked_fill(~(seen(blocks & ~full) & inside), -math.inf)
    close(imbrex.torch.flex_attention(q, k, v, block_mask=block_mask), torch.nan_to_num(torch.softmax(scores, -1)) @ v)


def test_lists_that_say_what_the_function_says_are_not_asked():
    for mask_mod in MASKS:
        block_mask = create_block_mask(mask_mod, B, H, SQ, SK, device="cpu", BLOCK_SIZE=(16, 32))
        assert _flex_attention._mask_mod_of(block_mask, SQ, SK) is mask_mod
    with pytest.raises(ValueError, match="expected blocks of 150 queries, got 2 of 64"):
        imbrex.torch.flex_attention(*tensors(), block_mask=lists(torch.ones(1, 1, 2, 3, dtype=torch.bool), (64, 64)))


def test_lists_that_are_replaced_or_made_in_inference_mode():
    q, k, v = tensors(128, 128)
    blocks = torch.eye(4, dtype=torch.bool)[None, None]
    with torch.inference_mode():
        block_mask = lists(blocks, (32, 32))
        out = imbrex.torch.flex_attention(q, k, v, block_mask=block_mask)
    close(out[:, :, :32], flex_attention(q[:, :, :32], k[:, :, :32], v[:, :, :32]))
    block_mask.kv_indices = block_mask.kv_indices.flip(2).contiguous()
    out = imbrex.torch.flex_attention(q, k, v, block_mask=block_mask)
    close(out[:, :, :32], flex_attention(q[:, :, :32], k[:, :, 96:], v[:, :, 96:]))


def test_keys_of_one_request_for_all():
    q, k, v = tensors()
    block_mask = create_block_mask(documents, B, H, SQ, SK, device="cpu")
    close(imbrex.torch.flex_attention(q, k[:1], v[:1], block_mask=block_mask), flex_attention(q, k[:1], v[:1], block_mask=block_mask))


def test_further_outputs():
    q, k, v = tensors()
    assert imbrex.torch.flex_attention(q, k, v, return_aux=AuxRequest())[1].lse is None
    aux = imbrex.torch.flex_attention(q, k, v, kernel_options={"BLOCK_M": 64}, return_aux=AuxRequest(lse=True))[1]
    close(aux.lse, torch.logsumexp(q @ k.transpose(2, 3) / 8, -1))
    with pytest.raises(NotImplementedError, match="max_scores"):
        imbrex.torch.flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    with pytest.raises(ValueError, match="one of the two"):
        imbrex.torch.flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True))


def test_threads_have_plans_of_their_own():
    given = [tensors() for _ in range(4)]
    expected = [flex_attention(*x, block_mask=create_block_mask(causal, B, H, SQ, SK, device="cpu")) for x in given]

    def work(first):
        return [imbrex.torch.flex_attention(*given[(first + i) % 4], block_mask=causal) for i in range(20)]

    with ThreadPoolExecutor(6) as pool:
        for first, outputs in enumerate(pool.map(work, range(6))):
            for i, out in enumerate(outputs):
                close(out, expected[(first + i) % 4])
