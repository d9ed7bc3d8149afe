"""imbrex.flashinfer's wrappers and functions for dense attention, against float64."""
import functools

import pytest

torch = pytest.importorskip("torch")

import imbrex.flashinfer as flashinfer  # noqa: E402
from flashinfer_cases import (
    Batch,
    DECODE,
    check,
    decode_batch,
    devices,
    flat,
    planned_decode,
    planned_prefill,
    planned_ragged,
    workspace,
)  # noqa: E402

Q_LENS, KV_LENS = [5, 1, 0, 3, 9, 2], [5, 23, 0, 40, 9, 0]  # a prompt, decode, nothing, a chunk, a prompt, and queries without keys


@devices
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["pair", "one", "views"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decode(device, layout, form, dtype):
    batch = decode_batch(device, dtype=dtype)
    wrapper = planned_decode(batch, layout)
    check(wrapper.run(batch.q, batch.cache(layout, form), return_lse=True), batch.expected(), dtype)


@devices
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["pair", "one", "views"])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill_of_pages(device, layout, form, causal):
    batch = Batch(2, Q_LENS, KV_LENS, device=device)
    wrapper = planned_prefill(batch, layout, causal=causal)
    check(wrapper.run(batch.q, batch.cache(layout, form), return_lse=True), batch.expected(causal=causal))


@devices
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill_of_ragged_keys(device, layout, causal):
    batch = Batch(3, Q_LENS, KV_LENS, device=device, dtype=torch.float16, dim=96, dim_v=64)
    wrapper = planned_ragged(batch, layout, causal=causal)
    check(wrapper.run(batch.q, *batch.ragged(layout), return_lse=True), batch.expected(causal=causal), torch.float16)


@devices
def test_values_may_be_narrower_than_keys(device):
    batch = Batch(4, Q_LENS, KV_LENS, device=device, dim=96, dim_v=64)
    check(planned_prefill(batch, causal=True).run(batch.q, batch.cache()), batch.expected(causal=True))


SCORES = [
    dict(window_left=0),
    dict(window_left=7),
    dict(soft_cap=3.0),
    dict(scale=0.3),
    dict(alibi=True),
    dict(alibi=True, soft_cap=2.0, scale=0.2, window_left=11),
]


def as_arguments(window_left=-1, soft_cap=None, scale=None, alibi=False):
    return dict(window_left=window_left, logits_soft_cap=soft_cap, sm_scale=scale, pos_encoding_mode="ALIBI" if alibi else "NONE")


@devices
@pytest.mark.parametrize("score", SCORES, ids=lambda s: "-".join(s))
def test_scores(device, score):
    """In every function; heads are no power of two, for ALiBi."""
    arguments = as_arguments(**score)
    batch = Batch(5, Q_LENS, KV_LENS, device=device, heads=6)
    expected = batch.expected(causal=True, **score)
    check(planned_prefill(batch, causal=True, **arguments).run_return_lse(batch.q, batch.cache()), expected)
    check(planned_ragged(batch, causal=True, **arguments).run_return_lse(batch.q, *batch.ragged()), expected)
    decode = decode_batch(device, heads=6)
    check(planned_decode(decode, **arguments).run_return_lse(decode.q, decode.cache()), decode.expected(causal=True, **score))

    one = Batch(6, [7], [20], device=device, heads=6)
    check(
        flashinfer.single_prefill_with_kv_cache_return_lse(one.q, *one.ragged(), causal=True, **arguments),
        one.expected(causal=True, **score),
    )
    out, lse = flashinfer.single_decode_with_kv_cache(one.q[6], *one.ragged(), return_lse=True, **arguments)
    expected = [x[6:] for x in one.expected(causal=True, **score)]
    check((out[None], lse[None]), expected)


@devices
def test_deprecated_forward_has_options_of_its_own(device):
    score = dict(window_left=5, soft_cap=2.0, scale=0.3, alibi=True)
    arguments = as_arguments(**score)
    batch = Batch(7, Q_LENS, KV_LENS, device=device)
    wrapper = planned_prefill(batch, causal=False)
    check(wrapper.forward_return_lse(batch.q, batch.cache(), causal=True, **arguments), batch.expected(causal=True, **score))
    check(wrapper.forward(batch.q, batch.cache()), batch.expected())
    ragged = planned_ragged(batch, causal=True)
    check(ragged.forward(batch.q, *batch.ragged(), causal=True, **arguments), batch.expected(causal=True, **score))
    check(ragged.forward_return_lse(batch.q, *batch.ragged()), batch.expected())
    decode = decode_batch(device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.begin_forward(*decode.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)
    check(wrapper.forward(decode.q, decode.cache(), **arguments), decode.expected(causal=True, **score))
    check(wrapper.forward_return_lse(decode.q, decode.cache()), decode.expected())
    wrapper.end_forward()


@devices
def test_sinks_join_the_denominator(device):
    batch = Batch(8, Q_LENS, KV_LENS, device=device)
    sinks = batch.normal(4).to(torch.bfloat16).to(device)
    wrapper = planned_prefill(batch, causal=True)
    check(wrapper.run(batch.q, batch.cache(), sinks=sinks, return_lse=True), batch.expected(causal=True, sinks=sinks))
    check(wrapper.run(batch.q, batch.cache()), batch.expected(causal=True))
    decode = decode_batch(device)
    out = planned_decode(decode).run(decode.q, decode.cache(), sinks=sinks, return_lse=True)
    check(out, decode.expected(sinks=sinks))


@devices
@pytest.mark.parametrize("as_tensor", [False, True])
def test_scales(device, as_tensor):
    """With a cache of the queries' type they multiply logits and output; LSE are those of the scaled logits."""
    make = (lambda x: torch.tensor([x], device=device)) if as_tensor else (lambda x: x)
    scales = dict(q_scale=make(0.5), k_scale=make(3.0), v_scale=make(0.25))
    batch = Batch(9, Q_LENS, KV_LENS, device=device)
    expected = batch.expected(causal=True, k_scale=1.5, v_scale=0.25, soft_cap=4.0)
    check(planned_prefill(batch, causal=True, logits_soft_cap=4.0).run(batch.q, batch.cache(), return_lse=True, **scales), expected)
    check(planned_ragged(batch, causal=True, logits_soft_cap=4.0).run(batch.q, *batch.ragged(), return_lse=True, **scales), expected)
    decode = decode_batch(device)
    check(planned_decode(decode).run(decode.q, decode.cache(), return_lse=True, **scales), decode.expected(k_scale=1.5, v_scale=0.25))
    one = Batch(10, [4], [9], device=device)
    out = flashinfer.single_prefill_with_kv_cache(one.q, *one.ragged(), k_scale=scales["k_scale"], v_scale=scales["v_scale"])
    check(out, one.expected(k_scale=3.0, v_scale=0.25))
    out = flashinfer.single_decode_with_kv_cache(one.q[3], *one.ragged(), **scales)
    check(out[None], [x[3:] for x in one.expected(k_scale=1.5, v_scale=0.25)])


@devices
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("scale", ["none", "number", "tensor", "heads"])
def test_fp8_cache(device, kv_dtype, scale):
    k_scale, v_scale = (1.0, 1.0) if scale == "none" else (0.5, 2.0)
    scales = {} if scale == "none" else dict(k_scale=k_scale, v_scale=v_scale)
    if scale == "tensor":
        scales = {n: torch.tensor(x, device=device) for n, x in scales.items()}
    if scale == "heads":
        k_scale, v_scale = torch.tensor([0.5, 1.5])[:, None], torch.tensor([2.0, 0.75])[:, None]
        scales = dict(k_scale=k_scale.reshape(-1).to(device), v_scale=v_scale.reshape(-1).to(device))
    batch = Batch(11, Q_LENS, KV_LENS, device=device, kv_dtype=kv_dtype)
    expected = batch.expected(causal=True, k_scale=k_scale, v_scale=v_scale)
    check(planned_prefill(batch, "HND", causal=True).run(batch.q, batch.cache("HND"), return_lse=True, **scales), expected, tolerance=2.5e-2)
    decode = decode_batch(device, kv_dtype=kv_dtype)
    out = planned_decode(decode).run(decode.q, decode.cache(), return_lse=True, **scales)
    check(out, decode.expected(k_scale=k_scale, v_scale=v_scale), tolerance=2.5e-2)


@devices
@pytest.mark.parametrize("o_dtype", [torch.bfloat16, torch.float16])
def test_fp8_queries(device, o_dtype):
    """On the CPU the reference runs them."""
    fp8 = torch.float8_e4m3fn
    batch = Batch(12, Q_LENS, KV_LENS, device=device, dtype=fp8)
    expected = functools.partial(batch.expected, causal=True)
    wrapper = planned_prefill(batch, causal=True, o_data_type=o_dtype)
    out = wrapper.run(batch.q, batch.cache(), q_scale=0.5, k_scale=2.0, v_scale=0.5)
    assert out.dtype == o_dtype
    check(out, expected(k_scale=1.0, v_scale=0.5), tolerance=5e-2)
    scale_q = torch.tensor([0.5, 1.0, 2.0, 0.25], device=device)
    scale_k, scale_v = torch.tensor([2.0, 1.0], device=device), torch.tensor([0.5, 1.5], device=device)
    out = wrapper.run(batch.q, batch.cache(), scale_q, scale_k, scale_v)
    scaled = Batch(12, Q_LENS, KV_LENS, dtype=fp8)
    scaled.q = batch.q.cpu().float() * scale_q.cpu()[:, None]
    check(out, scaled.expected(causal=True, k_scale=scale_k.cpu()[:, None], v_scale=scale_v.cpu()[:, None]), tolerance=5e-2)
    assert planned_ragged(batch).run(batch.q, *batch.ragged()).dtype == torch.bfloat16


@devices
@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window_left", [-1, 6])
def test_custom_masks(device, where, packed, window_left):
    """Of requests whose bits do not fill bytes. They stand for causal; the window holds too."""
    batch = Batch(13, Q_LENS, KV_LENS, device=device)
    assert any(t * s % 8 for t, s in zip(Q_LENS, KV_LENS))
    masks = batch.masks()
    expected = batch.expected(masks, window_left=window_left)
    where = device if where == "device" else "cpu"
    mask = flat(masks).to(where)
    if packed:
        bits = Batch.starts([t * s for t, s in zip(Q_LENS, KV_LENS)])
        given = dict(packed_custom_mask=flashinfer.segment_packbits(mask, bits.to(where), bitorder="little")[0])
    else:
        given = dict(custom_mask=mask)
    options = dict(causal=True, window_left=window_left, **given)
    check(planned_prefill(batch, where=where, **options).run_return_lse(batch.q, batch.cache()), expected)
    check(planned_ragged(batch, where=where, **options).run_return_lse(batch.q, *batch.ragged()), expected)
    one = Batch(14, [5], [11], device=device)
    mask = one.masks()[0]
    packed_mask = flashinfer.packbits(mask.reshape(-1).to(where), bitorder="little")
    given = dict(packed_custom_mask=packed_mask) if packed else dict(custom_mask=mask.to(where))
    out = flashinfer.single_prefill_with_kv_cache_return_lse(one.q, *one.ragged(), causal=True, window_left=window_left, **given)
    check(out, one.expected([mask], window_left=window_left))


@devices
def test_outputs_in_place(device):
    batch = Batch(15, Q_LENS, KV_LENS, device=device)
    expected = batch.expected(causal=True)
    wide = torch.full((sum(Q_LENS), 8, 64), 9.0, dtype=torch.bfloat16, device=device)
    lse = torch.full((sum(Q_LENS), 4), 9.0, device=device)
    for wrapper, keys in ((planned_prefill(batch, causal=True), (batch.cache(),)), (planned_ragged(batch, causal=True), batch.ragged())):
        wide.fill_(9)
        lse.fill_(9)
        result = wrapper.run(batch.q, *keys, out=wide[:, ::2], lse=lse, return_lse=True)
        assert result[0].data_ptr() == wide.data_ptr() and result[1] is lse
        check((wide[:, ::2], lse), expected)
        assert (wide[:, 1::2] == 9).all()
        lse.fill_(9)
        wrapper.run(batch.q, *keys, lse=lse)  # is written where it is given
        check((wide[:, ::2], lse), expected)
    decode = decode_batch(device)
    out, lse = torch.empty_like(decode.q), torch.empty(len(DECODE), 4, device=device)
    assert planned_decode(decode).run(decode.q, decode.cache(), out=out, lse=lse, return_lse=True) == (out, lse)
    check((out, lse), decode.expected())


@devices
@pytest.mark.parametrize("o_dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_outputs_of_other_types(device, o_dtype):
    batch = decode_batch(device)
    out = planned_decode(batch, o_data_type=o_dtype).run(batch.q, batch.cache(), v_scale=0.5)
    assert out.dtype == o_dtype
    check(out.float(), batch.expected(v_scale=0.5), tolerance=7e-2 if o_dtype == torch.float8_e4m3fn else 1e-2)


@devices
def test_strided_queries(device):
    batch = Batch(16, Q_LENS, KV_LENS, device=device)
    wide = torch.stack([torch.zeros_like(batch.q), batch.q], 1)
    check(planned_prefill(batch, causal=True).run(wide[:, 1], batch.cache()), batch.expected(causal=True))


@devices
def test_pages_of_one_token_need_no_dimension(device):
    batch = Batch(17, Q_LENS, KV_LENS, device=device, page_size=1)
    expected = batch.expected(causal=True)
    k, v = batch.cache()
    wrapper = planned_prefill(batch, causal=True)
    check(wrapper.run(batch.q, (k[:, 0], v[:, 0])), expected)
    check(wrapper.run(batch.q, torch.stack([k[:, 0], v[:, 0]], 1)), expected)
    check(planned_prefill(batch, "HND", causal=True).run(batch.q, (k[:, 0], v[:, 0])), expected)


@devices
def test_verify_steps_of_decode(device):
    """Several tokens a request are causal among themselves, or see window_right keys beyond."""
    batch = Batch(18, [3] * 4, [3, 20, 2, 0], device=device)
    check(planned_decode(batch, q_len_per_req=3).run(batch.q, batch.cache(), return_lse=True), batch.expected(causal=True))
    check(planned_decode(batch, q_len_per_req=3, window_right=-1).run(batch.q, batch.cache(), return_lse=True), batch.expected())
    masks = [torch.ones(3, s, dtype=torch.bool).tril(s - 3 + 1) for s in batch.kv_lens]
    check(planned_decode(batch, q_len_per_req=3, window_right=1).run(batch.q, batch.cache(), return_lse=True), batch.expected(masks))
    with pytest.warns(DeprecationWarning):
        planned_decode(batch, q_len_per_req=3).run(batch.q, batch.cache(), q_len_per_req=3)


@devices
def test_arrays_on_the_device_are_copied_back(device):
    batch = Batch(19, Q_LENS, KV_LENS, device=device)
    wrapper = planned_prefill(batch, where=device, causal=True)
    check(wrapper.run(batch.q, batch.cache()), batch.expected(causal=True))
    mixed = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    arrays = (batch.qo_indptr, batch.indptr, batch.indices.to(device), batch.last)
    mixed.plan(*arrays, 4, 2, 64, 4, causal=True, q_data_type="bfloat16")
    check(mixed.run(batch.q, batch.cache()), batch.expected(causal=True))
    check(planned_ragged(batch, where=device).run(batch.q, *batch.ragged()), batch.expected())
    decode = decode_batch(device)
    check(planned_decode(decode, where=device).run(decode.q, decode.cache()), decode.expected())


@devices
def test_a_plan_serves_many_layers_and_steps(device):
    batch = Batch(20, Q_LENS, KV_LENS, device=device)
    wrapper = planned_prefill(batch, causal=True)
    for seed in range(3):
        layer = Batch(100 + seed, Q_LENS, KV_LENS, device=device)
        layer.indices = batch.indices
        check(wrapper.run(layer.q, layer.cache()), layer.expected(causal=True))
    made = dict(wrapper._plans._made)
    assert len(made) == 1
    for seed, q_lens in enumerate(([2, 2], [], [0], [40])):  # within the limits, and nothing at all
        step = Batch(200 + seed, q_lens, [n + 3 for n in q_lens], device=device)
        wrapper.plan(step.qo_indptr, *step.arrays("cpu"), 4, 2, 64, 4, causal=True, q_data_type=torch.bfloat16)
        result = wrapper.run(step.q, step.cache()) if q_lens else wrapper.run(step.q, batch.cache())
        assert result.shape == step.q.shape
        if q_lens:
            check(result, step.expected(causal=True))
    assert wrapper._plans._made == made
    step = Batch(300, [1500], [1500], device=device)
    wrapper.plan(step.qo_indptr, *step.arrays("cpu"), 4, 2, 64, 4, causal=True, q_data_type=torch.bfloat16)
    check(wrapper.run(step.q, step.cache()), step.expected(causal=True))
    assert len(wrapper._plans._made) == 1 and wrapper._plans._made != made


@devices
def test_what_runs_ask_for_is_ready_in_the_next_step(device):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    sinks = torch.ones(4, device=device)
    for seed in range(3):
        batch = Batch(seed, [1] * 3, [5, 9, seed], device=device)
        wrapper.plan(*batch.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)
        ready = set(wrapper._plans._ready)
        check(wrapper.run(batch.q, batch.cache(), sinks=sinks), batch.expected(sinks=sinks))
        assert seed == 0 or set(wrapper._plans._ready) == ready == {(("sinks", True),)}


@devices
def test_specs_alternate(device):
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    batch = decode_batch(device)
    for window_left in (3, -1, 7, 0, 5, 3, 11, 3):
        wrapper.plan(*batch.arrays("cpu"), 4, 2, 64, 4, window_left=window_left, q_data_type=torch.bfloat16)
        check(wrapper.run(batch.q, batch.cache()), batch.expected(window_left=window_left))
    assert len(wrapper._plans._made) <= 4
    check(wrapper.run(batch.q, batch.cache(), window_left=2), batch.expected(window_left=2))


@devices
def test_fast_decode_plan(device):
    batch = decode_batch(device, page_size=1)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    indptr, indices, _ = batch.arrays(device)
    poison = torch.full((len(DECODE),), -9, dtype=torch.int32, device=device)  # pages of one token are always full
    options = dict(data_type=torch.bfloat16, global_override_indptr_cpu=batch.indptr)
    flashinfer.fast_decode_plan(wrapper, torch.full_like(indptr, -7), indices, poison, 4, 2, 64, 1, **options)
    check(wrapper.run(batch.q, batch.cache()), batch.expected())
    wrapper.plan = functools.partial(flashinfer.fast_decode_plan, wrapper)
    wrapper.plan(indptr, indices, poison, 4, 2, 64, 1, window_left=2, **options)
    check(wrapper.run(batch.q, batch.cache()), batch.expected(window_left=2))


@devices
def test_single_functions(device):
    for layout in ("NHD", "HND"):
        for q_len, kv_len in ((1, 1), (6, 6), (6, 30), (6, 2), (3, 0)):
            batch = Batch(21, [q_len], [kv_len], device=device, dtype=torch.float16, dim_v=32)
            k, v = batch.ragged(layout)
            for causal in (False, True):
                out = flashinfer.single_prefill_with_kv_cache(batch.q, k, v, causal=causal, kv_layout=layout, return_lse=True)
                check(out, batch.expected(causal=causal), torch.float16)
        batch = Batch(22, [1], [50], device=device)
        out, lse = flashinfer.single_decode_with_kv_cache(batch.q[0], *batch.ragged(layout), layout, return_lse=True)
        check((out[None], lse[None]), batch.expected())
    out = flashinfer.single_prefill_with_kv_cache(batch.q, *batch.ragged(), o_dtype=torch.float32)
    assert out.dtype == torch.float32
    check(out, batch.expected())


@devices
def test_logits_far_below_zero(device):
    batch = Batch(23, [4], [30], device=device, dtype=torch.float16)
    batch.q, batch.k[0] = torch.full_like(batch.q, -180.0), torch.full_like(batch.k[0], 180.0)
    out, lse = flashinfer.single_prefill_with_kv_cache(batch.q, *batch.ragged(), causal=True, return_lse=True)
    expected = batch.expected(causal=True)
    check(out, expected, torch.float16)
    torch.testing.assert_close(lse.double().cpu(), expected[1], atol=0, rtol=1e-4)


@devices
@pytest.mark.parametrize("backend", ["auto", "fa2", "fa3", "own"])
def test_backends(device, backend):
    batch = decode_batch(device)
    if backend == "own":
        backend = "reference" if device == "cpu" else "cuda_sm80"
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(device), backend=backend, use_tensor_cores=True)
    wrapper.plan(*batch.arrays("cpu"), 4, 2, 64, 4, q_data_type=torch.bfloat16)
    check(wrapper.run(batch.q, batch.cache()), batch.expected())
    assert wrapper.use_tensor_cores and not wrapper.is_cuda_graph_enabled
