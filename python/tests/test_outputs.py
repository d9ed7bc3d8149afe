"""What is written must be writable, and have memory of its own."""
import numpy as np
import pytest

import imbrex

STARTS = np.array([0, 4], np.int32)


def rows(rng, heads=2):
    return rng.standard_normal((4, heads, 64)).astype(np.float32)


def read_only(array):
    array.flags.writeable = False
    return array


def frozen(shape):
    """Memory of a bytes object, which Python code relies on never to change."""
    data = bytes(4 * int(np.prod(shape)))
    return data, np.frombuffer(data, np.float32).reshape(shape)


def code_of(call):
    with pytest.raises(imbrex.Error) as error:
        call()
    return error.value.code, str(error.value)


def test_outputs_must_be_writable(rng):
    q, k, v = (read_only(rows(rng)) for _ in range(3))
    expected = imbrex.attention_varlen(q, k, v, STARTS, STARTS)  # inputs may be read-only
    data, out = frozen((4, 2, 64))
    for given in (read_only(np.empty_like(expected)), out):
        code, text = code_of(lambda: imbrex.attention_varlen(q, k, v, STARTS, STARTS, out=given))
        assert code == "python.read_only" and text.startswith("out: ") and "ndarray" in text
    assert data == bytes(len(data))
    plan = imbrex.Plan(imbrex.AttentionSpec(2, 2, 64, q_dtype="f32", block_size=0), max_seq_len=8, max_num_tokens=8)
    plan.update(STARTS, np.array([4], np.int32), kv_start_loc=STARTS)
    code, text = code_of(lambda: plan.run(q, (k, v), lse=read_only(np.empty((4, 2), np.float32))))
    assert code == "python.read_only" and text.startswith("lse: ")
    code, text = code_of(lambda: imbrex.merge_states([expected], [np.zeros((4, 2), np.float32)], out=frozen((4, 2, 64))[1]))
    assert code == "python.read_only" and text.startswith("out: ")
    code, text = code_of(lambda: imbrex.merge_states([expected], [np.zeros((4, 2), np.float32)], lse=frozen((4, 2))[1]))
    assert code == "python.read_only" and text.startswith("lse: ")


def paged_plan():
    plan = imbrex.Plan(imbrex.AttentionSpec(2, 2, 64, q_dtype="f32"), max_seq_len=64, max_num_tokens=8)
    step = dict(block_table=np.array([[1]], np.int32), slot_mapping=np.arange(16, 20))
    plan.update(STARTS, np.array([4], np.int32), **step)
    return plan


def test_caches_must_be_writable(rng):
    plan, k = paged_plan(), rows(rng)
    pages = np.zeros((3, 16, 2, 64), np.float32)
    for layer, name in (((read_only(pages.copy()), pages), "k_cache"), ((pages, frozen(pages.shape)[1]), "v_cache")):
        code, text = code_of(lambda: plan.write_kv(layer, k, k))
        assert code == "python.read_only" and text.startswith(name)
    plan.write_kv((pages, pages.copy()), read_only(k.copy()), k)
    assert plan.run(k, (read_only(pages), pages)).shape == k.shape


def test_arrays_of_jax_are_never_written(rng):
    class ArrayImpl(np.ndarray):  # as far as the package looks
        pass

    ArrayImpl.__module__ = "jaxlib._jax"
    out = rows(rng).view(ArrayImpl)
    code, text = code_of(lambda: imbrex.attention_varlen(out, out, out, STARTS, STARTS, out=out))
    assert code == "python.read_only" and "ArrayImpl" in text


def test_an_output_is_an_array(rng):
    q = rows(rng)
    with pytest.raises(TypeError, match="out: expected an array, got list"):
        imbrex.attention_varlen(q, q, q, STARTS, STARTS, out=[1.0])


def test_outputs_have_memory_of_their_own(rng):
    q, k, v = (rows(rng) for _ in range(3))
    expected = imbrex.attention_varlen(q, k, v, STARTS, STARTS)
    for given, what in ((q, "q"), (k, "k"), (v, "v"), (v[::-1], "v")):
        code, text = code_of(lambda: imbrex.attention_varlen(q, k, v, STARTS, STARTS, out=given))
        assert code == "python.overlap" and text.startswith("out: ") and f" {what} " in text
    broadcast = np.lib.stride_tricks.as_strided(np.empty((1, 2, 64), np.float32), (4, 2, 64), (0, 256, 4), writeable=True)
    code, text = code_of(lambda: imbrex.attention_varlen(q, k, v, STARTS, STARTS, out=broadcast))
    assert code == "python.overlap" and "dimension 0" in text
    plan = imbrex.Plan(imbrex.AttentionSpec(2, 2, 64, q_dtype="f32", block_size=0), max_seq_len=8, max_num_tokens=8)
    plan.update(STARTS, np.array([4], np.int32), kv_start_loc=STARTS)
    out = np.empty_like(q)
    code, text = code_of(lambda: plan.run(q, (k, v), out, lse=out.reshape(-1)[:8].reshape(4, 2)))
    assert code == "python.overlap" and text.startswith("lse: ")
    assert np.array_equal(imbrex.attention_varlen(q, k, v, STARTS, STARTS), expected)  # nothing was written

    plan, pages = paged_plan(), np.zeros((3, 16, 2, 64), np.float32)
    code, text = code_of(lambda: plan.write_kv((pages, pages.copy()), pages[2, :4], k))
    assert code == "python.overlap" and text.startswith("k_cache: ")


def test_parts_of_one_array_are_apart(rng):
    """q, k, v and outputs that lie in turns in one array do not share memory."""
    packed = rng.standard_normal((4, 4, 2, 64)).astype(np.float32)
    expected = imbrex.attention_varlen(*(packed[:, i].copy() for i in range(3)), STARTS, STARTS)
    out = imbrex.attention_varlen(packed[:, 0], packed[:, 1], packed[:, 2], STARTS, STARTS, out=packed[:, 3])
    assert np.array_equal(out, expected)
    by_heads = rng.standard_normal((2, 4, 4, 64)).astype(np.float32)  # [head, token, which, d]
    parts = [by_heads[:, :, i].transpose(1, 0, 2) for i in range(4)]
    expected = imbrex.attention_varlen(*(x.copy() for x in parts[:3]), STARTS, STARTS)
    assert np.array_equal(imbrex.attention_varlen(*parts[:3], STARTS, STARTS, out=parts[3]), expected)
    wide = np.zeros((4, 2, 192), np.float32)  # heads of one output between those of q
    wide[:, :, :64] = packed[:, 0]
    expected = imbrex.attention_varlen(packed[:, 0].copy(), packed[:, 1], packed[:, 2], STARTS, STARTS)
    assert np.array_equal(imbrex.attention_varlen(wide[..., :64], packed[:, 1], packed[:, 2], STARTS, STARTS, out=wide[..., 128:]), expected)
    with pytest.raises(imbrex.Error, match="out: .* q "):
        imbrex.attention_varlen(wide[..., :64], packed[:, 1], packed[:, 2], STARTS, STARTS, out=wide[..., 32:96])
