"""Plans, caches and one-call functions on NumPy arrays, against float64."""
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import imbrex
from reference import attention, bf16_bits, from_bf16


class Step:
    """Requests of random lengths in pages out of order: a prompt, a chunk, and decode."""

    def __init__(self, rng, block_size=16):
        self.q_lens, self.seq_lens = np.array([20, 5, 1], np.int32), np.array([20, 37, 50], np.int32)
        self.query_start_loc = np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)
        columns = -(-int(self.seq_lens.max()) // block_size)
        self.block_table = rng.permutation(3 * columns).astype(np.int32).reshape(3, columns)
        self.num_blocks = 3 * columns
        self.slots = [
            np.array([self.block_table[r, j // block_size] * block_size + j % block_size for j in range(n)], np.int64)
            for r, n in enumerate(self.seq_lens)
        ]
        self.keys = [rng.standard_normal((n, 2, 64)).astype(np.float32) for n in self.seq_lens]
        self.values = [rng.standard_normal((n, 2, 64)).astype(np.float32) for n in self.seq_lens]
        self.q = rng.standard_normal((26, 8, 64)).astype(np.float32)

    def new(self, rows):
        """Of rows for all keys, those of this step's tokens."""
        return np.concatenate([x[len(x) - n :] for x, n in zip(rows, self.q_lens)])

    def pages(self, rows, block_size=16):
        unused = np.nan if rows[0].dtype.kind == "f" else 0xFFFF  # a NaN of bfloat16 too
        cache = np.full((self.num_blocks * block_size, *rows[0].shape[1:]), unused, rows[0].dtype)
        for slots, x in zip(self.slots, rows):
            cache[slots] = x
        return cache.reshape(self.num_blocks, block_size, *rows[0].shape[1:])

    def expected(self, convert=lambda x: x, **mask):
        q = convert(self.q)
        parts = [
            attention(q[a:b], convert(k), convert(v), **mask)
            for a, b, k, v in zip(self.query_start_loc, self.query_start_loc[1:], self.keys, self.values)
        ]
        return tuple(np.concatenate(x) for x in zip(*parts))


def spec_f32(**fields):
    return imbrex.AttentionSpec(8, 2, 64, q_dtype="f32", **fields)


def test_plan_writes_and_runs(rng):
    step = Step(rng)
    spec = spec_f32()
    plan = imbrex.Plan(spec, max_seq_len=64)
    cache = imbrex.KvCache(spec, num_layers=2, num_blocks=step.num_blocks)
    layer = cache.layer(1)
    k, v = np.from_dlpack(layer.k), np.from_dlpack(layer.v)
    assert k.shape == (step.num_blocks, 16, 2, 64) and not k.any()
    for pages, rows in ((k, step.keys), (v, step.values)):  # what earlier steps wrote, in place
        old = step.pages([np.concatenate([x[: len(x) - n], np.zeros((n, 2, 64), np.float32)]) for x, n in zip(rows, step.q_lens)])
        np.copyto(pages, np.nan_to_num(old))
    slots = step.new(step.slots)
    plan.update(step.query_start_loc, step.seq_lens, block_table=step.block_table, slot_mapping=slots)
    plan.write_kv(layer, step.new(step.keys), step.new(step.values))
    lse = np.empty((26, 8), np.float32)
    out = plan.run(step.q, layer, lse=lse)
    expected, expected_lse = step.expected(causal=True)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)
    assert "work items" in str(plan)
    given = np.zeros_like(out)
    assert plan.run(step.q, layer, given) is given and (given == out).all()


def test_latent_values_are_a_part_of_the_keys(rng):
    step = Step(rng)
    step.keys = [rng.standard_normal((n, 2, 96)).astype(np.float32) for n in step.seq_lens]
    step.values = [k[:, :, :64] for k in step.keys]
    step.q = rng.standard_normal((26, 8, 96)).astype(np.float32)
    results = []
    for kv_format in ("strided", "latent_rope", "latent"):
        latent = kv_format != "strided"
        spec = imbrex.AttentionSpec(8, 2, 96, 64, q_dtype="f32", kv_format=kv_format)
        assert spec.kv_bytes_per_token == 2 * (96 if latent else 160) * 4 and ("latent" in str(spec)) == latent
        cache = imbrex.KvCache(spec, num_layers=2, num_blocks=step.num_blocks)
        layer = cache.layer(1)
        assert (layer.v is None) == latent and layer.k_scale is None and (layer.k_rope is not None) == (kv_format == "latent_rope")
        writer = imbrex.Plan(spec, max_seq_len=64)
        lens, columns = step.seq_lens, step.block_table
        writer.update(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32), lens, block_table=columns, slot_mapping=np.concatenate(step.slots))
        writer.write_kv(layer, np.concatenate(step.keys), *([] if latent else [np.concatenate(step.values)]))
        plan = imbrex.Plan(spec, max_seq_len=64)
        plan.update(step.query_start_loc, lens, block_table=columns)
        results.append(plan.run(step.q, layer))
        if kv_format != "latent":
            continue
        k = np.from_dlpack(layer.k)
        np.testing.assert_array_equal(plan.run(step.q, (k, k[..., :64])), results[-1])  # the same memory, said again
        for bad in ((k, k[..., 32:]), (k, np.zeros_like(k[..., :64]))):
            with pytest.raises(imbrex.Error) as error:
                plan.run(step.q, bad)
            assert error.value.code == "kv_cache.v.unexpected"
        with pytest.raises(imbrex.Error) as error:
            writer.write_kv(layer, np.concatenate(step.keys), np.concatenate(step.values))
        assert error.value.code == "write_kv.v"
        cache.copy_blocks([(0, 1)])
        np.testing.assert_array_equal(k[1], k[0])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])
    expected, _ = step.expected(causal=True)
    np.testing.assert_allclose(results[0], expected, atol=2e-5)
    with pytest.raises(imbrex.Error) as error:
        imbrex.AttentionSpec(8, 2, 64, 96, kv_format="latent")
    assert error.value.code == "spec.head_dim_v.latent"


def test_records_of_a_latent(rng):
    spec = imbrex.AttentionSpec(4, 1, 576, 512, q_dtype="f32", kv_dtype="fp8_e4m3", kv_format="fp8_ds_mla")
    assert spec.kv_bytes_per_token == 656
    cache = imbrex.KvCache(spec, num_layers=1, num_blocks=2)
    layer = cache.layer(0)
    keys = rng.standard_normal((20, 1, 576)).astype(np.float32)
    plan = imbrex.Plan(spec, max_seq_len=64)
    plan.update(np.array([0, 20], np.int32), np.array([20], np.int32), block_table=np.array([[1, 0]], np.int32), slot_mapping=np.arange(16, 36) % 32)
    plan.write_kv(layer, keys)
    q = rng.standard_normal((20, 4, 576)).astype(np.float32)
    out = plan.run(q, layer)

    records = np.from_dlpack(layer.k).reshape(32, 656)[np.arange(16, 36) % 32]
    codes, scales = records[:, :512].astype(np.int32), records[:, 512:528].copy().view(np.float32)
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10.0), fraction * 2.0**-9)
    latent = np.where(codes & 128, -magnitude, magnitude) * scales.repeat(128, axis=1)
    rope = (records[:, 528:].copy().view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(latent, keys[:, 0, :512], rtol=1 / 16, atol=0.01)
    np.testing.assert_allclose(rope, keys[:, 0, 512:], rtol=1 / 256)
    assert (np.log2(scales) % 1 == 0).all()
    for t in range(20):
        logits = q[t] @ np.concatenate([latent, rope], axis=1)[: t + 1].T / 24
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        np.testing.assert_allclose(out[t], weights / weights.sum(axis=1, keepdims=True) @ latent[: t + 1], atol=2e-5)


def test_arrays_of_a_cache_keep_its_memory():
    cache = imbrex.KvCache(spec_f32(), 1, 4)
    k = np.from_dlpack(cache.layer(0).k)
    k[:] = 3
    del cache
    gc.collect()
    assert (k == 3).all()


def test_bits_of_bf16(rng):
    step = Step(rng)
    spec = imbrex.AttentionSpec(8, 2, 64)
    plan = imbrex.Plan(spec, max_seq_len=64)
    k, v = (step.pages([bf16_bits(x) for x in rows]) for rows in (step.keys, step.values))
    plan.update(step.query_start_loc, step.seq_lens, block_table=step.block_table)
    out = plan.run(bf16_bits(step.q), (k, v))
    assert out.dtype == np.uint16
    expected, _ = step.expected(lambda x: from_bf16(bf16_bits(x)), causal=True)
    np.testing.assert_allclose(from_bf16(out), expected, atol=2e-2)


def test_plan_holds_the_arrays_of_a_step(rng):
    step = Step(rng)
    plan = imbrex.Plan(spec_f32(), max_seq_len=64)
    plan.update(step.query_start_loc, step.seq_lens, block_table=step.block_table.copy())
    gc.collect()
    np.full(4096, -1, np.int32)  # likely where a freed table was
    out = plan.run(step.q, (step.pages(step.keys), step.pages(step.values)))
    np.testing.assert_allclose(out, step.expected(causal=True)[0], atol=2e-5)


def test_paged_by_table_and_by_indices(rng):
    step = Step(rng)
    k, v = step.pages(step.keys), step.pages(step.values)
    expected, expected_lse = step.expected(causal=True, window_left=9, soft_cap=4.0)
    options = dict(window=(9, -1), soft_cap=4.0, return_lse=True)
    out, lse = imbrex.attention_paged(step.q, k, v, step.query_start_loc, step.seq_lens, step.block_table, **options)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5)
    counts = -(-step.seq_lens // 16)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    indices = np.concatenate([row[:n] for row, n in zip(step.block_table, counts)]).astype(np.int32)
    last = (step.seq_lens - (counts - 1) * 16).astype(np.int32)
    same, _ = imbrex.attention_paged(
        step.q, k, v, step.query_start_loc, step.seq_lens, kv_indptr=indptr, kv_indices=indices, kv_last_page_len=last, **options
    )
    assert (same == out).all()


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(rng, causal):
    step = Step(rng)
    starts = np.concatenate([[0], np.cumsum(step.seq_lens)]).astype(np.int32)
    sinks = rng.standard_normal(8).astype(np.float32)
    out = imbrex.attention_varlen(
        step.q, np.concatenate(step.keys), np.concatenate(step.values), step.query_start_loc, starts, causal=causal, scale=0.2, sinks=sinks
    )
    np.testing.assert_allclose(out, step.expected(causal=causal, scale=0.2, sinks=sinks)[0], atol=2e-5)


def test_strided_arrays_are_not_copied(rng):
    step = Step(rng)
    both = np.stack([step.pages(step.keys), step.pages(step.values)], 2)  # [block, token, k or v, head, dim]
    wide = np.zeros((26, 8, 128), np.float32)
    wide[:, :, 64:] = step.q
    out = np.full((26, 16, 64), -1, np.float32)
    result = imbrex.attention_paged(
        wide[:, :, 64:], both[:, :, 0], both[:, :, 1], step.query_start_loc, step.seq_lens, step.block_table, out=out[:, ::2]
    )
    np.testing.assert_allclose(result, step.expected(causal=True)[0], atol=2e-5)
    assert (out[:, 1::2] == -1).all() and (out[:, ::2] == result).all()


def test_merge(rng):
    q = rng.standard_normal((5, 8, 64))
    k, v = rng.standard_normal((30, 2, 64)), rng.standard_normal((30, 2, 64))
    whole, whole_lse = attention(q, k, v, causal=False)
    parts = [attention(q, k[a:b], v[a:b], causal=False) for a, b in ((0, 7), (7, 8), (8, 30))]
    outs, lses = ([np.asarray(x, np.float32) for x in xs] for xs in zip(*parts))
    out, lse = imbrex.merge_states(outs, lses)
    np.testing.assert_allclose(out, whole, atol=1e-5)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-5)
    two, _ = imbrex.merge_state(outs[0], lses[0], outs[1], lses[1])
    expected, _ = attention(q, k[:8], v[:8], causal=False)
    np.testing.assert_allclose(two, expected, atol=1e-5)
    with pytest.raises(ValueError):
        imbrex.merge_states([], [])


def test_parts_without_tokens_are_merged():
    out, lse = imbrex.merge_states([np.ones((0, 3, 22), np.float32)] * 2, [np.ones((0, 3), np.float32)] * 2)
    assert out.shape == (0, 3, 22) and lse.shape == (0, 3)


def test_plans_run_beside_each_other(rng):
    """The lock of Python is not held meanwhile; results do not depend on it."""
    step = Step(rng)
    k, v = step.pages(step.keys), step.pages(step.values)
    expected = step.expected(causal=True)[0]
    outs = []

    def work():
        plan = imbrex.Plan(spec_f32(), max_seq_len=64, num_threads=1)
        for _ in range(20):
            plan.update(step.query_start_loc, step.seq_lens, block_table=step.block_table)
            outs.append(plan.run(step.q, (k, v)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(outs) == 80
    for out in outs:
        np.testing.assert_allclose(out, expected, atol=2e-5)


def test_outputs_of_one_type():
    spec = imbrex.AttentionSpec(8, 2, 64)
    imbrex.Plan(spec, out_dtype="bf16")
    with pytest.raises(imbrex.Error, match="expected a type of outputs of") as caught:
        imbrex.Plan(spec, out_dtype="f16")
    assert caught.value.code == "backend.out_dtype"


def test_numbers_of_threads():
    with pytest.raises(imbrex.Error, match="0 .one for each core. or more threads, got -3") as error:
        imbrex.Plan(spec_f32(), max_seq_len=64, num_threads=-3)
    assert error.value.code == "python.num_threads"
    with pytest.raises(imbrex.Error, match="got -1"):
        imbrex.merge_states([np.ones((4, 2, 8), np.float32)], [np.zeros((4, 2), np.float32)], num_threads=-1)


def test_merge_uses_the_threads_it_is_given():
    """In a process of its own, whose threads are counted."""
    text = """
import os
import numpy as np, imbrex
rng = np.random.default_rng(0)
outs, lses = [rng.standard_normal((512, 8, 64)).astype("f4") for _ in "ab"], [rng.standard_normal((512, 8)).astype("f4") for _ in "ab"]
one, threads = imbrex.merge_states(outs, lses), len(os.listdir("/proc/self/task"))
many, more = imbrex.merge_states(outs, lses, num_threads=8), len(os.listdir("/proc/self/task"))
for a, b in zip(one, many):
    np.testing.assert_array_equal(a, b)
print(more - threads, len(os.sched_getaffinity(0)))
"""
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=Path(imbrex.__file__).parents[1])
    started, cores = map(int, ran.stdout.split()) if ran.returncode == 0 else pytest.fail(ran.stderr)
    assert started >= (cores > 1)


def test_copy_on_write(rng):
    """A block that two requests share is copied in every layer before one of them writes."""
    cache = imbrex.KvCache(spec_f32(), num_layers=3, num_blocks=4)
    pages = [np.from_dlpack(a) for i in range(3) for a in cache.layer(i)[:2]]
    for a in pages:
        a[:] = rng.standard_normal(a.shape).astype(np.float32)
    before = [a.copy() for a in pages]
    pool = imbrex.BlockPool(4)
    shared = pool.allocate(1)
    pool.retain(shared)
    mine = pool.make_writable(shared[0])
    assert mine not in (None, shared[0])
    cache.copy_blocks([(shared[0], mine)])
    for a, old in zip(pages, before):
        np.testing.assert_array_equal(a[mine], old[shared[0]])
        others = [b for b in range(4) if b != mine]
        np.testing.assert_array_equal(a[others], old[others])
    for bad, code in (([(0, 4)], "to"), ([(-1, 1)], "from"), ([(0, 1), (1, 2)], "chained"), ([(0, 1), (2, 1)], "twice")):
        with pytest.raises(imbrex.Error) as error:
            cache.copy_blocks(bad)
        assert error.value.code == f"kv_cache.copy.{code}"


def test_the_log_names_backend_device_and_kernels():
    text = "import imbrex\nimbrex.Plan(imbrex.AttentionSpec(8, 2, 64, q_dtype='f32'), backend='cpu_generic', max_seq_len=64)"
    for level, expected in (("info", 1), ("warning", 0), ("off", 0)):
        environment = {**os.environ, "IMBREX_LOG": level}
        ran = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, cwd=Path(imbrex.__file__).parents[1], env=environment, check=True
        )
        lines = [line for line in ran.stderr.splitlines() if line.startswith("imbrex: plan: cpu_generic (")]
        assert len(lines) == expected and all("q8/kv2 d64" in line for line in lines), ran.stderr
    ran = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=Path(imbrex.__file__).parents[1], env={**os.environ, "IMBREX_LOG": "x"}
    )
    assert ran.returncode == 1 and "expected off, warning or info in IMBREX_LOG" in ran.stderr


def test_a_prepared_run_takes_arrays_elsewhere():
    spec = imbrex.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim_qk=16, head_dim_v=16, q_dtype="f32", kv_dtype="f32", block_size=0)
    plan = imbrex.Plan(spec)
    plan.update(np.array([0, 3], np.int32), np.array([5], np.int32), kv_start_loc=np.array([0, 5], np.int32))
    rng = np.random.default_rng(2)
    prepared = None
    for _ in range(3):
        q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((3, 4, 16), (5, 2, 16), (5, 2, 16)))
        expected, out = plan.run(q, (k, v)), np.full((3, 4, 16), np.nan, np.float32)
        prepared = prepared or plan.prepare(q, (k, v), out)
        prepared(q.ctypes.data, k.ctypes.data, v.ctypes.data, out.ctypes.data, 0)
        assert np.array_equal(out, expected)
    readonly = np.zeros((3, 4, 16), np.float32)
    readonly.flags.writeable = False
    with pytest.raises(RuntimeError, match="read-only"):
        plan.prepare(q, (k, v), readonly)
    del plan
    prepared(q.ctypes.data, k.ctypes.data, v.ctypes.data, out.ctypes.data, 0)  # keeps its plan
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("window_left", [-1, 12])
def test_positions_of_queries(rng, window_left):
    """A rank of a context-parallel group may hold chunks from both ends of a prompt; an image's tokens see each other."""
    step = Step(rng)
    spec = spec_f32(positions=True, window_left=window_left)
    plan = imbrex.Plan(spec, max_seq_len=64)
    pages = tuple(step.pages(rows) for rows in (step.keys, step.values))
    places = [rng.permutation(n)[:q_len].astype(np.int32) for n, q_len in zip(step.seq_lens, step.q_lens)]
    arrays = dict(block_table=step.block_table)
    plan.update(step.query_start_loc, step.seq_lens, positions=np.concatenate(places), **arrays)
    lse = np.empty((26, 8), np.float32)
    out = plan.run(step.q, pages, lse=lse)
    for r, (a, b) in enumerate(zip(step.query_start_loc, step.query_start_loc[1:])):
        expected = attention(step.q[a:b], step.keys[r], step.values[r], causal=True, window_left=window_left, positions=places[r])
        np.testing.assert_allclose(out[a:b], expected[0], atol=2e-6)
        np.testing.assert_allclose(lse[a:b], expected[1], atol=2e-6)
    with pytest.raises(imbrex.Error, match="expected 26, got 0"):
        plan.update(step.query_start_loc, step.seq_lens, **arrays)
    with pytest.raises(imbrex.Error, match="expected 0 to 536870911"):
        plan.update(step.query_start_loc, step.seq_lens, positions=np.full(26, -1, np.int32), **arrays)
    with pytest.raises(imbrex.Error, match="26 positions given for a spec whose mask is causal"):
        imbrex.Plan(spec_f32(), max_seq_len=64).update(step.query_start_loc, step.seq_lens, positions=np.concatenate(places), **arrays)


@pytest.mark.parametrize("window_left", [-1, 3])
def test_trees_of_drafts(rng, window_left):
    """A query sees what is in front of the step's tokens, its ancestors and itself; windows go by depth."""
    step = Step(rng)
    plan = imbrex.Plan(spec_f32(tree=True, window_left=window_left), max_seq_len=64)
    pages = tuple(step.pages(rows) for rows in (step.keys, step.values))
    arrays = dict(block_table=step.block_table)
    parents = [np.array([rng.integers(-1, t) if t > 0 else -1 for t in range(n)], np.int32) for n in step.q_lens]
    plan.update(step.query_start_loc, step.seq_lens, draft_parents=np.concatenate(parents), **arrays)
    out = plan.run(step.q, pages)
    for r, (a, b) in enumerate(zip(step.query_start_loc, step.query_start_loc[1:])):
        context = step.seq_lens[r] - step.q_lens[r]
        position = np.arange(step.seq_lens[r])  # of keys
        mask = np.zeros((b - a, step.seq_lens[r]), bool)
        for t, parent in enumerate(parents[r]):
            position[context + t] = context if parent < 0 else position[context + parent] + 1
            mask[t] = mask[parent] if parent >= 0 else np.arange(step.seq_lens[r]) < context
            mask[t, context + t] = True
        if window_left >= 0:
            mask &= position >= position[context:, None] - window_left
        expected = attention(step.q[a:b], step.keys[r], step.values[r], causal=False, mask=mask)
        np.testing.assert_allclose(out[a:b], expected[0], atol=2e-6)
    # Drafts behind tokens that are certain: their own parents alone are read.
    some = np.minimum(step.q_lens, 2).astype(np.int32)
    plan.update(
        step.query_start_loc,
        step.seq_lens,
        draft_parents=np.concatenate([np.arange(n, dtype=np.int32) - 1 for n in step.q_lens]),
        num_drafts=some,
        **arrays,
    )
    np.testing.assert_allclose(plan.run(step.q, pages), step.expected(causal=True, window_left=window_left)[0], atol=2e-6)
    with pytest.raises(imbrex.Error, match="expected a parent of -1 to 2 for token 3 of request 0, got 3"):
        wrong = np.concatenate(parents)
        wrong[3] = 3
        plan.update(step.query_start_loc, step.seq_lens, draft_parents=wrong, **arrays)
