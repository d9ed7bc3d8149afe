"""What imbrex.flashinfer's wrappers say of arguments that do not fit."""
import contextlib
import functools
import warnings

import pytest

torch = pytest.importorskip("torch")

import imbrex  # noqa: E402
import imbrex.flashinfer as flashinfer  # noqa: E402
from flashinfer_cases import Batch, decode_batch, planned_prefill, workspace  # noqa: E402


def raises(error, match):
    return pytest.raises(error, match=match)


@contextlib.contextmanager
def breaks(code):
    with pytest.raises(imbrex.Error) as error:
        yield
    assert error.value.code == code


def test_errors_name_what_is_wrong():
    batch = decode_batch("cpu")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    with raises(RuntimeError, "before plan"):
        wrapper.run(batch.q, batch.cache())
    plan = functools.partial(wrapper.plan, num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=4, q_data_type=torch.bfloat16)
    indptr, indices, last = batch.arrays("cpu")
    with raises(ValueError, "last_page_len: expected 1 to 4, got 5 for request 3"):
        plan(indptr, indices, torch.tensor([1, 0, 1, 5, 1]))
    with raises(ValueError, "indptr: expected 6 entries, for the 5 requests of last_page_len, got 5"):
        plan(indptr[:5], indices, last)
    with raises(ValueError, "begins with 0"):
        plan(indptr + 1, indices, last)
    with breaks("batch.kv_indices.size"):
        plan(indptr, indices[:-1], last)
    with raises(ValueError, "seq_lens: expected .* got"):
        plan(indptr, indices, last, seq_lens=torch.tensor([17, 0, 1, 64, 34]))
    plan(indptr, indices, last, seq_lens=torch.tensor([17, 0, 1, 64, 33]))
    with raises(ValueError, "q: expected 5 tokens, which plan.. was told, got 4"):
        wrapper.run(batch.q[:4], batch.cache())
    with raises(ValueError, "q: expected torch.bfloat16, which plan.. was told, got torch.float16"):
        wrapper.run(batch.q.half(), batch.cache())
    with raises(ValueError, "k: expected torch.bfloat16"):
        wrapper.run(batch.q, tuple(x.half() for x in batch.cache()))
    with raises(ValueError, "out: expected torch.bfloat16"):
        wrapper.run(batch.q, batch.cache(), out=torch.empty(5, 4, 64))
    with raises(ValueError, "lse: expected torch.float32"):
        wrapper.run(batch.q, batch.cache(), lse=torch.empty(5, 3), return_lse=True)
    with raises(ValueError, "q_len_per_req: expected 1"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapper.run(batch.q, batch.cache(), q_len_per_req=2)
    with breaks("kv_cache.k.block_size"):
        wrapper.run(batch.q, batch.cache("HND"))
    with raises(ValueError, "expected .K, V."):
        wrapper.run(batch.q, (batch.cache()[0],))
    with raises(ValueError, "2, ..."):
        wrapper.run(batch.q, batch.cache()[0])
    with raises(ValueError, "sm_scale"):
        plan(indptr, indices, last, sm_scale=0.0)
    with raises(ValueError, "kv_layout: expected NHD or HND"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "NDH")
    with raises(ValueError, "pos_encoding_mode: expected"):
        plan(indptr, indices, last, pos_encoding_mode="ROPE")
    with breaks("spec.num_kv_heads.divides"):
        wrapper.plan(indptr, indices, last, 5, 2, 64, 4)
    with raises(NotImplementedError, "no backward"):
        wrapper.run(batch.q.clone().requires_grad_(), batch.cache())
    prefill = Batch(30, [3, 2], [5, 6])
    with raises(ValueError, r"custom_mask: expected 27 entries"):
        planned_prefill(prefill, custom_mask=torch.ones(26, dtype=torch.bool))
    with raises(ValueError, r"packed_custom_mask: expected uint8 \[4\]"):  # not that of all bits together
        planned_prefill(prefill, packed_custom_mask=torch.ones(3, dtype=torch.uint8))
    with raises(ValueError, "kv_indptr: expected 3 entries"):
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace("cpu")).plan(prefill.qo_indptr, prefill.kv_indptr[:2], 4, 2, 64)
    with raises(ValueError, "device|memory"):
        planned_prefill(prefill).reset_workspace_buffer(torch.empty(0, device="meta"), None)
    planned_prefill(prefill).reset_workspace_buffer(torch.empty(0), torch.empty(0))
    assert planned_prefill(prefill).workspace_size() == (0, 0)
