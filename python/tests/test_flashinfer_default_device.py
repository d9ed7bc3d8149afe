"""imbrex.flashinfer and imbrex.flash_attn under torch.set_default_device(): every entry point, with results as without.

"meta" stands for a GPU where there is none: an array that is made without saying where lands there, and cannot be read.
"""
import functools

import pytest

torch = pytest.importorskip("torch")

import imbrex.flashinfer as flashinfer  # noqa: E402
from flashinfer_cases import Batch, flat  # noqa: E402
from imbrex import flash_attn  # noqa: E402

Q_LENS, KV_LENS = [5, 1, 0, 3, 9], [5, 23, 0, 40, 9]
BF16 = dict(q_data_type=torch.bfloat16)


class Case:
    """One batch of queries and its arrays, made where no default device is set."""

    def __init__(self):
        self.batch = Batch(1, Q_LENS, KV_LENS)
        self.decode = Batch(2, [1] * 5, KV_LENS)
        self.latent = Batch(3, Q_LENS, KV_LENS, heads=6, kv_heads=1, dim=80)
        self.space, self.lens = torch.empty(0), torch.tensor(KV_LENS, dtype=torch.int32)
        self.masks, self.sinks = flat(self.batch.masks()), self.batch.normal(4)
        self.pages, self.decode_pages, self.latent_pages = self.batch.cache(), self.decode.cache(), self.latent.cache()[0][:, :, 0]
        self.k, self.v = self.batch.ragged()
        self.decode_keys = self.decode.ragged()
        self.paged = (self.batch.qo_indptr, *self.batch.arrays("cpu"), 4, 2, 64, 4)
        self.states = [torch.randn(3, 4, 64), torch.randn(3, 4)] * 2
        self.blocks = torch.ones(2, 3, 2, dtype=torch.bool), torch.full((2, 3), 3), torch.full((2, 2), 10)
        self.wide = torch.randn(4, 9, 64).bfloat16(), torch.randn(2, 20, 64).bfloat16()
        self.sparse = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([1, 0, 1], dtype=torch.int32)
        self.positions = torch.arange(8, dtype=torch.int32)
        self.halves = torch.tensor([0, 5, len(self.masks)], dtype=torch.int32)

    def single_decode_with_kv_cache(self):
        return flashinfer.single_decode_with_kv_cache(self.batch.q[0], self.k, self.v, k_scale=0.5, v_scale=2.0, return_lse=True)

    def single_prefill_with_kv_cache(self, **options):
        mask = self.masks.new_ones(5, len(self.k))
        plain = flashinfer.single_prefill_with_kv_cache(self.batch.q[:5], self.k, self.v, causal=True, pos_encoding_mode="ALIBI", **options)
        return plain, flashinfer.single_prefill_with_kv_cache(self.batch.q[:5], self.k, self.v, custom_mask=mask, **options)

    def single_prefill_with_kv_cache_return_lse(self):
        return flashinfer.single_prefill_with_kv_cache_return_lse(self.batch.q[:5], self.k, self.v)

    def BatchDecodeWithPagedKVCacheWrapper(self, plan=None):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.space)
        (plan or type(wrapper).plan)(wrapper, *self.decode.arrays("cpu"), 4, 2, 64, 4, **BF16)
        return wrapper.run(self.decode.q, self.decode_pages, k_scale=0.5, sinks=self.sinks, return_lse=True)

    def fast_decode_plan(self):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(self.space)
        pages = [x[:, None] for x in self.decode_keys]
        starts, ids = self.decode.kv_indptr, torch.arange(sum(KV_LENS), dtype=torch.int32, device="cpu")
        flashinfer.fast_decode_plan(wrapper, starts, ids, self.lens, 4, 2, 64, 1, **BF16)
        return self.BatchDecodeWithPagedKVCacheWrapper(flashinfer.fast_decode_plan), wrapper.run(self.decode.q, pages)

    def CUDAGraphBatchDecodeWithPagedKVCacheWrapper(self):
        arrays = self.decode.arrays("cpu")
        wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(self.space, *(x.clone() for x in arrays))
        wrapper.plan(*arrays, 4, 2, 64, 4, **BF16)
        return wrapper.run(self.decode.q, self.decode_pages)

    def BatchPrefillWithPagedKVCacheWrapper(self):
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.space)
        wrapper.plan(*self.paged, custom_mask=self.masks, **BF16)
        masked = wrapper.run(self.batch.q, self.pages)
        wrapper.plan(*self.paged, causal=True, seq_lens=KV_LENS, **BF16)
        return masked, wrapper.run(self.batch.q, self.pages, k_scale=2.0, v_scale=0.5, window_left=3, return_lse=True)

    def BatchPrefillWithRaggedKVCacheWrapper(self):
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.space)
        wrapper.plan(self.batch.qo_indptr, self.batch.kv_indptr, 4, 2, 64, causal=True, **BF16)
        return wrapper.run(self.batch.q, self.k, self.v)

    def BatchAttention(self):
        wrapper = flashinfer.BatchAttention("NHD", "cpu")
        wrapper.plan(self.batch.qo_indptr, self.batch.indptr, self.batch.indices, self.lens, 4, 2, 64, 64, 4, causal=True)
        return wrapper.run(self.batch.q, self.pages)

    def BatchAttentionWithAttentionSinkWrapper(self):
        wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(self.space, head_dim_qk=64, head_dim_vo=64)
        wrapper.plan(*self.paged, causal=True, **BF16)
        return wrapper.run(self.batch.q, self.pages, self.sinks, 0.2)

    def BatchMLAPagedAttentionWrapper(self):
        wrapper = flashinfer.BatchMLAPagedAttentionWrapper(self.space)
        types = torch.bfloat16, torch.bfloat16
        wrapper.plan(self.latent.qo_indptr, self.latent.indptr, self.latent.indices, self.lens, 6, 64, 16, 4, True, 0.1, *types)
        q, pages = self.latent.q.split((64, 16), -1), self.latent_pages.split((64, 16), -1)
        return wrapper.run(*q, *pages), wrapper.run(*q, *(x.clone() for x in pages))

    def MultiLevelCascadeAttentionWrapper(self):
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, self.space)
        wrapper.plan(*([x] * 2 for x in self.paged[:4]), 4, 2, 64, 4, causal=True, **BF16)
        return wrapper.run(self.batch.q, self.pages)

    def BatchDecodeWithSharedPrefixPagedKVCacheWrapper(self):
        wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(self.space)
        wrapper.begin_forward(*self.decode.arrays("cpu"), 4, 2, 64, 4, "bfloat16")
        return wrapper.forward(self.decode.q, self.k, self.v, self.decode_pages)

    def BatchPrefillWithSharedPrefixPagedKVCacheWrapper(self):
        wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(self.space)
        wrapper.begin_forward(*self.paged)
        return wrapper.forward(self.batch.q, self.k, self.v, self.pages, causal=True)

    def BlockSparseAttentionWrapper(self):
        wrapper = flashinfer.BlockSparseAttentionWrapper(self.space)
        keys = self.wide[1].transpose(0, 1)
        wrapper.plan(*self.sparse, 9, 20, 5, 10, 4, 2, 64, **BF16)
        plain = wrapper.run(self.wide[0].transpose(0, 1), keys, keys)
        wrapper.plan(*self.sparse, 9, 20, 5, 10, 4, 2, 64, mask=torch.ones(3, 5, 10, dtype=torch.bool, device="cpu"), **BF16)
        return plain, wrapper.run(self.wide[0].transpose(0, 1), keys, keys)

    def VariableBlockSparseAttentionWrapper(self):
        wrapper = flashinfer.VariableBlockSparseAttentionWrapper(self.space)
        wrapper.plan(*self.blocks, 4, 2, 64, **BF16)
        plain = wrapper.run(self.wide[0], self.wide[1], self.wide[1])
        wrapper.plan(*(x.tolist() for x in self.blocks), 4, 2, 64, **BF16)
        return plain, wrapper.run(self.wide[0], self.wide[1], self.wide[1])

    def append_paged_kv_cache(self):
        cache = tuple(x.clone() for x in self.pages)
        places = flashinfer.get_batch_indices_positions(self.batch.kv_indptr, self.lens, sum(KV_LENS))
        arrays = self.batch.indices, self.batch.indptr, self.batch.last
        flashinfer.append_paged_kv_cache(self.k + 1, self.v + 1, *places, cache, *arrays)
        return tuple(x.nan_to_num() for x in cache)

    def append_paged_mla_kv_cache(self):
        caches = [x.clone() for x in self.latent_pages.split((64, 16), -1)]
        places = flashinfer.get_batch_indices_positions(self.latent.kv_indptr, self.lens, sum(KV_LENS))
        new = torch.cat(self.latent.k)[:, 0].split((64, 16), -1)
        flashinfer.append_paged_mla_kv_cache(*new, *places, *caches, self.latent.indices, self.latent.indptr, self.latent.last)
        return tuple(x.nan_to_num() for x in caches)

    def get_batch_indices_positions(self):
        return flashinfer.get_batch_indices_positions(self.batch.kv_indptr, self.lens, sum(KV_LENS) + 2)

    def get_seq_lens(self):
        return flashinfer.get_seq_lens(self.batch.indptr, self.batch.last, 4)

    def merge_state(self):
        return flashinfer.merge_state(*self.states)

    def merge_state_in_place(self):
        v, s = self.states[0].clone(), self.states[1].clone()
        flashinfer.merge_state_in_place(v, s, *self.states[2:], mask=self.masks[:3])
        return v, s

    def merge_states(self):
        return flashinfer.merge_states(self.states[0][None], self.states[1][None])

    def packbits(self):
        return flashinfer.packbits(self.masks, "little")

    def segment_packbits(self):
        return flashinfer.segment_packbits(self.masks, self.halves)

    def flash_attn(self):
        q, k = self.batch.q.float(), self.k.float()
        cos = self.states[0][0, :1].abs().expand(80, -1)[:, :16].contiguous()
        lengths = self.batch.qo_indptr, self.batch.kv_indptr, max(Q_LENS), max(KV_LENS)
        slopes = torch.arange(20, dtype=torch.float32, device="cpu").view(5, 4) / 20
        caches = [torch.zeros(2, 80, 2, 64, device="cpu") for _ in range(2)]
        over = functools.partial(flash_attn.flash_attn_with_kvcache, q[:6].view(2, 3, 4, 64), *caches)
        return (
            flash_attn.flash_attn_func(q[None], k[None], k[None], alibi_slopes=slopes[0], return_attn_probs=True)[:2],
            flash_attn.flash_attn_varlen_func(q, k, k, *lengths, causal=True, alibi_slopes=slopes),
            over(k[:6].view(2, 3, 2, 64), k[:6].view(2, 3, 2, 64), cos, cos, cache_seqlens=4, causal=True),
            over(cache_seqlens=self.lens[:2], cache_leftpad=self.lens[:2], alibi_slopes=slopes[:2]),
            over(k[:8].view(2, 4, 2, 64), k[:8].view(2, 4, 2, 64), cache_seqlens=self.lens[:2], cache_batch_idx=self.positions[:2]),
        )


NAMES = [name for name in vars(Case) if not name.startswith("_")]


def flattened(results):
    return [y for x in results for y in flattened(x)] if isinstance(results, (tuple, list)) else [results]


def test_every_name_is_walked():
    modules = {"mla"}  # whose wrapper has a name here too
    assert set(NAMES) == {*flashinfer.__all__, "flash_attn"} - modules


@pytest.mark.parametrize("name", NAMES)
def test_default_device(name):
    torch.manual_seed(1)
    case = Case()
    expected = flattened(getattr(case, name)())
    torch.set_default_device("meta")
    try:
        found = flattened(getattr(case, name)())
    finally:
        torch.set_default_device(None)
    assert len(found) == len(expected)
    for x, y in zip(found, expected):
        assert x.device.type == "cpu" and torch.equal(x, y)
