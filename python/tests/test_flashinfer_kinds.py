"""Wrappers of imbrex.flashinfer for other kinds of attention: block-sparse, BatchAttention, sinks; against float64."""
import functools

import pytest

torch = pytest.importorskip("torch")

import imbrex.flashinfer as flashinfer  # noqa: E402
from flashinfer_cases import Batch, attention, check, devices  # noqa: E402

Q_LENS, KV_LENS = [5, 1, 0, 3, 9], [5, 23, 0, 40, 9]


def workspace(device):
    return torch.empty(0, device=device)


def sparse_case(device, seed, m, n, r, c, dtype=torch.bfloat16):
    """Blocks of random places: BSR arrays, and the dense mask that they are."""
    batch = Batch(seed, [m], [n], device=device, dtype=dtype)
    rows, columns = -(-m // r), n // c
    blocks = torch.rand(rows, columns, generator=batch.random) < 0.5
    blocks[1] = False  # a row that sees nothing
    indptr = Batch.starts(blocks.sum(1).tolist())
    indices = blocks.nonzero()[:, 1].to(torch.int32)
    dense = blocks.repeat_interleave(r, 0)[:m].repeat_interleave(c, 1)
    return batch, indptr.to(device), indices.to(device), blocks, dense


@devices
@pytest.mark.parametrize("r, c, m", [(1, 1, 9), (4, 8, 16), (4, 3, 14)])
def test_block_sparse(device, r, c, m):
    batch, indptr, indices, _, dense = sparse_case(device, 7, m, 24, r, c)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    plan = functools.partial(wrapper.plan, indptr, indices, m, 24, r, c, 4, 2, 64, q_data_type=torch.bfloat16)
    plan(logits_soft_cap=3.0)
    out = wrapper.run(batch.q, *batch.ragged(), return_lse=True)
    assert out[0].dtype == torch.float16  # as in FlashInfer, whatever q is
    check(out, batch.expected([dense], soft_cap=3.0))
    check(wrapper.forward(batch.q, *batch.ragged(), sm_scale=0.2), batch.expected([dense], scale=0.2))
    plan(o_data_type=torch.bfloat16)
    given = torch.empty_like(batch.q)
    assert wrapper.run(batch.q, *batch.ragged(), out=given) is given
    check(given, batch.expected([dense]))
    with pytest.raises(ValueError, match="indices: expected 0 to"):
        wrapper.plan(indptr, torch.full_like(indices, 24 // c), m, 24, r, c, 4, 2, 64)
    with pytest.raises(ValueError, match="divisible"):
        wrapper.plan(indptr, indices, m + r, 24, r, c, 4, 2, 64)


@devices
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("m", [16, 14])
def test_block_sparse_with_masks_within_blocks(device, packed, m):
    r, c, n = 4, 3, 24
    batch, indptr, indices, blocks, _ = sparse_case(device, 8, m, n, r, c)
    mask = torch.rand(len(indices), r, c, generator=batch.random) < 0.6
    dense = torch.zeros(len(blocks) * r, n, dtype=torch.bool)
    for block, (i, j) in zip(mask, blocks.nonzero().tolist()):
        dense[i * r : (i + 1) * r, j * c : (j + 1) * c] = block
    given = dict(mask=mask.to(device))
    if packed:
        rows = [dense[i * r : min((i + 1) * r, m)][:, blocks[i].repeat_interleave(c)].reshape(-1) for i in range(len(blocks))]
        given = dict(packed_mask=flashinfer.segment_packbits(torch.cat(rows), Batch.starts([len(x) for x in rows]), "little")[0])
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(indptr, indices, m, n, r, c, 4, 2, 64, causal=True, q_data_type=torch.bfloat16, **given)
    check(wrapper.run(batch.q, *batch.ragged(), return_lse=True), batch.expected([dense[:m]]))


@devices
def test_causal_of_blocks_counts_the_keys_that_are_seen(device):
    batch, indptr, indices, _, dense = sparse_case(device, 9, 16, 24, 4, 8)
    seen = torch.zeros_like(dense)
    for i in range(4):
        keys = dense[4 * i].nonzero()[:, 0]
        for t in range(4):
            seen[4 * i + t, keys[: max(0, len(keys) - 3 + t)]] = True
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace(device))
    wrapper.plan(indptr, indices, 16, 24, 4, 8, 4, 2, 64, causal=True, q_data_type=torch.bfloat16)
    check(wrapper.run(batch.q, *batch.ragged()), batch.expected([seen]))


@devices
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (2, 2), (3, 1)])
def test_variable_block_sparse(device, heads, kv_heads):
    row_sizes = torch.tensor([[3, 4, 2], [1, 5, 3]], dtype=torch.int32)[:kv_heads]
    column_sizes = torch.tensor([[5, 1, 7, 4], [4, 4, 8, 1]], dtype=torch.int32)[:kv_heads]
    batch = Batch(10, [9], [17], heads=heads, kv_heads=kv_heads, device=device)
    blocks = torch.rand(kv_heads, 3, 4, generator=batch.random) < 0.5
    blocks[0, 1] = False
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace(device))
    sizes = blocks.to(device), row_sizes.to(device), column_sizes.to(device)
    wrapper.plan(*sizes, heads, kv_heads, 64, q_data_type=torch.bfloat16, sm_scale=0.2)
    q, (k, v) = batch.q.transpose(0, 1).contiguous(), batch.ragged("HND")
    group, parts = heads // kv_heads, []
    for h in range(kv_heads):
        mask = blocks[h].repeat_interleave(row_sizes[h], 0).repeat_interleave(column_sizes[h], 1)
        parts.append(attention(batch.q[:, h * group : (h + 1) * group], batch.k[0][:, h : h + 1], batch.v[0][:, h : h + 1], mask=mask, scale=0.2))
    expected = [torch.cat(x, 1).transpose(0, 1) for x in zip(*parts)]
    check(wrapper.run(q, k, v, return_lse=True), expected)
    out, lse = torch.empty_like(q), torch.empty(heads, 9, device=device)
    result = wrapper.run(q, k, v, out=out, lse=lse, return_lse=True)
    assert result[0] is out and result[1] is lse
    check((out, lse), expected)
    check(wrapper.forward(q, k, v, sm_scale=0.2), expected)
    with pytest.raises(ValueError, match="same sums"):
        uneven = torch.cat([row_sizes, row_sizes + 1])
        wrapper.plan(torch.cat([blocks, blocks]), uneven, torch.cat([column_sizes] * 2), 2 * heads, 2 * kv_heads, 64)
    if kv_heads > 1:
        with pytest.raises(NotImplementedError, match="ALIBI"):
            wrapper.plan(*sizes, heads, kv_heads, 64, pos_encoding_mode="ALIBI")


@devices
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
def test_batch_attention(device, layout, soft_cap):
    batch = Batch(12, Q_LENS, KV_LENS, device=device)
    wrapper = flashinfer.BatchAttention(layout, device)
    lens = torch.tensor(KV_LENS, dtype=torch.int32)
    arrays = batch.qo_indptr.to(device), batch.indptr.to(device), batch.indices.to(device), lens.to(device)
    wrapper.plan(*arrays, 4, 2, 64, 64, 4, causal=True, logits_soft_cap=soft_cap)
    scales = dict(k_scale=torch.tensor(2.0, device=device), v_scale=torch.tensor(0.5, device=device))
    result = wrapper.run(batch.q, batch.cache(layout), logits_soft_cap=soft_cap, **scales)
    check(result, batch.expected(causal=True, soft_cap=soft_cap, k_scale=2.0, v_scale=0.5))
    out, lse = torch.empty_like(batch.q), torch.empty(len(batch.q), 4, device=device)
    assert wrapper.run(batch.q, batch.cache(layout), out, lse)[0] is out
    check((out, lse), batch.expected(causal=True, soft_cap=soft_cap))
    with pytest.raises(ValueError, match="logits_soft_cap: expected"):
        wrapper.run(batch.q, batch.cache(layout), logits_soft_cap=7.0)
    with pytest.raises(ValueError, match="kv_len_arr: expected at most"):
        wrapper.plan(*arrays[:3], lens + 9, 4, 2, 64, 64, 4)


@devices
@pytest.mark.parametrize("window_left", [-1, 4])
def test_wrapper_for_sinks(device, window_left):
    batch = Batch(13, Q_LENS, KV_LENS, device=device)
    sinks = batch.normal(4).to(device)
    options = dict(head_dim_qk=64, head_dim_vo=64, window_left=window_left)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(workspace(device), **options)
    plan = functools.partial(wrapper.plan, batch.qo_indptr, *batch.arrays("cpu"), 4, 2, 64, 4, causal=True, window_left=window_left)
    plan(q_data_type=torch.bfloat16)
    expected = batch.expected(causal=True, window_left=window_left, sinks=sinks, scale=0.2)
    check(wrapper.run(batch.q, batch.cache(), sinks, 0.2, return_lse=True), expected)
    check(wrapper.run_return_lse(batch.q, batch.cache(), sinks, 0.2), expected)
    check(wrapper.run(batch.q, batch.cache(), sinks), batch.expected(causal=True, window_left=window_left, sinks=sinks))
    with pytest.raises(ValueError, match="expected sink"):
        wrapper.run(batch.q, batch.cache())
    with pytest.raises(ValueError, match="constructor"):
        plan()
