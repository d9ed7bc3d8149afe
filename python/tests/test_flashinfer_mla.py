"""imbrex.flashinfer's MLA over caches that lie side by side, and over separate ones; against float64."""
import functools

import pytest

torch = pytest.importorskip("torch")

import imbrex  # noqa: E402
import imbrex.flashinfer as flashinfer  # noqa: E402
from flashinfer_cases import LOG2E, Batch, attention, check, devices, on_gpu  # noqa: E402

Q_LENS, KV_LENS = [5, 1, 0, 3, 9], [5, 23, 0, 40, 9]
LENS = torch.tensor(KV_LENS, dtype=torch.int32)


def workspace(device):
    return torch.empty(0, device=device)


def mla_case(device, kpe=16, dtype=torch.bfloat16, kv_dtype=None):
    batch = Batch(11, Q_LENS, KV_LENS, heads=6, kv_heads=1, dim=64 + kpe, device=device, dtype=dtype, kv_dtype=kv_dtype)
    batch.v, batch.dim_v = [k[..., :64] for k in batch.k], 64
    return batch, batch.cache()[0][:, :, 0]


@devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kpe", [16, 0])
@pytest.mark.parametrize("copied_q", [False, True])
def test_mla(device, causal, kpe, copied_q):
    batch, pages = mla_case(device, kpe)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    lens = torch.tensor(KV_LENS, dtype=torch.int32)
    wrapper.plan(batch.qo_indptr, batch.indptr, batch.indices, lens, 6, 64, kpe, 4, causal, 0.125, torch.bfloat16, torch.bfloat16)
    q = batch.q[..., :64], batch.q[..., 64:]
    if copied_q:
        q = [x.clone() for x in q]
    out, lse = wrapper.run(*q, pages[..., :64], pages[..., 64:], return_lse=True)
    expected = batch.expected(causal=causal, scale=0.125)
    check((out, lse), expected)
    natural = wrapper.run(*q, pages[..., :64], pages[..., 64:], return_lse=True, return_lse_base_on_e=True)[1]
    torch.testing.assert_close(natural.double().cpu() * LOG2E, expected[1], atol=2e-3, rtol=2e-3)


@devices
def test_mla_in_fp8(device):
    batch, pages = mla_case(device, kv_dtype=torch.float8_e4m3fn)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    lens = torch.tensor(KV_LENS, dtype=torch.int32)
    plan = batch.qo_indptr, batch.indptr, batch.indices, lens, 6, 64, 16, 4, True, 0.125, torch.bfloat16, torch.float8_e4m3fn
    wrapper.plan(*plan)
    run = functools.partial(wrapper.run, batch.q[..., :64], batch.q[..., 64:], pages[..., :64], pages[..., 64:])
    check(run(ckv_scale=0.5, kpe_scale=0.5), batch.expected(causal=True, scale=0.125, k_scale=0.5, v_scale=0.5), tolerance=2.5e-2)
    with pytest.raises(ValueError, match="expected numbers"):
        run()


@devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["host", "device"])
def test_mla_over_separate_caches(device, causal, dtype, where):
    """Of any strides; indices may be longer than what is used, with anything behind it; and layers of a step may be of both kinds."""
    batch, pages = mla_case(device, dtype=dtype)
    expected = batch.expected(causal=causal, scale=0.125)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    indices = torch.cat([batch.indices, torch.full((7,), -9, dtype=torch.int32)]).to("cpu" if where == "host" else device)
    kpe = torch.zeros(pages.shape[0], 4, 40, dtype=dtype, device=device)[..., 8:24]
    kpe.copy_(pages[..., 64:])
    separate, slices = (pages[..., :64].clone(), kpe), (pages[..., :64], pages[..., 64:])
    q = batch.q[..., :64], batch.q[..., 64:]
    for caches in (separate, slices, separate, separate):
        wrapper.plan(batch.qo_indptr, batch.indptr, indices, LENS, 6, 64, 16, 4, causal, 0.125, dtype, dtype)
        check(wrapper.run(*q, *caches, return_lse=True), expected, dtype)
    check(wrapper.run(*q, *slices, return_lse=True), expected, dtype)
    check(wrapper.run(*q, *separate, return_lse=True), expected, dtype)
    check(wrapper.run(*q, pages[..., :64], pages.clone()[..., 64:]), expected, dtype)  # of equal strides


@devices
def test_mla_of_no_request_with_keys_over_separate_caches(device):
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    zeros = torch.zeros(3, dtype=torch.int32)
    starts = torch.tensor([0, 1, 3], dtype=torch.int32)
    wrapper.plan(starts, zeros, zeros[:0], zeros[:2], 6, 64, 16, 4, False, 0.125, torch.bfloat16, torch.bfloat16)
    q, caches = torch.ones(3, 6, 80, device=device).bfloat16(), torch.ones(2, 5, 4, 64, device=device).bfloat16()
    out, lse = wrapper.run(q[..., :64], q[..., 64:], caches[0], caches[1][..., :16], return_lse=True)
    assert not out.any() and torch.isneginf(lse).all()


@devices
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("scales", [(0.5, 0.5), (0.5, 1.25), "array"], ids=str)
def test_mla_of_two_scales(device, separate, scales):
    """fp8 caches whose parts have scales of their own: numbers, or for each 128 columns of each token."""
    dim_ckv = 256 if scales == "array" else 64
    batch = Batch(13, Q_LENS, KV_LENS, heads=6, kv_heads=1, dim=dim_ckv + 16, device=device, kv_dtype=torch.float8_e4m3fn)
    pages = batch.cache()[0][:, :, 0]
    caches = pages[..., :dim_ckv], pages[..., dim_ckv:]
    if separate:
        caches = [x.clone() for x in caches]
    if scales == "array":
        numbers = torch.rand(*pages.shape[:2], 2, generator=batch.random) + 0.25
        options = dict(ckv_scale_arr=numbers.to(device), kpe_scale=0.75)
        columns = torch.cat([numbers.repeat_interleave(128, -1), torch.full((*pages.shape[:2], 16), 0.75)], -1)
    else:
        options = dict(ckv_scale=scales[0], kpe_scale=scales[1])
        columns = torch.tensor(scales).repeat_interleave(torch.tensor([dim_ckv, 16])).expand(*pages.shape[:2], -1)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    types = torch.bfloat16, torch.float8_e4m3fn
    wrapper.plan(batch.qo_indptr, batch.indptr, batch.indices, LENS, 6, dim_ckv, 16, 4, True, 0.0625, *types)
    result = wrapper.run(batch.q[..., :dim_ckv], batch.q[..., dim_ckv:], *caches, return_lse=True, **options)
    values, outs, lses = pages.cpu().float() * columns, [], []
    for r, q in enumerate(batch.q.cpu().split(Q_LENS)):
        keys = values[batch.indices[batch.indptr[r] : batch.indptr[r + 1]].long()].flatten(0, 1)[: KV_LENS[r], None]
        out, lse = attention(q, keys, keys[..., :dim_ckv], causal=True, scale=0.0625)
        outs.append(out), lses.append(lse)
    torch.testing.assert_close(result[0].double().cpu(), torch.cat(outs), atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(result[1].double().cpu(), torch.cat(lses), atol=2e-2, rtol=2e-2)


def test_wrong_arguments_of_mla_are_named():
    batch, pages = mla_case("cpu", kv_dtype=torch.float8_e4m3fn)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu"))
    plan = functools.partial(wrapper.plan, batch.qo_indptr, batch.indptr)
    more = 6, 64, 16, 4, True, 0.125, torch.bfloat16, torch.float8_e4m3fn
    plan(batch.indices, LENS, *more)
    q = batch.q[..., :64], batch.q[..., 64:]
    run = functools.partial(wrapper.run, *q, pages[..., :64].clone(), pages[..., 64:].clone())
    for scales, match in (
        (dict(ckv_scale=0.5), "expected numbers for an fp8 cache"),
        (dict(ckv_scale=0.5, ckv_scale_arr=torch.ones(1), kpe_scale=1.0), "expected numbers for an fp8 cache"),
        (dict(ckv_scale=-1.0, kpe_scale=1.0), "ckv_scale: expected a finite number above 0, got -1.0"),
        (dict(ckv_scale=1.0, kpe_scale=float("inf")), "kpe_scale: expected a finite number above 0, got inf"),
        (dict(ckv_scale_arr=torch.ones(3, 4, 1), kpe_scale=1.0), r"ckv_scale_arr: expected torch.float32 \[\d+, 4, 0\]"),
    ):
        with pytest.raises(ValueError, match=match):
            run(**scales)
    with pytest.raises(ValueError, match=r"kpe_cache: expected \[\d+, 4\] and columns"):
        wrapper.run(*q, pages[..., :64], pages[:3, :, 64:], ckv_scale=1.0, kpe_scale=1.0)
    with pytest.raises(ValueError, match="kv_len_arr: expected at most"):
        plan(batch.indices, LENS + 40, *more)
    with pytest.raises(ValueError, match="kv_indptr: expected 6 entries, for the 5 requests of kv_len_arr, got 3"):
        wrapper.plan(batch.qo_indptr, batch.indptr[:3], batch.indices, LENS, *more)
    plan(torch.full_like(batch.indices, 1000), LENS, *more)
    with pytest.raises(imbrex.Error, match="block ids must be 0 to .*, the batch has 1000"):
        run(ckv_scale=1.0, kpe_scale=1.0)
    wide = torch.zeros(3, 4, 128).to(torch.float8_e4m3fn)
    wrapper.plan(batch.qo_indptr, batch.indptr, torch.full_like(batch.indices, 1000), LENS, 6, 128, *more[2:])
    with pytest.raises(ValueError, match="kv_indices: expected 0 to 2, pages of ckv_cache, got 1000 to 1000"):
        wrapper.run(torch.zeros(18, 6, 128).bfloat16(), q[1], wide, wide[..., :16], ckv_scale_arr=torch.ones(3, 4, 1), kpe_scale=1.0)
    with pytest.raises(NotImplementedError, match="backward"):
        wrapper.run(q[0].clone().requires_grad_(), q[1], pages[..., :64], pages[..., 64:], ckv_scale=1.0, kpe_scale=1.0)


@devices
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("separate", [False, True])
def test_deepseeks_dimensions(device, page, separate):
    batch = Batch(12, [1, 3, 2], [150, 3, 64], heads=8, kv_heads=1, dim=576, page_size=page, device=device)
    batch.v, batch.dim_v = [k[..., :512] for k in batch.k], 512
    pages = batch._pages(batch.k)[:, :, 0]
    caches = pages[..., :512], pages[..., 512:]
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32)
    wrapper.plan(batch.qo_indptr, batch.indptr, batch.indices, lens, 8, 512, 64, page, True, 192**-0.5, torch.bfloat16, torch.bfloat16)
    caches = [x.clone() for x in caches] if separate else caches
    result = wrapper.run(batch.q[..., :512], batch.q[..., 512:], *caches, return_lse=True)
    check(result, batch.expected(causal=True, scale=192**-0.5))


def buffers_of(batch, device):
    return [x.to(device, torch.int32).clone() for x in (batch.qo_indptr, batch.indptr, batch.indices, LENS)]


@devices
def test_wrappers_for_graphs(device):
    """Buffers that plan() fills, over caches of both kinds; only ckv_scale_arr needs a copy, which a graph cannot hold."""
    batch, pages = mla_case(device)
    buffers = buffers_of(batch, device)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device), True, *buffers)
    arguments = 6, 64, 16, 4, True, 0.125, torch.bfloat16, torch.bfloat16
    q, expected = (batch.q[..., :64], batch.q[..., 64:]), batch.expected(causal=True, scale=0.125)
    for _ in range(2):
        wrapper.plan(*[x.clone() for x in buffers], *arguments)
        check(wrapper.run(*q, pages[..., :64], pages[..., 64:]), expected)
        check(wrapper.run(*q, pages[..., :64].clone(), pages[..., 64:].clone()), expected)
    batch = Batch(13, Q_LENS, KV_LENS, heads=6, kv_heads=1, dim=128 + 16, device=device, kv_dtype=torch.float8_e4m3fn)
    pages, scales = batch.cache()[0][:, :, 0], torch.ones(batch.num_pages, 4, 1, device=device)
    wrapper.plan(*buffers_of(batch, device), 6, 128, 16, 4, True, 0.125, torch.bfloat16, torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match="ckv_scale_arr in a CUDA graph is not there: quantise ckv_cache with one scale"):
        wrapper.run(batch.q[..., :128], batch.q[..., 128:], pages[..., :128], pages[..., 128:], ckv_scale_arr=scales, kpe_scale=1.0)


@on_gpu
@pytest.mark.parametrize("separate", [False, True])
def test_a_graph_replays_another_step(separate):
    batch, pages = mla_case("cuda")
    buffers = buffers_of(batch, "cuda")
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cuda"), True, *buffers)
    arguments = 6, 64, 16, 4, True, 0.125, torch.bfloat16, torch.bfloat16
    wrapper.plan(*[x.clone() for x in buffers], *arguments)
    caches = [x.clone() if separate else x for x in (pages[..., :64], pages[..., 64:])]
    run = functools.partial(wrapper.run, batch.q[..., :64], batch.q[..., 64:], *caches)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    shorter = (LENS - 1).clamp(min=0)
    wrapper.plan(batch.qo_indptr, batch.indptr, batch.indices, shorter, *arguments)
    graph.replay()
    batch.kv_lens = shorter.tolist()
    batch.k, batch.v = ([x[:n] for x, n in zip(rows, batch.kv_lens)] for rows in (batch.k, batch.v))
    check(out, batch.expected(causal=True, scale=0.125))


@devices
def test_longer_arrays_than_the_batch(device):
    """FlashInfer reads the beginning of starts that are longer than the batch: of MLA, BatchAttention and decode."""
    batch, pages = mla_case(device)
    behind = torch.tensor([77, 3], dtype=torch.int32)
    starts, indptr = torch.cat([batch.qo_indptr, behind]), torch.cat([batch.indptr, behind])
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(device))
    wrapper.plan(starts, indptr, batch.indices, LENS, 6, 64, 16, 4, True, 0.125, torch.bfloat16, torch.bfloat16)
    check(wrapper.run(batch.q[..., :64], batch.q[..., 64:], pages[..., :64], pages[..., 64:]), batch.expected(causal=True, scale=0.125))

    batch = Batch(14, Q_LENS, KV_LENS, device=device)
    wrapper = flashinfer.BatchAttention("NHD", device)
    wrapper.plan(starts, torch.cat([batch.indptr, behind]), batch.indices, LENS, 4, 2, 64, 64, 4, causal=True)
    check(wrapper.run(batch.q, batch.cache()), batch.expected(causal=True))

    batch = Batch(15, [1] * 5, KV_LENS, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(torch.cat([batch.indptr, behind]).to(device), *batch.arrays("cpu")[1:], 4, 2, 64, 4, q_data_type=torch.bfloat16)
    check(wrapper.run(batch.q, batch.cache()), batch.expected(causal=True))
    with pytest.raises(ValueError, match="indptr: expected 6 entries, for the 5 requests of last_page_len, got 5"):
        wrapper.plan(batch.indptr[:5], *batch.arrays("cpu")[1:], 4, 2, 64, 4)


def dense_table(batch, columns=12):
    """The CSR arrays of a batch as rows of pages, with anything behind those in use."""
    table = torch.full((len(KV_LENS), columns), -7, dtype=torch.int32)
    for r, (first, end) in enumerate(zip(batch.indptr.tolist(), batch.indptr.tolist()[1:])):
        table[r, : end - first] = batch.indices[first:end].cpu()
    return table


@devices
@pytest.mark.parametrize("form", ["csr", "dense", "dual", "flat dense"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_metadata(device, form, where):
    """Every form of plan() and of run() gives the bits of the older one."""
    batch, pages = mla_case(device)
    at = "cpu" if where == "host" else device
    csr = [x.to(at) for x in (batch.qo_indptr, batch.indptr, batch.indices, LENS)]
    dense = [x.to(at) for x in (batch.qo_indptr, dense_table(batch), LENS)]
    shape = dict(num_heads=6, head_dim_ckv=64, head_dim_kpe=16, page_size=4, causal=True, sm_scale=0.125)
    shape.update(q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    new, old = (flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace(device)) for _ in range(2))
    old.plan(*csr, **shape)
    kind = flashinfer.mla.MLAPlanMetadata
    if form == "flat dense":
        new.plan(cum_seq_lens_q=dense[0], block_tables=dense[1], seq_lens=dense[2], max_q_len=9, **shape)
    else:
        named = dict(zip(("cum_seq_lens_q", "block_tables", "seq_lens"), dense))
        made = {"csr": lambda: kind.csr(*csr), "dense": lambda: kind.dense(*dense), "dual": lambda: kind.dual(*csr, **named)}[form]()
        new.plan(metadata=made, query_layout="split", lse_mode="base2", **shape)
    parts = (pages[..., :64], pages[..., 64:])
    q = (batch.q[..., :64], batch.q[..., 64:])
    expected = old.run(*q, *parts, return_lse=True)
    check(expected, batch.expected(causal=True, scale=0.125))
    for query, cache in ((batch.q, pages), (q, parts), ((q, batch.q), (pages, parts))):
        for mine, theirs in zip(new.run(query=query, kv_cache=cache, return_lse=True), expected):
            assert torch.equal(mine, theirs)


def test_metadata_that_is_wrong():
    batch, pages = mla_case("cpu")
    wrapper, kind = flashinfer.BatchMLAPagedAttentionWrapper(workspace("cpu")), flashinfer.mla.MLAPlanMetadata
    shape = dict(num_heads=6, head_dim_ckv=64, head_dim_kpe=16, page_size=4, causal=True, sm_scale=0.125)
    shape.update(q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    table = dense_table(batch)
    with pytest.raises(RuntimeError, match="before plan"):
        wrapper.run(query=batch.q, kv_cache=pages)
    for arguments, error, message in (
        (dict(metadata=kind.dense(batch.qo_indptr, table, LENS), seq_lens=LENS), ValueError, "no other arrays beside it"),
        (dict(metadata=kind(qo_indptr=batch.qo_indptr, seq_lens=LENS)), TypeError, "expected qo_indptr, kv_indptr"),
        (dict(metadata=kind.dense(batch.qo_indptr, table[:2], LENS)), ValueError, r"block_tables: expected \[5, pages\], got \[2, 12\]"),
        (dict(metadata=kind.dense(batch.qo_indptr, table[:, :9], LENS)), ValueError, "expected 10 pages for 40 keys"),
        (dict(metadata=kind.dense(batch.qo_indptr, table, LENS), lse_mode="base10"), ValueError, "lse_mode: expected one of none, base2, basee"),
        (dict(metadata=kind.dense(batch.qo_indptr, table, LENS), query_layout="dual"), ValueError, "query_layout: expected one of packed, split"),
        ({}, TypeError, "metadata: expected"),
    ):
        with pytest.raises(error, match=message):
            wrapper.plan(**{**shape, **arguments})
    with pytest.raises(TypeError, match=r"plan\(\): expected causal, sm_scale"):
        wrapper.plan(batch.qo_indptr, batch.indptr, batch.indices, LENS, 6, 64, 16, 4, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    wrapper.plan(metadata=kind.dense(batch.qo_indptr, table, LENS), **shape)
    for arguments in (dict(query=batch.q), dict(query=batch.q, kv_cache=pages, q_pe=batch.q), {}):
        with pytest.raises(TypeError, match="expected query and kv_cache, or q_nope"):
            wrapper.run(**arguments)
    with pytest.raises(TypeError, match="query: expected a tensor or a pair of tensors, got list"):
        wrapper.run(query=[batch.q], kv_cache=pages)
