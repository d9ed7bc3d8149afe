"""The order of a step's requests, and parts of batches: what plans make of parts is what they make of the whole."""
import gc

import numpy as np
import pytest

import imbrex
from imbrex import batches


def i32(*numbers):
    return np.array(numbers, np.int32)


def test_order():
    order, swaps = batches.reorder_batch(i32(100, 1, 200, 1), i32(100, 10, 200, 20))
    assert order == [3, 1, 2, 0]
    assert [sorted(pair) for pair in swaps] == [[0, 3]]
    order, _ = batches.reorder_batch(i32(7, 1, 1), i32(5, 9, 9), i32(12, 10, 3))
    assert order == [2, 1, 0]
    with pytest.raises(imbrex.Error) as error:
        batches.reorder_batch(i32(1, 1), i32(1))
    assert error.value.code == "batch.order.size"


def test_phases():
    starts = i32(0, 2, 3, 6, 10, 15)
    assert batches.split_decodes_and_prefills(starts, decode_threshold=3) == (3, 0, 2, 6, 0, 9)
    assert batches.split_decodes_and_prefills(starts, decode_threshold=3, uniform=True, num_tokens=16).prefill_tokens == 14
    assert batches.split_decodes_and_prefills(starts, decode_threshold=3, is_prefilling=np.array([0, 1, 0, 0, 0], bool)).decodes == 1
    counts = batches.split_decodes_prefills_and_extends(i32(0, 1, 3, 7, 12, 18), i32(10, 11, 20, 5, 6), decode_threshold=3)
    assert counts == batches.PhaseCounts(2, 1, 2, 3, 4, 11)
    assert batches.split_prefill_chunks(i32(1, 4, 2), 5, 1) == [(1, 3), (3, 4)]
    with pytest.raises(imbrex.Error) as error:
        batches.split_decodes_and_prefills(starts, is_prefilling=np.zeros(5, np.float32))
    assert error.value.code == "python.tensor"


class Step:
    """A prompt, a chunk and a decode, in pages."""

    def __init__(self, **fields):
        self.spec = imbrex.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim_qk=32, q_dtype="f32", kv_dtype="f32", **fields)
        self.plan = imbrex.Plan(self.spec, num_threads=1)
        self.cache = imbrex.KvCache(self.spec, num_layers=1, num_blocks=9)
        tokens = 20 + 5 + 1
        self.arrays = dict(
            query_start_loc=i32(0, 20, 25, 26),
            seq_lens=i32(20, 37, 40),
            block_table=np.arange(9, dtype=np.int32).reshape(3, 3),
            slot_mapping=np.concatenate([np.arange(20), 48 + np.arange(32, 37), [96 + 39]]).astype(np.int64),
        )
        self.rng = np.random.default_rng(1)
        for pages in self.cache.layer(0)[:2]:
            pages = np.from_dlpack(pages)
            pages[:] = self.rng.standard_normal(pages.shape)
        self.q = self.rng.standard_normal((tokens, 4, 32)).astype(np.float32)

    def run(self, q, **arrays):
        self.plan.update(**arrays)
        return self.plan.run(np.ascontiguousarray(q), self.cache.layer(0))


@pytest.mark.parametrize("fields", [dict(), dict(positions=True), dict(causal=False), dict(custom_mask=True)])
def test_parts_give_the_bits_of_the_whole(fields):
    step = Step(**fields)
    if "positions" in fields:
        step.arrays["positions"] = i32(*range(20), *range(32, 37), 39)
    if "custom_mask" in fields:
        step.arrays["custom_mask"] = (step.rng.random(20 * 20 + 5 * 37 + 40) < 0.7).astype(np.uint8)
    whole = step.run(step.q, **step.arrays)
    for cuts in ([20], [7, 22], [0, 26], []):
        parts = batches.split_batch(step.spec, cuts, **step.arrays)
        assert len(parts) == len(cuts) + 1
        gc.collect()  # arrays keep the memory of parts
        out = [step.run(step.q[part.tokens], **part.arrays) for part in parts]
        np.testing.assert_array_equal(np.concatenate(out), whole)
    tokens = i32(3, 4, 19, 25) if "positions" in fields else i32(18, 19, 24)
    kept = batches.keep_tokens(step.spec, tokens, **step.arrays)
    np.testing.assert_array_equal(step.run(step.q[tokens], **kept.arrays), whole[tokens])


def test_parts_are_views():
    step = Step()
    front, back = batches.split_batch(step.spec, [20], **step.arrays)
    assert (front.first_token, back.first_token, front.first_request, back.first_request) == (0, 20, 0, 1)
    table = np.from_dlpack(back.arrays["block_table"])
    assert np.shares_memory(table, step.arrays["block_table"])
    assert np.from_dlpack(back.arrays["query_start_loc"]).tolist() == [0, 5, 6]
    del step.arrays, back, front
    gc.collect()
    assert table.tolist() == [[3, 4, 5], [6, 7, 8]]


def test_states_go_on():
    spec = imbrex.ShortConvSpec(16, width=3, dtype="f32", num_drafts=2)
    plan = imbrex.ShortConvPlan(spec)
    rng = np.random.default_rng(2)
    bcx, weight = rng.standard_normal((9, 48), np.float32), rng.standard_normal((16, 3), np.float32)
    before = rng.standard_normal((5, spec.state_rows, 16), np.float32)
    arrays = dict(
        query_start_loc=i32(0, 6, 9),
        seq_lens=i32(16, 3),
        state_slots=i32(1, 2),
        num_drafts=i32(2, 0),
        accepted_drafts=i32(1, 0),
        source_slots=i32(4, 2),
    )
    state = before.copy()
    plan.update(**arrays)
    whole = plan.run(bcx, weight, state)
    for cut in (2, 4, 6, 7):
        state_of_parts = before.copy()
        out = []
        for part in batches.split_batch(spec, [cut], **arrays):
            plan.update(**part.arrays)
            out.append(plan.run(bcx[part.tokens], weight, state_of_parts))
        np.testing.assert_array_equal(np.concatenate(out), whole)
        np.testing.assert_array_equal(state_of_parts, state)
    with pytest.raises(imbrex.Error) as error:
        batches.split_batch(spec, [5], **arrays)
    assert error.value.code == "batch.part.drafts"


def test_refusals():
    step = Step()
    with pytest.raises(TypeError, match="block_tables"):
        batches.split_batch(step.spec, [3], block_tables=step.arrays["block_table"])
    for call, code in (
        (lambda: batches.split_batch(step.spec, [30], **step.arrays), "batch.part.cuts"),
        (lambda: batches.keep_tokens(step.spec, i32(3, 5), **step.arrays), "batch.part.gap"),
        (lambda: batches.keep_tokens(step.spec, np.array([3.0]), **step.arrays), "python.tensor"),
    ):
        with pytest.raises(imbrex.Error) as error:
            call()
        assert error.value.code == code
