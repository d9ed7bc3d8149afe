"""Names, order and defaults of arguments as FlashInfer 0.6.18 has them (MLA: 0.7.2), and what is refused by name."""
import functools
import inspect

import pytest

torch = pytest.importorskip("torch")

import imbrex.flashinfer as flashinfer  # noqa: E402
from flashinfer_cases import Batch  # noqa: E402

# Without annotations. BatchDecodeWithPagedKVCacheWrapper.plan takes its options as *args and **kwargs there; these are the names it knows.
SIGNATURES = {
    "single_decode_with_kv_cache": (
        "q, k, v, kv_layout='NHD', pos_encoding_mode='NONE', use_tensor_cores=False, q_scale=None, k_scale=None, v_scale=None, "
        "window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, return_lse=False"
    ),
    "fast_decode_plan": (
        "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode='NONE', window_left=-1, "
        "logits_soft_cap=None, q_data_type=None, kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, "
        "non_blocking=True, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1, global_override_indptr_cpu=None"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.__init__": (
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False, paged_kv_indptr_buffer=None, "
        "paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend='auto', jit_args=None"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.plan": (
        "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode='NONE', window_left=-1, "
        "logits_soft_cap=None, q_data_type='float16', kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None, rope_scale=None, "
        "rope_theta=None, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False, "
        "q_len_per_req=1, *, window_right=0"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer, int_workspace_buffer",
    "BatchDecodeWithPagedKVCacheWrapper.forward": (
        "q, paged_kv_cache, pos_encoding_mode='NONE', q_scale=None, k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, "
        "sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.run": (
        "q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, enable_pdl=None, "
        "window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None, kv_cache_sf=None"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.forward_return_lse": (
        "q, paged_kv_cache, pos_encoding_mode='NONE', q_scale=None, k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, "
        "sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "BatchDecodeWithPagedKVCacheWrapper.end_forward": "",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__": (
        "workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout='NHD', use_tensor_cores=False"
    ),
    "single_prefill_with_kv_cache": (
        "q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None, causal=False, "
        "kv_layout='NHD', pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, "
        "rope_scale=None, rope_theta=None, backend='auto', return_lse=False, kv_cache_sf=None, k_scale=None, v_scale=None"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.__init__": (
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None, "
        "paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto', "
        "jit_args=None, jit_kwargs=None"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer, int_workspace_buffer",
    "BatchPrefillWithPagedKVCacheWrapper.plan": (
        "qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim_qk, page_size, "
        "head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode='NONE', "
        "use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, "
        "q_data_type='float16', kv_data_type=None, o_data_type=None, non_blocking=True, prefix_len_ptr=None, "
        "token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, "
        "block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, disable_split_kv=False"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.forward": (
        "q, paged_kv_cache, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, k_scale=None, v_scale=None, "
        "window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.run": (
        "q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, enable_pdl=None, "
        "window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, "
        "uses_spcompress=None"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.forward_return_lse": (
        "q, paged_kv_cache, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, k_scale=None, v_scale=None, "
        "window_left=-1, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "BatchPrefillWithPagedKVCacheWrapper.end_forward": "",
    "BatchPrefillWithRaggedKVCacheWrapper.__init__": (
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, kv_indptr_buf=None, custom_mask_buf=None, "
        "mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer, int_workspace_buffer",
    "BatchPrefillWithRaggedKVCacheWrapper.plan": (
        "qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, "
        "causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None, "
        "rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type=None, non_blocking=True, "
        "prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None, fixed_split_size=None, "
        "disable_split_kv=False, seq_lens=None, seq_lens_q=None, max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, "
        "o_indptr=None"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.forward": (
        "q, k, v, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, "
        "sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.run": (
        "q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None, lse=None, return_lse=False, "
        "enable_pdl=None, kv_cache_sf=None"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.forward_return_lse": (
        "q, k, v, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, "
        "sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "BatchPrefillWithRaggedKVCacheWrapper.end_forward": "",
    "merge_state": "v_a, s_a, v_b, s_b",
    "merge_state_in_place": "v, s, v_other, s_other, mask=None",
    "merge_states": "v, s",
    "MultiLevelCascadeAttentionWrapper.__init__": (
        "num_levels, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf_arr=None, "
        "paged_kv_indptr_buf_arr=None, paged_kv_indices_buf_arr=None, paged_kv_last_page_len_buf_arr=None"
    ),
    "MultiLevelCascadeAttentionWrapper.reset_workspace_buffer": "float_workspace_buffer, int_workspace_buffers",
    "MultiLevelCascadeAttentionWrapper.plan": (
        "qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, "
        "page_size, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, "
        "logits_soft_cap=None, rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None"
    ),
    "MultiLevelCascadeAttentionWrapper.run": "q, paged_kv_cache",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.__init__": "float_workspace_buffer, kv_layout='NHD'",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer, int_workspace_buffer",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.begin_forward": (
        "unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, data_type='float16'"
    ),
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward": "q, k_shared, v_shared, unique_kv_cache",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.end_forward": "",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.__init__": "float_workspace_buffer, kv_layout='NHD'",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.reset_workspace_buffer": "float_workspace_buffer, int_workspace_buffer",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.begin_forward": (
        "qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size"
    ),
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward": (
        "q, k_shared, v_shared, unique_kv_cache, causal=False, use_fp16_qk_reduction=False, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.end_forward": "",
    "BlockSparseAttentionWrapper.__init__": "float_workspace_buffer, backend='auto'",
    "BlockSparseAttentionWrapper.reset_workspace_buffer": "float_workspace_buffer, int_workspace_buffer",
    "BlockSparseAttentionWrapper.plan": (
        "indptr, indices, M, N, R, C, num_qo_heads, num_kv_heads, head_dim, mask=None, packed_mask=None, causal=False, "
        "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, "
        "q_data_type='float16', kv_data_type=None, o_data_type='float16', non_blocking=True, block_mask=None"
    ),
    "BlockSparseAttentionWrapper.forward": (
        "q, k, v, scale_q=None, scale_k=None, scale_v=None, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, "
        "logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
    ),
    "BlockSparseAttentionWrapper.run": ("q, k, v, scale_q=None, scale_k=None, scale_v=None, out=None, lse=None, return_lse=False, enable_pdl=None"),
    "BlockSparseAttentionWrapper.end_forward": "",
    "VariableBlockSparseAttentionWrapper.__init__": "float_workspace_buffer, backend='auto'",
    "VariableBlockSparseAttentionWrapper.reset_workspace_buffer": "float_workspace_buffer, int_workspace_buffer",
    "VariableBlockSparseAttentionWrapper.plan": (
        "block_mask_map, block_row_sz, block_col_sz, num_qo_heads, num_kv_heads, head_dim, causal=False, pos_encoding_mode='NONE', "
        "use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, "
        "q_data_type='float16', kv_data_type=None"
    ),
    "VariableBlockSparseAttentionWrapper.forward": (
        "q, k, v, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, logits_soft_cap=None, sm_scale=None, rope_scale=None, " "rope_theta=None"
    ),
    "VariableBlockSparseAttentionWrapper.run": "q, k, v, out=None, lse=None, return_lse=False, enable_pdl=None",
    "get_batch_indices_positions": "append_indptr, seq_lens, nnz, batch_indices=None, positions=None",
    "get_seq_lens": "kv_indptr, kv_last_page_len, page_size",
    "append_paged_mla_kv_cache": ("append_ckv, append_kpe, batch_indices, positions, ckv_cache, kpe_cache, kv_indices, kv_indptr, kv_last_page_len"),
    "append_paged_kv_cache": (
        "append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout='NHD'"
    ),
    "packbits": "x, bitorder='big'",
    "segment_packbits": "x, indptr, bitorder='big'",
    "BatchAttention.__init__": "kv_layout='NHD', device='cuda'",
    "BatchAttention.plan": (
        "qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size, causal=False, "
        "sm_scale=None, logits_soft_cap=None, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, use_profiler=False"
    ),
    "BatchAttention.run": (
        "q, kv_cache, out=None, lse=None, k_scale=None, v_scale=None, logits_soft_cap=0.0, profiler_buffer=None, kv_cache_sf=None"
    ),
    "BatchAttentionWithAttentionSinkWrapper.__init__": (
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, paged_kv_indptr_buf=None, "
        "paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto', "
        "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16, "
        "head_dim_qk=128, head_dim_vo=128, window_left=-1"
    ),
    "BatchMLAPagedAttentionWrapper.__init__": (
        "float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, backend='auto'"
    ),
    "BatchMLAPagedAttentionWrapper.plan": (
        "qo_indptr=None, kv_indptr=None, kv_indices=None, kv_len_arr=None, num_heads=None, head_dim_ckv=None, head_dim_kpe=None, page_size=None, "
        "causal=None, sm_scale=None, q_data_type=None, kv_data_type=None, use_profiler=False, *, metadata=None, cum_seq_lens_q=None, "
        "block_tables=None, seq_lens=None, max_q_len=None, query_layout=None, kv_cache_layout=None, lse_mode='none', output_dtype=None, "
        "output_scale='none', scale_mode='default', skip_softmax=False, enable_pdl=None, use_sinks=False"
    ),
    "BatchMLAPagedAttentionWrapper.run": (
        "q_nope=None, q_pe=None, ckv_cache=None, kpe_cache=None, out=None, lse=None, return_lse=False, profiler_buffer=None, kv_len=None, "
        "page_table=None, return_lse_base_on_e=False, o_scale=None, *, query=None, kv_cache=None, ckv_scale=None, ckv_scale_arr=None, "
        "kpe_scale=None, sinks=None, skip_softmax_threshold_scale_factor=None, bmm1_scale=None, bmm2_scale=None"
    ),
}
SAME = {
    "BatchDecodeWithPagedKVCacheWrapper": ("begin_forward", "plan"),
    "BatchPrefillWithPagedKVCacheWrapper": ("begin_forward", "plan"),
    "BatchPrefillWithRaggedKVCacheWrapper": ("begin_forward", "plan"),
    "BlockSparseAttentionWrapper": ("begin_forward", "plan"),
    "MultiLevelCascadeAttentionWrapper": ("begin_forward", "plan", "forward", "run"),
}


def parameters(function):
    """Of one function: name, default, and whether it is positional, named or collects others. Not `self`, and nothing private."""
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self" and not p.name.startswith("_")]
    return [(p.name, p.default, p.kind) for p in found]


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments(name):
    function = functools.reduce(getattr, name.split("."), flashinfer)
    expected = parameters(eval(f"lambda {SIGNATURES[name]}: None", {"torch": torch}))
    assert parameters(function) == expected


def test_aliases():
    for name, pairs in SAME.items():
        for alias, method in zip(pairs[::2], pairs[1::2]):
            assert getattr(getattr(flashinfer, name), alias) is getattr(getattr(flashinfer, name), method)
    returned = flashinfer.single_prefill_with_kv_cache_return_lse
    assert returned.func is flashinfer.single_prefill_with_kv_cache and returned.keywords == {"return_lse": True}


def test_every_name_is_tested():
    names = {name.split(".")[0] for name in SIGNATURES} | {"single_prefill_with_kv_cache_return_lse"}
    assert names | {"mla"} == set(flashinfer.__all__)


REFUSED = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "PODWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "cudnn_batch_prefill_with_kv_cache",
    "fmha_varlen",
    "nvfp4_kv_quantize",
    "nvfp4_quantize_append_paged_kv_cache",
    "single_decode_with_kv_cache_with_jit_module",
    "single_prefill_with_kv_cache_with_jit_module",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
    "xqa",
    "xqa_batch_decode_with_kv_cache",
    "xqa_mla",
]


@pytest.mark.parametrize("name", REFUSED)
def test_other_attention_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"imbrex.flashinfer: {name} is not there: .+"):
        getattr(flashinfer, name)(1, key=2)
    assert name in dir(flashinfer) and name not in flashinfer.__all__


def test_what_is_no_attention_is_absent():
    for name in ("rmsnorm", "top_k_sampling_from_probs", "apply_rope"):
        assert not hasattr(flashinfer, name)
    with pytest.raises(AttributeError, match="holds FlashInfer's attention"):
        flashinfer.rmsnorm  # noqa: B018


def refused(match):
    return pytest.raises(NotImplementedError, match=match)


SPACE = torch.empty(0)
ONE = torch.ones(1, dtype=torch.int32)


def test_options_of_wrappers_are_refused_by_name():
    for wrapper in (
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
    ):
        with refused("jit_args="):
            wrapper(SPACE, jit_args=["uri"])
        for backend in ("trtllm-gen", "cudnn", "cute-dsl", "cutlass"):
            with refused(f"backend='{backend}'.* cpu_generic"):
                wrapper(SPACE, backend=backend)
    with refused("jit_kwargs="):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(SPACE, jit_kwargs={})
    with refused("vsa_sm100_blk64"):
        flashinfer.BlockSparseAttentionWrapper(SPACE, "vsa_sm100_blk64")


PLAN_OPTIONS = [
    dict(pos_encoding_mode="ROPE_LLAMA"),
    dict(prefix_len_ptr=ONE),
    dict(token_pos_in_items_ptr=ONE),
    dict(token_pos_in_items_len=4),
    dict(max_item_len_ptr=ONE),
]


@pytest.mark.parametrize("options", [*PLAN_OPTIONS, dict(block_tables=torch.zeros(1, 1))], ids=lambda o: next(iter(o)))
def test_options_of_plan_are_refused_by_name(options):
    name = next(iter(options))
    batch = Batch(1, [3, 2], [5, 6])
    prefill = functools.partial(flashinfer.BatchPrefillWithPagedKVCacheWrapper(SPACE).plan, batch.qo_indptr, *batch.arrays("cpu"))
    with refused(name):
        prefill(4, 2, 64, 4, **options)
    if name != "block_tables":
        with refused(name):
            flashinfer.BatchPrefillWithRaggedKVCacheWrapper(SPACE).plan(batch.qo_indptr, batch.kv_indptr, 4, 2, 64, **options)
    if name in ("pos_encoding_mode", "block_tables"):
        with refused(name):
            flashinfer.BatchDecodeWithPagedKVCacheWrapper(SPACE).plan(*batch.arrays("cpu"), 4, 2, 64, 4, **options)


def test_other_options_are_refused_by_name():
    batch = Batch(2, [1, 1], [5, 6])
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(SPACE)
    decode.plan(*batch.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(SPACE)
    prefill.plan(batch.qo_indptr, *batch.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(SPACE)
    ragged.plan(batch.qo_indptr, batch.kv_indptr, 4, 2, 64, q_data_type=torch.bfloat16)
    for run in (functools.partial(decode.run, batch.q, batch.cache()), functools.partial(prefill.run, batch.q, batch.cache())):
        with refused("skip_softmax_threshold_scale_factor="):
            run(skip_softmax_threshold_scale_factor=1.0)
        with refused("NVFP4"):
            run(kv_cache_sf=batch.cache())
        with refused("no positional arguments"):
            run(torch.ones(4))
    with refused("use_fp16_softmax="):
        prefill.run(batch.q, batch.cache(), use_fp16_softmax=True)
    with refused("uses_spcompress="):
        prefill.run(batch.q, batch.cache(), uses_spcompress=True)
    with refused("NVFP4"):
        decode.run(batch.q, tuple(x.view(torch.uint8) for x in batch.cache()))
    with refused("o_scale="):
        ragged.run(batch.q, *batch.ragged(), o_scale=2.0)
    for name in ("v_indptr", "o_indptr"):
        with refused(f"{name}="):
            ragged.plan(batch.qo_indptr, batch.kv_indptr, 4, 2, 64, **{name: batch.kv_indptr})
    with refused("NVFP4"):
        flashinfer.single_prefill_with_kv_cache(batch.q, *batch.ragged(), kv_cache_sf=batch.ragged())
    with refused("NVFP4"):
        flashinfer.append_paged_kv_cache(*[None] * 4, tuple(x.view(torch.uint8) for x in batch.cache()), *[None] * 3)
    with refused("block_mask="):
        flashinfer.BlockSparseAttentionWrapper(SPACE).plan(None, None, 4, 4, 1, 1, 4, 2, 64, block_mask=torch.ones(2, 4, 4))
    attention = flashinfer.BatchAttention(device="cpu")
    with refused("use_profiler="):
        attention.plan(ONE, ONE, ONE, ONE, 4, 2, 64, 64, 4, use_profiler=True)
    with refused("profiler_buffer="):
        attention.run(batch.q, batch.cache(), profiler_buffer=ONE)
    mla = flashinfer.BatchMLAPagedAttentionWrapper(SPACE)
    for name in ("profiler_buffer", "kv_len", "page_table", "o_scale", "sinks", "skip_softmax_threshold_scale_factor", "bmm1_scale", "bmm2_scale"):
        with refused(f"{name}="):
            mla.run(*[batch.q] * 4, **{name: ONE})
    types = dict(q_data_type=batch.q.dtype, kv_data_type=batch.q.dtype)
    plan = functools.partial(mla.plan, ONE, ONE, ONE, ONE, 4, 64, 16, 4, True, 0.1, **types)
    for options in (
        dict(use_profiler=True),
        dict(skip_softmax=True),
        dict(use_sinks=True),
        dict(output_scale="per-tensor"),
        dict(scale_mode="bmm-scalar"),
    ):
        with refused(f"{next(iter(options))}="):
            plan(**options)


def planned(q_type, kv_type, head_dim):
    """plan() of each wrapper, and the functions of one request, for types and a dimension."""
    batch = Batch(3, [3, 2], [5, 6])
    arrays, types, lens = batch.arrays("cpu"), dict(q_data_type=q_type, kv_data_type=kv_type), torch.tensor([5, 6], dtype=torch.int32)
    heads = 4, 2, head_dim
    q, k = torch.zeros(4, head_dim, dtype=q_type), torch.zeros(9, 2, head_dim, dtype=kv_type)
    yield functools.partial(flashinfer.BatchDecodeWithPagedKVCacheWrapper(SPACE).plan, *arrays, *heads, 4, **types)
    yield functools.partial(flashinfer.BatchPrefillWithPagedKVCacheWrapper(SPACE).plan, batch.qo_indptr, *arrays, *heads, 4, **types)
    yield functools.partial(flashinfer.BatchPrefillWithRaggedKVCacheWrapper(SPACE).plan, batch.qo_indptr, batch.kv_indptr, *heads, **types)
    yield functools.partial(flashinfer.BatchAttention("NHD", "cpu").plan, batch.qo_indptr, *arrays[:2], lens, *heads, head_dim, 4, **types)
    mla = flashinfer.BatchMLAPagedAttentionWrapper(SPACE).plan
    yield functools.partial(mla, batch.qo_indptr, *arrays[:2], lens, 4, head_dim, 16, 4, True, 0.1, q_type, kv_type)
    yield functools.partial(flashinfer.BlockSparseAttentionWrapper(SPACE).plan, ONE.new_tensor([0, 1]), ONE - 1, 4, 8, 4, 8, *heads, **types)
    blocks = torch.ones(2, 1, 1, dtype=torch.bool), torch.full((2, 1), 4), torch.full((2, 1), 8)
    yield functools.partial(flashinfer.VariableBlockSparseAttentionWrapper(SPACE).plan, *blocks, *heads, **types)
    yield functools.partial(flashinfer.single_decode_with_kv_cache, q, k, k)
    yield functools.partial(flashinfer.single_prefill_with_kv_cache, q[None], k, k)


def test_what_no_spec_has_is_refused_by_name():
    e4m3, e5m2, bf16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
    for q_type, kv_type, head_dim, match in (
        (bf16, torch.uint8, 64, "NVFP4 is not there: fp8 caches"),
        (bf16, torch.int8, 64, "kv_data_type=torch.int8 is not there: caches are"),
        (e5m2, e5m2, 64, "q_data_type=torch.float8_e5m2 is not there: queries are"),
        (e4m3, bf16, 64, "q_data_type=torch.float8_e4m3fn with kv_data_type=torch.bfloat16 is not there: fp8 queries"),
        (bf16, bf16, 59, "head_dim (59|75) is not there: pad q, k and v with zeros to a multiple of 8"),
        (bf16, bf16, 584, "head_dim (584|600) is not there: pad"),
    ):
        for call in planned(q_type, kv_type, head_dim):
            with refused(match):
                call()


def test_gradients_are_refused():
    batch = Batch(4, [1, 1], [5, 6])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(SPACE)
    wrapper.plan(*batch.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)
    k, v = batch.ragged()
    for i in range(3):
        tensors = [x.clone().requires_grad_(i == j) for j, x in enumerate((batch.q[0], k, v))]
        with refused("backward"):
            flashinfer.single_decode_with_kv_cache(*tensors)
        with torch.no_grad():
            flashinfer.single_decode_with_kv_cache(*tensors)
    one = torch.ones(4, requires_grad=True)
    for options in (dict(sinks=one), dict(k_scale=one), dict(v_scale=one), dict(q_scale=one)):
        with refused("backward"):
            wrapper.run(batch.q, batch.cache(), **options)
    with refused("backward"):
        places = flashinfer.get_batch_indices_positions(batch.kv_indptr, torch.tensor([5, 6]), 11)
        flashinfer.append_paged_kv_cache(k.clone().requires_grad_(), v, *places, batch.cache(), batch.indices, batch.indptr, batch.last)
