"""Pages and masks of imbrex.flashinfer: places of new tokens, writing them, truth values as bits."""
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import imbrex.flashinfer as flashinfer  # noqa: E402
from flashinfer_cases import Batch, devices, on_gpu  # noqa: E402

Q_LENS, KV_LENS = [5, 1, 0, 3, 9], [5, 23, 0, 40, 9]


@devices
def test_places_of_new_tokens(device):
    indptr = torch.tensor([0, 1, 3, 3, 6, 10], dtype=torch.int32, device=device)
    seq_lens = torch.tensor([5, 5, 0, 3, 9], dtype=torch.int32)
    requests, positions = flashinfer.get_batch_indices_positions(indptr, seq_lens, 12)
    assert requests.dtype == positions.dtype == torch.int32
    assert requests.tolist() == [0, 1, 1, 3, 3, 3, 4, 4, 4, 4, -1, -1]
    assert positions.tolist() == [4, 3, 4, 0, 1, 2, 5, 6, 7, 8, 0, 0]
    given = torch.full((12,), 77, dtype=torch.int32, device=device), torch.full((12,), 77, dtype=torch.int32, device=device)
    result = flashinfer.get_batch_indices_positions(indptr, seq_lens.to(device), 12, *given)
    assert result[0] is given[0] and torch.equal(given[0], requests) and torch.equal(given[1], positions)
    with pytest.raises(ValueError, match="positions: expected"):
        flashinfer.get_batch_indices_positions(indptr, seq_lens, 12, positions=given[0].long())
    lens = flashinfer.get_seq_lens(torch.tensor([0, 3, 3, 4]), torch.tensor([2, 0, 16]), 16)
    assert lens.tolist() == [34, 0, 16]


@devices
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["pair", "one", "views"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_append(device, layout, form, dtype):
    """To the bit; tokens of no request are not written, and nothing else is touched."""
    batch = Batch(1, Q_LENS, KV_LENS, device=device, dtype=torch.bfloat16, kv_dtype=dtype)
    cache = batch.cache(layout, form)
    zeroed = tuple(torch.zeros_like(x) for x in cache) if isinstance(cache, tuple) else torch.zeros_like(cache)
    if form == "views":
        zeroed = tuple(torch.zeros(*x.shape[:3], 2, x.shape[3], device=device).to(dtype)[:, :, :, 0] for x in cache)
    padding = 3
    append_indptr = batch.kv_indptr.to(device)
    total = sum(KV_LENS)
    requests, positions = flashinfer.get_batch_indices_positions(append_indptr, torch.tensor(KV_LENS), total + padding)
    order = torch.randperm(total + padding, generator=batch.random).to(device)  # padding in between
    k, v = (torch.cat([x.float(), torch.full((padding, 2, 64), 5.0, device=device)])[order].to(dtype) for x in batch.ragged())
    arrays = batch.indices.to(device), batch.indptr.to(device), batch.last.to(device)
    flashinfer.append_paged_kv_cache(k, v, requests[order], positions[order], zeroed, *arrays, layout)
    for got, wanted in zip(*((x if isinstance(x, tuple) else x.unbind(1)) for x in (zeroed, cache))):
        assert torch.equal(got.float(), torch.nan_to_num(wanted.float(), nan=0.0))


@devices
def test_append_of_padding_alone_changes_nothing(device):
    batch = Batch(2, [1], [7], device=device)
    k, v = batch.cache()
    before = k.clone(), v.clone()
    nobody = torch.full((4,), -1, dtype=torch.int32, device=device)
    new = torch.ones(4, 2, 64, dtype=torch.bfloat16, device=device)
    arrays = batch.indices.to(device), batch.indptr.to(device), batch.last.to(device)
    flashinfer.append_paged_kv_cache(new, new, nobody, torch.full_like(nobody, 10**6), (k, v), *arrays)
    for got, wanted in zip((k, v), before):
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))
    with pytest.raises(ValueError, match="like the cache"):
        flashinfer.append_paged_kv_cache(new.float(), new, nobody, nobody, (k, v), *arrays)
    with pytest.raises(ValueError, match="like the cache"):
        flashinfer.append_paged_kv_cache(new[:, :1], new, nobody, nobody, (k, v), *arrays)


@devices
def test_append_for_mla(device):
    random = torch.Generator().manual_seed(3)
    both = torch.zeros(6, 4, 64 + 16, dtype=torch.bfloat16, device=device)
    new = torch.randn(10, 80, generator=random).to(both)
    indptr, indices = torch.tensor([0, 2, 3], dtype=torch.int32, device=device), torch.tensor([5, 1, 3], dtype=torch.int32, device=device)
    requests, positions = flashinfer.get_batch_indices_positions(torch.tensor([0, 7, 10], device=device), torch.tensor([7, 3]), 10)
    last = torch.tensor([3, 3], dtype=torch.int32, device=device)
    flashinfer.append_paged_mla_kv_cache(new[:, :64], new[:, 64:], requests, positions, both[..., :64], both[..., 64:], indices, indptr, last)
    wanted = torch.zeros_like(both)
    wanted[5], wanted[1, :3], wanted[3, :3] = new[:4], new[4:7], new[7:]
    assert torch.equal(both, wanted)


@on_gpu
def test_append_in_a_graph():
    batch = Batch(14, [1], [9], device="cuda")
    k, v = (torch.zeros_like(x) for x in batch.cache())
    new = torch.zeros(3, 2, 64, dtype=torch.bfloat16, device="cuda")
    requests, positions = torch.zeros(3, dtype=torch.int32, device="cuda"), torch.arange(3, dtype=torch.int32, device="cuda")
    arrays = batch.indices.cuda(), batch.indptr.cuda(), batch.last.cuda()

    def append():
        flashinfer.append_paged_kv_cache(new, new, requests, positions, (k, v), *arrays)

    append()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append()
    new.copy_(torch.arange(1, 4, device="cuda")[:, None, None])
    positions.copy_(torch.tensor([8, 2, 5]))
    requests.copy_(torch.tensor([0, -1, 0]))
    graph.replay()
    torch.cuda.synchronize()
    wanted = torch.zeros_like(k)
    pages = batch.indices.tolist()
    wanted[pages[2], 0], wanted[pages[1], 1] = 1, 3
    assert torch.equal(k, wanted) and torch.equal(v, wanted)


@devices
@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits(device, bitorder):
    random = np.random.default_rng(4)
    for n in (0, 1, 7, 8, 9, 1000):
        bits = random.random(n) < 0.5
        packed = flashinfer.packbits(torch.from_numpy(bits).to(device), bitorder)
        assert packed.dtype == torch.uint8 and (packed.cpu().numpy() == np.packbits(bits, bitorder=bitorder)).all()
    counts = [3, 0, 8, 13, 1]
    starts = np.concatenate([[0], np.cumsum(counts)])
    bits = random.random(starts[-1]) < 0.5
    packed, indptr = flashinfer.segment_packbits(torch.from_numpy(bits).to(device), torch.tensor(starts, device=device), bitorder)
    parts = [np.packbits(bits[a:b], bitorder=bitorder) for a, b in zip(starts, starts[1:])]
    assert (packed.cpu().numpy() == np.concatenate(parts)).all()
    assert indptr.dtype == torch.int32 and indptr.tolist() == np.cumsum([0, *map(len, parts)]).tolist()


def test_packbits_is_big_unless_told():
    assert flashinfer.packbits(torch.tensor([1, 0, 1, 1, 0, 0, 1, 1])).tolist() == [0b10110011]
    assert flashinfer.packbits(torch.tensor([2.0, 0.0, 1.0])).tolist() == [0b10100000]
    with pytest.raises(ValueError, match="big or little"):
        flashinfer.packbits(torch.ones(8), "middle")
