"""imbrex.torch.flex_attention with tensors on a GPU against PyTorch's own in double precision: functions and lists that read tensors there, and other streams."""
import math

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import imbrex.torch  # noqa: E402
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention  # noqa: E402

CUDA = torch.device("cuda", 0)
B, H, S, D = 2, 4, 300, 64
torch.manual_seed(3)
DOCUMENTS = torch.sort(torch.randint(0, 5, (B, S), device=CUDA), dim=1).values
SLOPES = torch.rand(H, device=CUDA)


def documents(b, h, q, kv):
    return (DOCUMENTS[b, q] == DOCUMENTS[b, kv]) & (q >= kv)


def alibi(score, b, h, q, kv):
    return score + SLOPES[h] * (kv - q)


def tensors(dtype=torch.bfloat16, heads=2):
    return [torch.randn(B, n, S, D, device=CUDA).to(dtype) for n in (H, heads, heads)]


def near(got, expected):
    assert float((got.double() - expected).abs().amax() / expected.abs().amax()) < 1.2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("as_function", [True, False])
def test_functions_of_tensors_on_the_gpu(dtype, as_function):
    q, k, v = tensors(dtype)
    blocks = create_block_mask(documents, B, H, S, S, device=CUDA)
    expected = flex_attention(q.double(), k.double(), v.double(), alibi, blocks, enable_gqa=True)
    near(imbrex.torch.flex_attention(q, k, v, alibi, documents if as_function else blocks, enable_gqa=True), expected)


def test_lists_of_blocks_on_the_gpu():
    q, k, v = tensors(heads=H)
    seen = torch.rand(B, H, 5, 3, device=CUDA) < 0.5
    seen[..., 0] = True
    counts, indices = seen.sum(-1).int(), torch.argsort(~seen, dim=-1, stable=True).int()
    blocks = BlockMask.from_kv_blocks(counts, indices, None, None, (64, 128), None, seq_lengths=(S, S))
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(D)
    shown = seen.repeat_interleave(64, 2).repeat_interleave(128, 3)[:, :, :S, :S]
    near(imbrex.torch.flex_attention(q, k, v, block_mask=blocks), torch.softmax(scores.masked_fill(~shown, -math.inf), -1) @ v.double())


def test_calls_of_other_streams():
    """Each call waits for nothing but its own stream, where its tensors are made."""
    blocks = create_block_mask(documents, B, H, S, S, device=CUDA)
    calls = []
    for stream in [torch.cuda.Stream() for _ in range(3)] * 4:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            q, k, v = tensors()
            calls.append((q, k, v, imbrex.torch.flex_attention(q, k, v, alibi, blocks, enable_gqa=True)))
    torch.cuda.synchronize()
    for q, k, v, out in calls:
        near(out, flex_attention(q.double(), k.double(), v.double(), alibi, blocks, enable_gqa=True))
