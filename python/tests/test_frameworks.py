"""Arrays of CuPy and JAX, where they are installed."""
import numpy as np
import pytest

import imbrex
from reference import attention

STARTS, LENS = np.array([0, 20], np.int32), np.array([20], np.int32)


def plain(rng):
    return (rng.standard_normal((20, heads, 64)).astype(np.float32) for heads in (8, 2, 2))


def test_jax_arrays_are_read(rng):
    jax = pytest.importorskip("jax")
    q, k, v = plain(rng)
    expected, _ = attention(q, k, v, causal=True)
    arrays = [jax.device_put(x, jax.devices("cpu")[0]) for x in (q, k, v)]
    out = imbrex.attention_varlen(*arrays, STARTS, STARTS, causal=True, out=np.empty_like(q))
    np.testing.assert_allclose(out, expected, atol=2e-5)
    with pytest.raises(TypeError, match="out="):  # they cannot be written
        imbrex.attention_varlen(*arrays, STARTS, STARTS, causal=True)
    with pytest.raises(imbrex.Error, match="out: .* read-only"):
        imbrex.attention_varlen(*arrays, STARTS, STARTS, causal=True, out=arrays[0])


def test_jax_arrays_of_a_gpu_are_read(rng):
    jax, cupy = pytest.importorskip("jax"), pytest.importorskip("cupy")
    if not imbrex.num_cuda_devices() or jax.default_backend() != "gpu":
        pytest.skip("no GPU for JAX")
    q, k, v = plain(rng)
    expected, _ = attention(2 * q, k, v, causal=True)
    arrays = [jax.device_put(x, jax.devices("gpu")[0]) for x in (q, k, v)]
    arrays[0] = jax.jit(lambda x: x + x)(arrays[0])  # on its way when it is read
    starts = cupy.asarray(STARTS)
    out = imbrex.attention_varlen(*arrays, STARTS, starts.get(), causal=True, out=cupy.empty(q.shape, np.float32))
    cupy.cuda.Device().synchronize()
    np.testing.assert_allclose(out.get(), expected, atol=2e-3)


def test_cupy_arrays_on_a_stream(rng):
    cupy = pytest.importorskip("cupy")
    if not imbrex.num_cuda_devices():
        pytest.skip("no GPU")
    q, k, v = plain(rng)
    expected, expected_lse = attention(q, k, v, causal=True)
    table = cupy.asarray([[2, 0]], np.int32)
    pages = []
    for rows in (k, v):
        cache = np.full((48, 2, 64), np.nan, np.float32)
        cache[32:48], cache[0:4] = rows[:16], rows[16:]
        pages.append(cupy.asarray(cache.reshape(3, 16, 2, 64)))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        out, lse = imbrex.attention_paged(cupy.asarray(q), *pages, STARTS, LENS, table, return_lse=True)
        assert isinstance(out, cupy.ndarray)
    stream.synchronize()
    np.testing.assert_allclose(out.get(), expected, atol=2e-3)
    np.testing.assert_allclose(lse.get(), expected_lse, atol=2e-3)
