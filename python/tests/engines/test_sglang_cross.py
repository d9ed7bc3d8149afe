"""Encoder-decoder models in imbrex.sglang, against a stand-in of SGLang: an encoder's tokens are in front of a request's own, in slots of its row."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from serving import check  # noqa: E402
from sglang_runner import Runner, VerifyInput, masks_of, random_trees  # noqa: E402

pytestmark = pytest.mark.usefixtures("sglang")

MODEL = [{}, {"is_cross_attention": True}, {"sliding_window_size": 9}, {"is_cross_attention": True, "logit_cap": 4.0}]


class CrossRunner(Runner):
    """A runner for requests with an encoder. Slots have no order; layers of cross attention are given keys and values by a request's first step."""

    def __init__(self, device, layers=MODEL, **changes):
        config = SimpleNamespace(is_encoder_decoder=True, context_len=256)
        super().__init__(device, layers, model_config=config, **changes)
        self.encoders, self.free = {}, (torch.randperm(700) + 16).tolist()

    def request(self, name, length, encoder):
        request = super().request(name, length)
        slots = [self.free.pop() for _ in range(encoder)]
        shapes = [(x.tp_k_head_num, x.qk_head_dim) for x in self.layers]
        k, v = ([torch.randn(encoder, *shape, device=self.device).to(self.dtype) for shape in shapes] for _ in range(2))
        self.encoders[name] = SimpleNamespace(slots=slots, k=k, v=v)
        self._enter(request, 0, slots)
        return request

    def _enter(self, request, at, slots):
        slots = torch.tensor(slots, dtype=torch.int32, device=self.device)
        self.req_to_token_pool.write((self.rows[request.name], slice(at, at + len(slots))), slots)

    def slots(self, request, count):
        slots = [self.free.pop() for _ in range(count)]
        self._enter(request, len(self.encoders[request.name].slots) + request.computed, slots)
        return slots

    def batch(self, mode, scheduled, pad_reqs=0, **changes):
        lens = [len(self.encoders[r.name].slots) for r, _ in scheduled]
        new = [slot for r, _ in scheduled if not r.computed for slot in self.encoders[r.name].slots]
        padded = lens + [3] * (pad_reqs + (self.graph.max_bs - len(lens) if self.graph and mode == self.graph.mode else 0))
        fields = dict(
            encoder_lens=torch.tensor(padded, device=self.device),
            encoder_lens_cpu=lens,
            encoder_out_cache_loc=torch.tensor(new, dtype=torch.int64, device=self.device),
        )
        return super().batch(mode, scheduled, pad_reqs, **{**fields, **changes})

    def inputs(self, scheduled, padding=0):
        made = super().inputs(scheduled, padding)
        new = [self.encoders[r.name] for r, _ in scheduled if not r.computed]
        for index, layer in enumerate(self.layers):
            if layer.is_cross_attention:
                k, v = (torch.cat([getattr(e, side)[index] for e in new]) if new else None for side in "kv")
                made[index] = (made[index][0], k, v)
        return made

    def forward(self, batch, inputs):
        return [layer(q.reshape(len(q), -1), k, v, batch, self.attn_backend) for layer, (q, k, v) in zip(self.layers, inputs)]

    def _check(self, index, layer, out, q, scheduled, masks, depths=None):
        if not layer.is_cross_attention:
            return super()._check(index, layer, out, q, scheduled, masks, depths)
        at = 0
        for request, count in scheduled:
            encoder, rows = self.encoders[request.name], slice(at, at + count)
            at += count
            if not encoder.slots:  # a request without an image: there is nothing to see
                assert not out[rows].any()
                continue
            options = dict(causal=False, scale=layer.scaling, soft_cap=layer.logit_cap)
            check(out[rows], q[rows], encoder.k[index], encoder.v[index], self.dtype, f"layer {index}, {request.name}", **options)


def requests_of(runner):
    """Encoders that are shorter than a prompt and longer, and one that is not there."""
    return [runner.request(*x) for x in (("a", 60, 21), ("b", 90, 130), ("c", 40, 0))]


@pytest.mark.parametrize("page_size", [1, 16])
def test_serving(device, page_size):
    runner = CrossRunner(device, page_size=page_size)
    a, b, c = requests_of(runner)
    runner.step([(a, 30)])
    runner.step([(b, 50), (a, 1), (c, 1)])
    runner.step([(c, 20), (a, 5)])
    runner.step([(a, 1), (b, 1), (c, 1)])
    runner.step([(a, 1), (b, 1)], pad_reqs=3)
    kinds = {(kept.plan.spec.kind, kept.plan.spec.causal, kept.plan.spec.block_size) for kept in runner.attn_backend._eager.kept()}
    assert kinds == {("decoder", True, 1), ("encoder_decoder", False, 1)}


def test_graphs(device):
    runner = CrossRunner(device)
    a, b, c = requests_of(runner)
    runner.step([(a, 30), (b, 50), (c, 7)])
    runner.capture(4, encoder_lens=torch.zeros(4, dtype=torch.int64, device=device))
    for scheduled in ([a, b, c], [b], [c, a]):
        runner.step([(r, 1) for r in scheduled])


def test_drafts_see_the_whole_encoder(device):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = CrossRunner(device, MODEL[:2])
    requests = requests_of(runner)
    runner.step([(r, 20) for r in requests])
    trees = random_trees(3, 5)
    masks, _ = masks_of(requests, 5, device, trees=trees)
    info = VerifyInput(5, trees=trees, device=device)
    runner.step([(r, 5) for r in requests], mode=ForwardMode.TARGET_VERIFY, masks=masks, spec_info=info)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_always_on_device(sglang, monkeypatch):
    monkeypatch.setenv("IMBREX_ENGINE_CONFIG", '{"on_device": "always"}')
    test_serving("cuda", 1)
    test_graphs("cuda")


def test_what_is_refused(sglang):
    runner = CrossRunner("cpu")
    a = runner.request("a", 30, 5)
    with pytest.raises(NotImplementedError, match="expected encoder_lens with layers of cross attention in SGLang, got none"):
        runner.step([(a, 5)], encoder_lens=None)
    with pytest.raises(NotImplementedError, match="expected --page-size 1 with kv_cache_layout hnd for an encoder-decoder model"):
        CrossRunner("cpu", page_size=16, layout="hnd")
    CrossRunner("cpu", page_size=1, layout="hnd")
