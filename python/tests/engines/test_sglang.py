"""imbrex.sglang against a stand-in of SGLang: a served model, token slots and pages, graphs, verification, the check of a pool's layout."""

import pytest

torch = pytest.importorskip("torch")
import imbrex  # noqa: E402
from imbrex._plan_cache import Limits  # noqa: E402
from sglang_runner import Runner, VerifyInput, first_step, masks_of, prefilled, serve  # noqa: E402

pytestmark = pytest.mark.usefixtures("sglang")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


PLAIN = [{}, {}]
SINKS = torch.linspace(-1, 2, 8)
MODELS = {
    "plain": PLAIN,
    "scale": [{"scaling": 0.2}, {}],
    "soft cap": [{"logit_cap": 5.0}] * 2,
    "sinks": [{"sinks": SINKS}, {"sinks": SINKS.flip(0).bfloat16()}],
    "windows": [{"sliding_window_size": 19}, {}],
    "all together": [{"sliding_window_size": 23, "sinks": SINKS, "logit_cap": 8.0}, {"sinks": SINKS}],
    "one head more": [{"num_heads": 4, "num_kv_heads": 2}, {"num_heads": 6, "num_kv_heads": 2}],
}


def on(device, model):
    return [{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()} for options in model]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", MODELS)
def test_serving(device, name, page_size):
    serve(Runner(device, on(device, MODELS[name]), page_size=page_size))


@pytest.mark.parametrize("layout, page_size", [("nhd", 64), ("hnd", 16), ("hnd", 1), ("nhd", 3)])
def test_pools(device, layout, page_size):
    serve(Runner(device, PLAIN, layout=layout, page_size=page_size))


def test_a_model_of_which_some_layers_are_linear(device):
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    runner = Runner(device, PLAIN, page_size=16)
    pool = HybridLinearKVPool(runner.token_to_kv_pool, [3, 7])
    for layer, number in zip(runner.layers, (3, 7)):
        layer.layer_id = number
    runner.attn_backend.token_to_kv_pool = pool
    serve(runner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_types_of_models(device, dtype):
    serve(Runner(device, on(device, MODELS["all together"]), dtype=dtype))


@pytest.mark.parametrize("kv_dtype, scales", [("fp8_e4m3", None), ("fp8_e4m3", (0.25, 0.5)), ("fp8_e5m2", (0.5, 2.0))])
@pytest.mark.parametrize("page_size", [1, 16])
def test_fp8_pages_with_scales(device, kv_dtype, scales, page_size):
    serve(Runner(device, on(device, MODELS["windows"]), kv_dtype=kv_dtype, scales=scales, page_size=page_size))


def test_values_of_their_own_dim(device):
    serve(Runner(device, PLAIN, v_head_dim=32))


def test_scales_of_a_cache_that_is_not_fp8_are_not_used(device):
    runner = Runner(device, PLAIN, scales=(0.25, 0.5))
    serve(runner)


@pytest.mark.parametrize("name", ["plain", "all together"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs(device, name, page_size):
    """On a CPU the calls of a graph without one: metadata in the buffers that the runner has for it."""
    runner = Runner(device, on(device, MODELS[name]), page_size=page_size)
    runner.capture(6)
    serve(runner)


@pytest.mark.parametrize("page_size", [1, 16])
def test_many_requests_outgrow_a_plan(device, page_size, monkeypatch):
    monkeypatch.setattr("imbrex.sglang.backend._SMALLEST", Limits(1, 1, 1))
    runner = Runner(device, PLAIN, page_size=page_size)
    requests, rooms = [runner.request(f"r{i}", 24) for i in range(8)], []
    for n in (1, 3, 8, 2):
        runner.step([(r, 4) for r in requests[:n]])
        rooms.append({kept.limits[:2] for kept in runner.attn_backend._eager.kept()})
    runner.step([(r, 1) for r in requests])
    assert rooms == [{(1, 4)}, {(4, 16)}, {(8, 32)}, {(8, 32)}]


def test_layers_that_share_their_cache(device):
    """A layer without k and v of its own reads another layer's."""
    runner = Runner(device, PLAIN)
    a = runner.request("a", 30)
    runner.step([(a, 20)])
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner.layers[1].layer_id = 0
    a.keys[1], a.values[1] = a.keys[0], a.values[0]
    batch, inputs = runner.batch(ForwardMode.EXTEND, [(a, 5)]), runner.inputs([(a, 5)])
    runner.attn_backend.init_forward_metadata(batch)
    runner.layers[0](inputs[0][0].view(5, -1), *inputs[0][1:], batch, runner.attn_backend)
    out = runner.layers[1](inputs[1][0].view(5, -1), None, None, batch, runner.attn_backend)
    runner._check(1, runner.layers[1], out.view(5, 8, 64), inputs[1][0], [(a, 5)], None)


def test_an_output_of_the_engines_own(device):
    runner = Runner(device, PLAIN)
    a = runner.request("a", 30)
    given = torch.zeros(20, 512, dtype=torch.bfloat16, device=device)
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch, inputs = runner.batch(ForwardMode.EXTEND, [(a, 20)], _attn_output=given), runner.inputs([(a, 20)])
    runner.attn_backend.init_forward_metadata(batch)
    out = runner.layers[0](inputs[0][0].view(20, -1), *inputs[0][1:], batch, runner.attn_backend)
    assert out.data_ptr() == given.data_ptr()
    runner._check(0, runner.layers[0], given.view(20, 8, 64), inputs[0][0], [(a, 20)], None)


# Speculative verification.


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_verification_of_a_tree(device, page_size, as_bytes):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner(device, PLAIN, page_size=page_size)
    requests = prefilled(runner)
    for width in (5, 8):
        masks, flat = masks_of(requests, width, device, tail=9 if width == 8 else 0)
        info = VerifyInput(width, flat.to(torch.uint8) if as_bytes else flat)
        runner.step([(r, width) for r in requests], mode=ForwardMode.TARGET_VERIFY, masks=masks, spec_info=info)
    runner.step([(r, 1) for r in requests])


def test_verification_of_a_chain(device):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner(device, MODELS["windows"])
    requests = prefilled(runner)
    for mask in (None, masks_of(requests, 4, device)[1]):
        runner.step([(r, 4) for r in requests], mode=ForwardMode.TARGET_VERIFY, spec_info=VerifyInput(4, mask, topk=1))


class DFlashVerifyInput:
    """Of SGLang's block drafts: a chain, which says so in `topk`, and has a mask all the same."""

    topk = 1

    def __init__(self, width, mask):
        self.draft_token_num, self.custom_mask = width, mask


@pytest.mark.parametrize("page_size", [1, 16])
def test_verification_of_dflash(device, page_size):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner(device, MODELS["windows"], page_size=page_size)
    requests = prefilled(runner)
    for mask in (torch.ones(4 * sum(r.computed + 4 for r in requests), dtype=torch.bool, device=device), None):
        runner.step([(r, 4) for r in requests], mode=ForwardMode.TARGET_VERIFY, spec_info=DFlashVerifyInput(4, mask))


def test_masks_over_draft_tokens_alone(sglang):
    """SGLang's workers on a CPU give these."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner("cpu", PLAIN)
    requests = prefilled(runner)
    masks, _ = masks_of(requests, 5, "cpu")
    flat = torch.cat([torch.tensor(m[:, -5:]).reshape(-1) for m in masks])
    runner.step([(r, 5) for r in requests], mode=ForwardMode.TARGET_VERIFY, masks=masks, spec_info=VerifyInput(5, flat))
    with pytest.raises(imbrex.Error, match="expected a custom_mask of .* bytes, got 7"):
        runner.step([(r, 5) for r in requests], mode=ForwardMode.TARGET_VERIFY, spec_info=VerifyInput(5, flat[:7]))


@pytest.mark.parametrize("page_size", [1, 16])
def test_verification_in_graphs(device, page_size):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner(device, PLAIN, page_size=page_size, speculative=True)
    requests = prefilled(runner)
    dummy = torch.ones(4 * 5 * (320 + 5), dtype=torch.bool, device=device)
    runner.capture(4, ForwardMode.TARGET_VERIFY, 5, VerifyInput(5, dummy))
    for _ in range(2):
        masks, flat = masks_of(requests, 5, device)
        runner.step([(r, 5) for r in requests], mode=ForwardMode.TARGET_VERIFY, masks=masks, spec_info=VerifyInput(5, flat))


@on_gpu
def test_lengths_of_the_gpu(sglang):
    """With speculative decoding the host does not wait for the lengths of a step."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner("cuda", PLAIN, speculative=True)
    assert runner.attn_backend.on_device and not runner.attn_backend.needs_cpu_seq_lens
    requests = prefilled(runner)
    for known in (None, 200):
        masks, flat = masks_of(requests, 5, "cuda")
        info = VerifyInput(5, flat)
        more = dict(seq_lens_cpu=None, seq_lens_sum=None, max_seq_len_host=known)
        runner.step([(r, 5) for r in requests], mode=ForwardMode.TARGET_VERIFY, masks=masks, spec_info=info, **more)
    runner.step([(r, 1) for r in requests], seq_lens_cpu=None, seq_lens_sum=None)


@on_gpu
@pytest.mark.parametrize("page_size", [1, 16])
def test_always_on_device(sglang, monkeypatch, page_size):
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"on_device": "always"}')
    runner = Runner("cuda", PLAIN, page_size=page_size)
    runner.capture(6)
    serve(runner)


# The self check.


def test_the_check_leaves_pages_as_they_were(device):
    runner = Runner(device, PLAIN, kv_dtype="fp8_e4m3", scales=(0.01, 30.0), page_size=16)
    pool, checked = runner.token_to_kv_pool, []
    before = [x.clone() for x in pool.k_buffer + pool.v_buffer]
    q = torch.zeros(1, 512, dtype=torch.bfloat16, device=device)
    for layer in runner.layers:
        runner.attn_backend._check(layer, q)
        checked.append(layer.layer_id)
    assert runner.attn_backend._checked == set(checked)
    assert all(torch.equal(a, b) for a, b in zip(before, pool.k_buffer + pool.v_buffer))


def written_elsewhere(pool):
    right = pool.set_kv_buffer
    pool.set_kv_buffer = lambda layer, where, *rest: right(layer, type(where)(where.loc ^ 1), *rest)


def written_the_other_way(pool):
    right = pool.set_kv_buffer
    pool.set_kv_buffer = lambda layer, where, k, v, *rest: right(layer, where, v, k, *rest)


def another_layout(pool):
    """Its attribute and its writer say nhd, its buffers lie otherwise."""
    pool.k_buffer = [x.view(-1, 16, 2, 64).transpose(1, 2).contiguous() for x in pool.k_buffer]
    pool.set_kv_buffer = lambda layer, where, k, v, *rest: None


@pytest.mark.parametrize("wrong", [written_elsewhere, written_the_other_way, another_layout])
def test_a_wrong_layout_is_found(device, wrong):
    runner = Runner(device, PLAIN, page_size=16)
    wrong(runner.token_to_kv_pool)
    with pytest.raises(imbrex.Error, match="layer 0: expected") as caught:
        first_step(runner)
    assert caught.value.code == "python.engine_cache"


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_that_does_not_write_to_the_slot_of_padding(device, page_size):
    """As SGLang's kernel for new keys on GPUs."""
    runner = Runner(device, PLAIN, page_size=page_size)
    pool = runner.token_to_kv_pool
    right = pool.set_kv_buffer

    def write(layer, where, k, v, *rest):
        kept = where.loc != 0
        right(layer, type(where)(where.loc[kept]), k[kept], v[kept], *rest)

    pool.set_kv_buffer = write
    first_step(runner)


def test_the_check_can_be_left_out(device, monkeypatch):
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"self_check": false}')
    runner = Runner(device, PLAIN, page_size=16)
    written_the_other_way(runner.token_to_kv_pool)
    with pytest.raises(AssertionError, match="off by"):
        first_step(runner)


# Tokens within a page.


def scattered(runner, request, count, swap):
    """A step whose new tokens have their slots in another order; `swap` is a pair of them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch, inputs = runner.batch(ForwardMode.EXTEND, [(request, count)]), runner.inputs([(request, count)])
    a, b = swap
    batch.out_cache_loc[[a, b]] = batch.out_cache_loc[[b, a]]
    where = slice(request.computed, request.computed + count)
    runner.req_to_token_pool.write((runner.rows[request.name], where), batch.out_cache_loc.to(torch.int32))
    runner.attn_backend.init_forward_metadata(batch)
    return runner.forward(batch, inputs)


@pytest.mark.parametrize("swap", [(0, 1), (3, 19), (5, 21)])  # the last within another page, at the same place
def test_tokens_in_another_order_than_their_slots(device, swap):
    runner = Runner(device, PLAIN, page_size=16)
    a = runner.request("a", 60)
    runner.step([(a, 11)])
    with pytest.raises(NotImplementedError, match="in the order of their slots within a page of 16, got another: --page-size 1"):
        scattered(runner, a, 30, swap)
        if device == "cuda":  # which is noticed when the host hears of it
            torch.cuda.synchronize()
            scattered(runner, a, 30, swap)


def test_a_step_that_is_made_up(device):
    """As SGLang captures graphs of prefill: all new tokens are in the slot of padding."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner(device, PLAIN, page_size=16)
    changes = dict(extend_num_tokens=40, extend_seq_lens_cpu=[40], extend_prefix_lens_cpu=[0])
    for key in ("seq_lens", "seq_lens_cpu"):
        changes[key] = torch.tensor([40], device="cpu" if key.endswith("cpu") else device)
    rows, slots = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(40, dtype=torch.int64, device=device)
    batch = runner.batch(ForwardMode.EXTEND, [], pad_reqs=1, **changes, req_pool_indices=rows, out_cache_loc=slots)
    for _ in range(2):  # the second hears of what was wrong with the first
        runner.attn_backend.init_forward_metadata(batch)
        if device == "cuda":
            torch.cuda.synchronize()
    a = runner.request("a", 60)
    runner.step([(a, 30)])


def test_tokens_in_any_order_without_pages(device):
    runner = Runner(device, PLAIN, page_size=1)
    a = runner.request("a", 60)
    runner.step([(a, 11)])
    outputs = scattered(runner, a, 30, (3, 19))
    assert torch.isfinite(outputs[0]).all()
    a.computed += 30
    runner.step([(a, 1)])
