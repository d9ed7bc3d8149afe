"""imbrex.torch: operators against the definition, in the compiler, and in CUDA graphs."""
import pytest

torch = pytest.importorskip("torch")

import imbrex.torch  # noqa: E402
from torch_reference import DEVICES, arrays, near, paged, reference  # noqa: E402

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SHAPES = [(1, 4, 2, 5, 5, 64, 64), (3, 4, 2, 5, 9, 64, 64), (2, 8, 2, 1, 37, 32, 32), (2, 4, 4, 7, 3, 64, 64), (2, 4, 4, 19, 19, 48, 24)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd", "part"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(device, dtype, layout, shape):
    torch.manual_seed(hash((layout, shape)) % 1000)
    b, h, hk, sq, sk, d, dv = shape
    q, k, v = arrays(device, dtype, b, h, hk, sq, sk, d, dv, layout)
    sinks = torch.randn(h, device=device)
    for options in (
        {},
        dict(causal=True),
        dict(causal=True, window=(4, -1), soft_cap=5.0, sinks=sinks),
        dict(window=(2, 3), scale=0.3),
        dict(causal=True, alibi_slopes=torch.rand(h, device=device)),
        dict(mask=torch.rand(b, 1, sq, sk, device=device) > 0.4),
        dict(mask=torch.rand(1, 1, sq, sk, device=device) > 0.4, causal=True, sinks=sinks),
    ):
        out, lse = imbrex.torch.attention(q, k, v, return_lse=True, **options)
        expected, expected_lse = reference(q, k, v, **options)
        assert out.dtype == dtype
        near(out, expected)
        near(lse, expected_lse, 3e-2 if dtype == torch.bfloat16 else None)
        if layout == "bhsd":
            assert torch.equal(out, imbrex.torch.attention(q, k, v, **options))


@pytest.mark.parametrize("device", DEVICES)
def test_varlen_and_paged(device):
    torch.manual_seed(3)
    q_lens, seq_lens = [7, 1, 0, 4], [9, 33, 5, 4]
    q = torch.randn(sum(q_lens), 8, 64, device=device)
    k, v = (torch.randn(sum(seq_lens), 2, 64, device=device) for _ in range(2))
    starts, kv_starts = (torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device) for n in (q_lens, seq_lens))
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    padded = torch.zeros(4, 33, 4, 64, device=device)
    for r, n in enumerate(seq_lens):
        padded[r, :n] = torch.cat((k, v), 1)[kv_starts[r] : kv_starts[r + 1]]
    cache, table = paged(padded, 16)
    poisoned = torch.full_like(cache, float("nan"))
    for r, n in enumerate(seq_lens):
        for t in range(n):
            poisoned[table[r, t // 16], t % 16] = padded[r, t]
    options = dict(causal=True, window=(20, -1), return_lse=True)
    ragged = imbrex.torch.varlen_attention(q, k, v, starts, kv_starts, 7, 33, **options)
    pages = imbrex.torch.paged_attention(q, poisoned[:, :, :2], poisoned[:, :, 2:], starts, lens, table, 7, 33, **options)
    for r in range(4):
        one, keys = slice(starts[r], starts[r + 1]), slice(kv_starts[r], kv_starts[r + 1])
        expected = reference(*(x[None].transpose(1, 2) for x in (q[one], k[keys], v[keys])), causal=True, window=(20, -1))
        for out, lse in (ragged, pages):
            near(out[one], expected[0][0].transpose(0, 1))
            near(lse[one], expected[1][0].t())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_write_kv(device, to):
    torch.manual_seed(4)
    k, v = (torch.randn(5, 2, 64, device=device) for _ in range(2))
    caches = [torch.zeros(4, 8, 2, 64, device=device).to(to) for _ in range(2)]
    slots = torch.tensor([31, 0, -1, 9, 8], device=device)
    scale = torch.tensor([0.5], device=device) if to == torch.float8_e4m3fn else None
    imbrex.torch.write_kv(*caches, k, v, slots, k_scale=scale, v_scale=scale)
    for cache, rows in zip(caches, (k, v)):
        expected = torch.zeros(32, 2, 64, device=device)
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = (rows[t] / (0.5 if scale is not None else 1)).to(to).float()
        assert torch.equal(cache.float().view(32, 2, 64), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_operators_are_registered_as_the_compiler_expects(device):
    q, k, v = arrays(device, torch.float32, 2, 4, 2, 3, 6, 32)
    torch.library.opcheck(torch.ops.imbrex.attention.default, (q, k, v, None, True, -1, -1, None, 0.0, None, None, True))
    starts = torch.tensor([0, 3], dtype=torch.int32, device=device)
    ragged = [x[0].transpose(0, 1) for x in (q, k, v)]
    kv_starts = torch.tensor([0, 6], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.imbrex.varlen_attention.default, (*ragged, starts, kv_starts, 3, 6, True, -1, -1, None, 0.0, None, None, False))
    cache = torch.zeros(2, 8, 2, 32, device=device)
    slots = torch.tensor([0, 1, 9, 3, 4, 5], device=device)
    torch.library.opcheck(torch.ops.imbrex.write_kv.default, (cache, cache.clone(), *ragged[1:], slots, None, None))


@pytest.mark.parametrize("device", DEVICES)
def test_the_compiler_keeps_them_whole(device):
    def step(q, k, v):
        return imbrex.torch.attention(q * 2, k, v, causal=True).relu() + 1

    compiled = torch.compile(step, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    for sk in (6, 11):
        q, k, v = arrays(device, torch.float32, 2, 4, 2, 5, sk, 64)
        near(compiled(q, k, v), reference(q * 2, k, v, causal=True)[0].relu() + 1)


def test_no_backward():
    q, k, v = (x.requires_grad_() for x in arrays("cpu", torch.float32, 1, 2, 2, 3, 3, 32))
    with pytest.raises(NotImplementedError, match="imbrex"):
        imbrex.torch.attention(q, k, v).sum().backward()


def test_errors():
    q, k, v = arrays("cpu", torch.float32, 1, 3, 2, 3, 3, 32)
    with pytest.raises(imbrex.Error, match="divisor of num_q_heads"):
        imbrex.torch.attention(q, k, v)
    q, k, v = arrays("cpu", torch.float32, 1, 2, 2, 3, 3, 30)
    with pytest.raises(imbrex.Error, match="multiple of 8"):
        imbrex.torch.attention(q, k, v)
    with pytest.raises(TypeError, match="float64"):
        imbrex.torch.attention(*(x.double() for x in arrays("cpu", torch.float32, 1, 2, 2, 3, 3, 32)))


@on_gpu
def test_a_graph_reads_what_is_there_when_it_is_replayed():
    torch.manual_seed(6)
    q, k, v = arrays("cuda", torch.bfloat16, 2, 8, 2, 1, 40, 128)
    cache, table = paged(k.transpose(1, 2), 16)
    v_cache = torch.full_like(cache, float("nan"))
    for r in range(2):
        for t in range(40):
            v_cache[table[r, t // 16], t % 16] = v[r, :, t]
    rows, starts = q[:, :, 0].contiguous(), torch.arange(3, dtype=torch.int32, device="cuda")
    lens = torch.tensor([40, 40], dtype=torch.int32, device="cuda")

    def step():
        return imbrex.torch.paged_attention(rows, cache, v_cache, starts, lens, table, 1, 40), imbrex.torch.attention(q, k, v)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pages, dense = step()
    for seq_lens in ([40, 17], [3, 1], [1, 40]):
        lens.copy_(torch.tensor(seq_lens))
        rows.copy_(torch.randn_like(rows))
        k.copy_(torch.randn_like(k))
        graph.replay()
        for r, n in enumerate(seq_lens):
            keys = torch.stack([cache[table[r, t // 16], t % 16] for t in range(n)])
            values = torch.stack([v_cache[table[r, t // 16], t % 16] for t in range(n)])
            expected, _ = reference(rows[r, :, None][None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            near(pages[r], expected[0, :, 0])
        near(dense, reference(q, k, v)[0])


@on_gpu
def test_streams_take_turns_at_a_plan():
    torch.manual_seed(8)
    q, k, v = arrays("cuda", torch.bfloat16, 2, 8, 2, 64, 512, 128)
    expected = reference(q, k, v, causal=True)[0]
    outs = []
    torch.cuda.synchronize()
    for _ in range(8):
        with torch.cuda.stream(torch.cuda.Stream()):
            outs.append(imbrex.torch.attention(q, k, v, causal=True))
    torch.cuda.synchronize()
    for out in outs:
        near(out, expected)
