"""imbrex.torch.flex_attention against PyTorch's own, and what cannot be traced."""
import pytest

torch = pytest.importorskip("torch")
import imbrex.torch  # noqa: E402
from imbrex import _expressions  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

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
        (lambda s, b, h, i, j: torch.sin(s), "the function sin"),
        (lambda s, b, h, i, j: s + BIAS[h], "1 indices"),
        (lambda s, b, h, i, j: s + SLOPES, "not indexed"),
        (lambda s, b, h, i, j: "text", "a result"),
        (lambda s, b, h, i, j: s**3, "powers"),
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
