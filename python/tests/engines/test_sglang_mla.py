"""imbrex.sglang on models with latents (MLA): absorbed queries over a pool of latents, new prompts with keys of all heads, graphs, drafts."""

import pytest

torch = pytest.importorskip("torch")
from serving import check  # noqa: E402
from sglang_runner import Runner, VerifyInput, first_step, masks_of, prefilled, serve  # noqa: E402

pytestmark = pytest.mark.usefixtures("sglang")

HEADS, RANK, ROPE = 8, 64, 16


class LatentRunner(Runner):
    """Layers as SGLang's `attn_mqa`: one head of keys, whose first elements are its values."""

    def __init__(self, device, layers=2, *, page_size=1, dtype=torch.bfloat16, kv_dtype="auto", **changes):
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        stored = dtype if kv_dtype == "auto" else torch.float8_e4m3fn
        pool = MLATokenToKVPool(48 * 16, page_size, stored, RANK, ROPE, layers, device)
        same = dict(page_size=page_size, dtype=dtype, kv_dtype=kv_dtype, heads=(HEADS, 1, RANK + ROPE), v_head_dim=RANK)
        super().__init__(device, [{"scaling": 0.15}] * layers, pool=pool, use_mla_backend=True, **same, **changes)

    def request(self, name, length):
        request = super().request(name, length)
        request.values = [k[..., :RANK] for k in request.keys]
        return request

    def release(self, request):
        for page in self.pages[request.name]:
            for buffer in self.token_to_kv_pool.kv_buffer:
                buffer[page * self.page_size : (page + 1) * self.page_size] = 0x7F if buffer.dtype == torch.uint8 else float("nan")
        self.free_pages += self.pages[request.name]
        self.pages[request.name], request.computed = [], 0


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_serving(device, dtype, page_size):
    serve(LatentRunner(device, dtype=dtype, page_size=page_size))


def test_latents_of_e4m3(device):
    runner = LatentRunner(device, kv_dtype="fp8_e4m3", page_size=16)
    for layer in runner.layers:
        layer.k_scale = layer.v_scale = torch.tensor([0.5])  # SGLang's pool of latents does not use them
    serve(runner)


@pytest.mark.parametrize("page_size", [1, 16])
def test_graphs(device, page_size):
    runner = LatentRunner(device, page_size=page_size)
    runner.capture(6)
    serve(runner)


def test_trees_of_drafts(device):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = LatentRunner(device, page_size=16, speculative=True)
    requests = prefilled(runner)
    masks, flat = masks_of(requests, 5, device)
    runner.step([(r, 5) for r in requests], mode=ForwardMode.TARGET_VERIFY, masks=masks, spec_info=VerifyInput(5, flat))


def expanded_layer(layer_id=0):
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(HEADS, 48, 0.2, HEADS, layer_id, v_head_dim=24)


def test_new_prompts_bring_keys_of_all_heads(device):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner, layer = LatentRunner(device), expanded_layer()
    prompts = [(runner.request(name, length), length) for name, length in zip("abc", (40, 7, 130))]
    batch = runner.batch(ForwardMode.EXTEND, prompts)
    runner.attn_backend.init_forward_metadata(batch)
    tokens = sum(n for _, n in prompts)
    q, k, v = (torch.randn(tokens, HEADS, d, device=device).to(runner.dtype) for d in (48, 48, 24))
    out = layer(q.view(tokens, -1), k, v, batch, runner.attn_backend, save_kv_cache=False).view(tokens, HEADS, 24)
    at = 0
    for request, count in prompts:
        rows = slice(at, at + count)
        check(out[rows], q[rows], k[rows], v[rows], runner.dtype, request.name, causal=True, scale=0.2)
        at += count


def test_keys_of_all_heads_behind_a_prefix_are_refused(device):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner, layer = LatentRunner(device), expanded_layer()
    first_step(runner)
    request = runner.request("b", 30)
    request.computed = 10
    batch = runner.batch(ForwardMode.EXTEND, [(request, 20)])
    runner.attn_backend.init_forward_metadata(batch)
    q, k, v = (torch.randn(20, HEADS, d, device=device).to(runner.dtype) for d in (48, 48, 24))
    with pytest.raises(NotImplementedError, match=r"new prompts alone in SGLang, got prefixes of \[10\] tokens"):
        layer(q, k, v, batch, runner.attn_backend, save_kv_cache=False)


def test_wrong_pages_are_found(device):
    """A pool that stores the part with a position in front of the latent."""
    import imbrex

    runner = LatentRunner(device)
    pool, plain = runner.token_to_kv_pool, runner.token_to_kv_pool.set_kv_buffer
    pool.set_kv_buffer = lambda layer, loc, k, v: plain(layer, loc, k.roll(ROPE, -1), v)
    with pytest.raises(imbrex.Error, match="layer 0: expected to find k at the slots it was written to") as caught:
        first_step(runner)
    assert caught.value.code == "python.engine_cache"


@pytest.mark.parametrize("name, value", [("use_dsa", True), ("kv_scale_buffer", []), ("kv_cache_dim", 100)])
def test_pools_that_are_refused(sglang, name, value):
    from imbrex.sglang.pages import check_pool

    pool = LatentRunner("cpu").token_to_kv_pool
    setattr(pool, name, value)
    with pytest.raises(NotImplementedError, match="latents as plain numbers and no sparse attention, got MLATokenToKVPool"):
        check_pool(pool)
