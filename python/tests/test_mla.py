"""Latent attention beside its definition in NumPy."""
import numpy as np
import pytest

import imbrex

HEADS, RANK, NOPE, ROPE, VALUE, BLOCK = 3, 64, 32, 16, 24, 16


def int32(*values):
    return np.array(values, np.int32)


def by_definition(q, kv_b, rows, context, scale):
    """Outputs of one request whose first query is behind `context` keys; float64."""
    latent, rope = np.split(rows.astype(np.float64), [RANK], 1)
    made = np.einsum("hnc,jc->jhn", kv_b.astype(np.float64), latent)
    keys = np.concatenate([made[..., :NOPE], np.repeat(rope[:, None], HEADS, 1)], 2)
    logits = scale * np.einsum("thd,jhd->htj", q.astype(np.float64), keys)
    hidden = np.arange(len(rows))[None] > context + np.arange(len(q))[:, None]
    logits[:, hidden] = -np.inf
    weights = np.exp(logits - logits.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    return np.einsum("htj,jhv->thv", weights, made[..., NOPE:])


def random(seed):
    rng = np.random.default_rng(seed)
    return lambda *shape: rng.standard_normal(shape, np.float32)


def test_a_prompt_and_decode():
    normal = random(1)
    spec = imbrex.MlaSpec(HEADS, kv_lora_rank=RANK, qk_nope_dim=NOPE, qk_rope_dim=ROPE, v_dim=VALUE, dtype="f32", kv_dtype="f32", block_size=BLOCK)
    assert str(spec) == "mla q3 latent64 nope32 rope16 v24 f32 block16 causal"
    assert spec.latent_dim == RANK + ROPE and spec.kv_bytes_per_token == 4 * (RANK + ROPE)
    assert imbrex.select(spec).backend is not None and "cpu_generic" in imbrex.explain(spec)
    cache = imbrex.KvCache(spec.latent_spec, num_layers=1, num_blocks=8)
    layer = imbrex.KvLayer(np.from_dlpack(cache.layer(0).k))
    kv_b, rows = normal(HEADS, NOPE + VALUE, RANK) / 8, normal(41, RANK + ROPE)
    q = normal(41, HEADS, NOPE + ROPE)
    plan = imbrex.MlaPlan(spec, max_num_tokens=64, num_threads=1)
    table = np.array([[5, 2, 7]], np.int32)
    for begin, end in ((0, 40), (40, 41)):
        slots = np.array([table[0, j // BLOCK] * BLOCK + j % BLOCK for j in range(begin, end)], np.int64)
        plan.update(int32(0, end - begin), int32(end), block_table=table, slot_mapping=slots)
        plan.write_kv(layer, rows[begin:end, :RANK], rows[begin:end, RANK:])
        lse = np.empty((end - begin, HEADS), np.float32)
        out = plan.run(q[begin:end], kv_b, layer, lse=lse)
        np.testing.assert_allclose(out, by_definition(q[begin:end], kv_b, rows[:end], begin, spec.scale), rtol=1e-4, atol=1e-4)
        assert np.isfinite(lse).all()
    assert "latent space" in str(plan)


def test_absorbed_queries():
    normal = random(2)
    spec = imbrex.MlaSpec(HEADS, kv_lora_rank=RANK, qk_nope_dim=NOPE, qk_rope_dim=0, v_dim=VALUE, dtype="f32", kv_dtype="f32", absorbed=True)
    assert spec.q_dim == RANK and spec.out_dim == RANK
    layer = (np.zeros((2, 16, 1, RANK), np.float32),)
    plan = imbrex.MlaPlan(spec, num_threads=1)
    q, rows = normal(3, HEADS, RANK), normal(3, RANK)
    plan.update(int32(0, 3), int32(3), block_table=int32(1).reshape(1, 1), slot_mapping=np.arange(16, 19))
    plan.write_kv(layer, rows)
    out = plan.run(q, None, layer)
    np.testing.assert_allclose(out[0], np.repeat(rows[:1], HEADS, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(layer[0][1, :3, 0], rows)


def test_a_cache_of_two_tensors():
    """Latents and rope parts apart: the same bits as side by side."""
    normal, found = random(3), []
    rows, q, kv_b = normal(20, RANK + ROPE), normal(20, HEADS, NOPE + ROPE), normal(HEADS, NOPE + VALUE, RANK) / 8
    for kv_format in ("latent", "latent_rope"):
        spec = imbrex.MlaSpec(
            HEADS, kv_lora_rank=RANK, qk_nope_dim=NOPE, qk_rope_dim=ROPE, v_dim=VALUE, dtype="f32", kv_dtype="f32", kv_format=kv_format
        )
        layer = imbrex.KvLayer(*(None if x is None else np.from_dlpack(x) for x in imbrex.KvCache(spec.latent_spec, 1, 4).layer(0)))
        plan = imbrex.MlaPlan(spec, num_threads=1)
        plan.update(int32(0, 20), int32(20), block_table=int32(3, 1).reshape(1, 2), slot_mapping=np.array([*range(48, 64), *range(16, 20)]))
        plan.write_kv(layer, rows[:, :RANK], rows[:, RANK:])
        found.append(plan.run(q, kv_b, layer))
    np.testing.assert_array_equal(layer.k_rope[1, :4, 0], rows[16:, RANK:])
    np.testing.assert_array_equal(*found)
    with pytest.raises(imbrex.Error) as error:
        plan.run(q, kv_b, (layer.k,))
    assert error.value.code == "kv_cache.k_rope.missing"


def test_on_a_gpu_as_on_a_cpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    torch.manual_seed(4)
    spec = imbrex.MlaSpec(16, kv_lora_rank=512, qk_nope_dim=128, qk_rope_dim=64, v_dim=128, block_size=64)
    rows, q, kv_b = (torch.randn(*shape).bfloat16() for shape in ((301, 576), (301, 16, 192), (16, 256, 512)))
    table, kv_b, found = torch.tensor([[3, 1, 0, 5, 2]], dtype=torch.int32), kv_b / 512**0.5, []
    for device in ("cpu", "cuda"):
        pages, plan = torch.zeros(6, 64, 1, 576, dtype=torch.bfloat16, device=device), imbrex.MlaPlan(spec, "cpu" if device == "cpu" else "cuda:0")
        outs = []
        for begin, end in ((0, 300), (300, 301)):  # a prompt, and decode
            slots = torch.tensor([int(table[0, j // 64]) * 64 + j % 64 for j in range(begin, end)])
            plan.update(int32(0, end - begin), int32(end), block_table=table.to(device), slot_mapping=slots.to(device))
            mine = rows[begin:end].to(device)
            plan.write_kv((pages,), mine[:, :512], mine[:, 512:])
            outs.append(plan.run(q[begin:end].to(device), kv_b.to(device), (pages,)).cpu().float())
        found.append(torch.cat(outs))
    torch.testing.assert_close(*found, atol=3e-2, rtol=3e-2)


def test_what_is_refused():
    with pytest.raises(imbrex.Error) as error:
        imbrex.MlaSpec(HEADS, kv_lora_rank=60)
    assert error.value.code == "mla.kv_lora_rank"
    spec = imbrex.MlaSpec(HEADS, dtype="f32", kv_dtype="f32")
    with pytest.raises(imbrex.Error) as error:
        imbrex.MlaPlan(spec, "h200")
    assert error.value.code == "backend.device_absent"
    plan = imbrex.MlaPlan(spec, num_threads=1)
    plan.update(int32(0, 1), int32(1), block_table=int32(0).reshape(1, 1), slot_mapping=np.zeros(1, np.int64))
    pages = np.zeros((1, 16, 1, 576), np.float32)
    with pytest.raises(imbrex.Error) as error:
        plan.run(np.zeros((1, HEADS, 192), np.float32), None, (pages,))
    assert error.value.code == "mla.run.kv_b"
    with pytest.raises(imbrex.Error) as error:
        plan.write_kv((pages,), np.zeros((1, 512), np.float32))
    assert error.value.code == "mla.write_kv.rope"


def test_plans_for_drafts_refuse_fewer_tokens():
    spec = imbrex.MlaSpec(HEADS, kv_lora_rank=RANK, qk_nope_dim=NOPE, qk_rope_dim=ROPE, v_dim=VALUE, dtype="f32", kv_dtype="f32")
    plan = imbrex.MlaPlan(spec, max_query_len=4, min_query_len=4, num_threads=1)
    table = np.zeros((3, 1), np.int32)
    plan.update(int32(0, 4, 4, 8), int32(4, 0, 6), block_table=table)
    with pytest.raises(imbrex.Error, match="at least 4 .*got 3 in request 2") as caught:
        plan.update(int32(0, 4, 4, 7), int32(4, 0, 6), block_table=table)
    assert caught.value.code == "batch.query_len.limit"
    with pytest.raises(imbrex.Error, match="expected 0 to 4 query tokens, got 5"):
        imbrex.MlaPlan(spec, max_query_len=4, min_query_len=5)


def test_lengths_on_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    spec = imbrex.MlaSpec(16, block_size=64)
    limits = dict(max_num_reqs=2, max_num_tokens=2, max_seq_len=256, max_query_len=1, out_dtype="bf16")
    torch.manual_seed(4)
    q, kv_b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((2, 16, 192), (16, 256, 512)))
    pages, table = torch.randn(6, 64, 1, 576, device="cuda", dtype=torch.bfloat16), torch.tensor([[2, 0], [5, 1]], dtype=torch.int32)
    plan, expected = imbrex.MlaPlan(spec, "cuda:0", on_device=True, **limits), imbrex.MlaPlan(spec, "cuda:0", **limits)
    for lens in ([70, 128], [3, 300]):
        there = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 1, 2], lens)]
        plan.update_on_device(*there, block_table=table.cuda())
        out = plan.run(q, kv_b, (pages,), torch.zeros(2, 16, 128, device="cuda", dtype=torch.bfloat16))
        expected.update(int32(0, 1, 2), int32(lens[0], min(lens[1], 128)), block_table=table.numpy())
        wanted = expected.run(q, kv_b, (pages,))
        if lens[1] == 300:  # more keys than pages: the request is left out
            wanted[1] = 0
        assert torch.equal(out, wanted)
        assert [r.code for r in plan.device_problems()] == ["batch.seq_len.limit"] * (lens[1] == 300)


def test_lengths_on_a_device_are_refused_on_a_cpu():
    spec = imbrex.MlaSpec(HEADS, kv_lora_rank=RANK, qk_nope_dim=NOPE, qk_rope_dim=ROPE, v_dim=VALUE, dtype="f32", kv_dtype="f32")
    plan = imbrex.MlaPlan(spec, max_query_len=1, out_dtype="f32", num_threads=1)
    with pytest.raises(imbrex.Error) as caught:
        plan.update_on_device(int32(0, 1), int32(3), block_table=np.zeros((1, 1), np.int32))
    assert caught.value.code == "update.on_device" and plan.device_problems() == []
    with pytest.raises(imbrex.Error, match="at most 1") as caught:
        plan.update(int32(0, 2), int32(3), block_table=np.zeros((1, 1), np.int32))
    with pytest.raises(imbrex.Error) as caught:
        imbrex.MlaPlan(spec, out_dtype="bf16")
    assert caught.value.code == "backend.out_dtype"
