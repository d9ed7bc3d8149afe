"""SGLang's own classes on a CPU, without a server: its pools, layers, batches and drafts, its backends torch_native and triton (the latter by
Triton's interpreter), and imbrex beside them, in float32. Prints how far each is from attention in float64; exits with 1 where imbrex is far.

sglang_layers.py MODEL: a folder of make_models.py, of which the config is read.
"""

import os
import sys
from types import SimpleNamespace

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", TRITON_INTERPRET="1")

import torch  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

import imbrex.sglang  # noqa: E402

HEADS, KV_HEADS, DIM = 8, 2, 64
SLOTS, CONTEXT = 4096, 1024


class Model:
    """What a backend is given of a model's runner, with pools of one layer."""

    is_draft_worker = use_mla_backend = False
    device, gpu_id, dtype, kv_cache_dtype, page_size = "cpu", 0, torch.float32, torch.float32, 1
    sliding_window_size = attention_chunk_size = None

    def __init__(self, server_args, speculative=False, **config):
        self.server_args, self.model_config = server_args, ModelConfig.from_server_args(server_args)
        for name, value in config.items():
            setattr(self.model_config, name, value)
        self.spec_algorithm = SimpleNamespace(is_speculative=lambda: speculative, is_dspark=lambda: False)
        self.req_to_token_pool = ReqToTokenPool(16, CONTEXT, "cpu", enable_memory_saver=False)
        self.token_to_kv_pool = MHATokenToKVPool(SLOTS, 1, self.dtype, KV_HEADS, DIM, 1, "cpu", enable_memory_saver=False)
        self.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: self.token_to_kv_pool)
        self.kv_index_translator = KVIndexTranslator(
            req_to_token=self.req_to_token_pool.req_to_token,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            token_to_kv_pool=self.token_to_kv_pool,
            page_size=1,
            device="cpu",
        )
        self.free = (torch.randperm(SLOTS) + 1).tolist()  # slot 0 is for padding

    def decode_num_tokens_per_req(self):
        return 1

    def request(self, index, length):
        """A request of so many tokens in row `index`, with keys and values of its own."""
        slots = torch.tensor([self.free.pop() for _ in range(length)], dtype=torch.int32)
        self.req_to_token_pool.req_to_token[index, :length] = slots
        made = SimpleNamespace(row=index, slots=slots.long(), computed=0)
        made.k, made.v = (torch.randn(length, KV_HEADS, DIM) for _ in range(2))
        return made


def batch_of(model, mode, scheduled, **changes):
    counts, computed = [n for _, n in scheduled], [r.computed for r, _ in scheduled]
    verify = mode == ForwardMode.TARGET_VERIFY
    lens = [c + (0 if verify else n) for c, n in zip(computed, counts)]
    slots = torch.cat([r.slots[r.computed : r.computed + n] for r, n in scheduled])
    made = ForwardBatch(
        forward_mode=mode,
        batch_size=len(lens),
        input_ids=torch.zeros(sum(counts), dtype=torch.long),
        req_pool_indices=torch.tensor([r.row for r, _ in scheduled]),
        seq_lens=torch.tensor(lens),
        seq_lens_cpu=torch.tensor(lens),
        out_cache_loc=slots,
        seq_lens_sum=sum(lens),
        extend_num_tokens=sum(counts),
        extend_seq_lens=torch.tensor(counts, dtype=torch.int32),
        extend_prefix_lens=torch.tensor(computed, dtype=torch.int32),
        extend_seq_lens_cpu=counts,
        extend_prefix_lens_cpu=computed,
        extend_start_loc=torch.tensor(counts).cumsum(0) - torch.tensor(counts),
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def exact(q, k, v, seen, score=lambda logits: logits):
    """Attention in float64 of q [tokens, heads, dim] over k and v [keys, kv heads, dim], where seen [tokens, keys]."""
    q, k, v = q.double(), *(x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = score(torch.einsum("thd,shd->hts", q, k) * DIM**-0.5).masked_fill(~seen, float("-inf"))
    return torch.einsum("hts,shd->thd", logits.softmax(-1), v)


def layer_of(**options):
    after = {name: options.pop(name) for name in ("xai_temperature_len",) if name in options}
    layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, **options)
    for name, value in after.items():
        setattr(layer, name, value)
    return layer


class Table:
    """Rows of what backends give beside float64."""

    def __init__(self):
        self.rows, self.far = [], False

    def step(self, name, model, backends, layer, scheduled, mode, seen, score=lambda logits: logits, **changes):
        """A step in each backend. seen(request, count): which of a request's keys its new tokens see, bool [count, keys]."""
        q = torch.randn(sum(n for _, n in scheduled), HEADS, DIM)
        k, v = (torch.cat([getattr(r, side)[r.computed : r.computed + n] for r, n in scheduled]) for side in "kv")
        expected = [exact(part, r.k[: r.computed + n], r.v[: r.computed + n], seen(r, n), score) for (r, n), part in parts(scheduled, q)]
        found = {}
        for backend_name, backend in backends.items():
            batch = batch_of(model, mode, scheduled, **changes)
            backend.init_forward_metadata(batch)
            out = backend.forward(q.view(len(q), -1).clone(), k.clone(), v.clone(), layer, batch)
            found[backend_name] = (out.view(-1, HEADS, DIM).double() - torch.cat(expected)).abs().max().item()
        for request, count in scheduled:
            request.computed += count
        self.add(name, found)

    def add(self, name, found):
        self.rows.append((name, found))
        self.far |= not found["imbrex"] < 1e-5

    def print(self):
        names = ["imbrex", "torch_native", "triton"]
        print("| layer | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
        for name, found in self.rows:
            print(f"| {name} | " + " | ".join(f"{found[x]:.1e}" if x in found else "" for x in names) + " |")


def parts(scheduled, q):
    at = 0
    for request, count in scheduled:
        yield (request, count), q[at : at + count]
        at += count


def causal(window=None, chunk=None):
    def seen(request, count):
        query, key = torch.arange(request.computed, request.computed + count)[:, None], torch.arange(request.computed + count)
        see = key <= query
        if window is not None:
            see &= key >= query - window
        if chunk is not None:
            see &= key // chunk == query // chunk
        return see

    return seen


def backends_of(model, *names):
    return {name: ATTENTION_BACKENDS[name](model) for name in names}


def drafts(table, server_args):
    """Trees that SGLang's kernel makes of a drafter's choices, in layers with and without a window."""
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode, sgl_build_tree_kernel_triton
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

    topk, steps, width = 3, 3, 8
    for window in (None, 20, 2):
        model = Model(server_args, speculative=True, v_head_dim=DIM)
        backends = backends_of(model, "imbrex", *([] if window else ["triton"]))
        layer = layer_of(sliding_window_size=window or -1)
        requests = [model.request(index, 100) for index in range(3)]
        for request, count in zip(requests, (37, 5, 60)):
            table.step("", model, {"imbrex": backends["imbrex"]}, layer, [(request, count)], ForwardMode.EXTEND, causal(window))
        table.rows = [row for row in table.rows if row[0]]
        # A drafter's tokens: topk behind the root, then topk behind each of the topk that are expanded in a step; some of them are drafts.
        expanded = torch.stack([torch.cat([torch.tensor([-1]), torch.randperm(topk), topk + torch.randperm(topk**2)[:topk]]) for _ in requests])
        chosen = torch.tensor([grown(list(row), topk, width - 1) for row in expanded])
        lens = torch.tensor([r.computed for r in requests])
        mode = TreeMaskMode.FULL_MASK
        mask = torch.ones(int((lens + width).sum()) * width, dtype=torch.bool)
        positions, links = torch.empty(3 * width, dtype=torch.long), torch.full((3, 3, width), -1)
        sgl_build_tree_kernel_triton(expanded, chosen, lens, mask, positions, *links, topk, steps, width, mode)
        info = EagleVerifyInput(None, mask, positions, *links, None, steps, topk, width, None, int(lens.sum()), lens)
        masks = dict(zip((r.row for r in requests), mask.split(((lens + width) * width).tolist())))
        places = dict(zip((r.row for r in requests), positions.view(3, width)))

        def seen(request, count):
            see = masks[request.row].view(count, -1)
            if window is None:
                return see
            place = torch.cat([torch.arange(request.computed), places[request.row]])
            return see & (place >= place[request.computed :, None] - window)

        name = "trees of drafts" + ("" if window is None else f", a window of {window + 1} keys")
        table.step(name, model, backends, layer, [(r, width) for r in requests], ForwardMode.TARGET_VERIFY, seen, spec_info=info)
        assert any(kept.plan.spec.tree for kept in backends["imbrex"]._eager.kept())


def encoders(table, server_args):
    """Layers of embedding models and of prompts that are seen in both directions: whole prompts, then a token."""
    for kind, windows in (("ENCODER_ONLY", (None, 9)), ("DECODER_BIDIRECTIONAL", (None,))):  # with a window the backends differ, see docs/sglang.md
        for window in windows:
            model = Model(server_args, v_head_dim=DIM, sliding_window_size=window)
            model.sliding_window_size = window
            peers = [name for name, there in (("torch_native", kind == "ENCODER_ONLY" and window is None), ("triton", True)) if there]
            backends = backends_of(model, "imbrex", *peers)
            layer = layer_of(attn_type=AttentionType[kind], sliding_window_size=window or -1)
            scheduled = [(model.request(index, 140), count) for index, count in enumerate((37, 1, 130))]

            def seen(request, count):
                place = torch.arange(count)
                return torch.ones(count, count, dtype=torch.bool) if window is None else (place - place[:, None]).abs() <= window

            name = kind.lower().replace("_", " ") + ("" if window is None else f", {window} keys on both sides")
            table.step(name, model, backends, layer, scheduled, ForwardMode.EXTEND, seen)


def encoder_decoders(table, server_args):
    """The encoder's tokens are in front of the request's own in its row: a layer of cross attention, then one of the decoder's own tokens."""
    model = Model(server_args, is_encoder_decoder=True)
    backends = backends_of(model, "imbrex", "torch_native")
    cross, own = layer_of(is_cross_attention=True), layer_of()
    lens = (40, 3, 90)
    requests, encoders = [], []
    for index, encoder_len in enumerate(lens):
        request = model.request(index, encoder_len + 140)  # k and v of the encoder are in front, too
        encoders.append(SimpleNamespace(slots=request.slots[:encoder_len], k=request.k[:encoder_len], v=request.v[:encoder_len]))
        requests.append(
            SimpleNamespace(row=index, slots=request.slots[encoder_len:], k=request.k[encoder_len:], v=request.v[encoder_len:], computed=0)
        )
    for step, counts in (("prompts", (37, 5, 60)), ("prompts' second part", (20, 40, 30)), ("decode", (1, 1, 1))):
        mode, scheduled, first = ForwardMode.DECODE if step == "decode" else ForwardMode.EXTEND, list(zip(requests, counts)), step == "prompts"
        encoder = dict(encoder_lens=torch.tensor(lens), encoder_lens_cpu=list(lens), encoder_out_cache_loc=torch.cat([e.slots for e in encoders]))
        k, v = (torch.cat([getattr(e, side) for e in encoders]) if first else None for side in "kv")
        q = torch.randn(sum(counts), HEADS, DIM)
        rows = [part for _, part in parts(scheduled, q)]
        expected = torch.cat([exact(x, e.k, e.v, torch.ones(len(x), len(e.k), dtype=torch.bool)) for x, e in zip(rows, encoders)])
        found = {}
        for name, backend in backends.items():
            batch = batch_of(model, mode, scheduled, **encoder)
            backend.init_forward_metadata(batch)
            given = (None if x is None else x.clone() for x in (k, v))
            out = backend.forward(q.view(len(q), -1).clone(), *given, cross, batch)
            found[name] = (out.view(-1, HEADS, DIM).double() - expected).abs().max().item()
        table.add(f"cross attention: {step}", found)
        table.step(f"behind an encoder's tokens: {step}", model, backends, own, scheduled, mode, causal(), **encoder)


def temperatures(table, server_args):
    """Grok's temperature by length behind a soft cap: prompts in two parts, then a token."""
    length = 25
    for cap in (0.0, 4.0):
        model = Model(server_args, v_head_dim=DIM)
        backends, layer = backends_of(model, "imbrex", "triton"), layer_of(logit_cap=cap, xai_temperature_len=length)
        requests = [model.request(index, 140) for index in range(3)]
        name = "temperature by length (xai)" + (", soft cap" if cap else "")
        for step, counts in (("prompts", (37, 5, 60)), ("prompts' second part", (20, 40, 30)), ("decode", (1, 1, 1))):
            places = torch.cat([torch.arange(r.computed, r.computed + n) for r, n in zip(requests, counts)]).split(counts)
            factors = iter([torch.where(p > length, p.clamp(min=1).log2() / torch.tensor(float(length)).log2(), 1.0).double() for p in places])

            def score(logits):
                return (cap * (logits / cap).tanh() if cap else logits) * next(factors)[:, None]

            mode = ForwardMode.DECODE if step == "decode" else ForwardMode.EXTEND
            table.step(f"{name}: {step}", model, backends, layer, list(zip(requests, counts)), mode, causal(), score)


def local(table, server_args):
    """Llama 4's chunks. No backend of SGLang that runs here has them: FlashAttention's virtual batches, by SGLang's own function."""
    import numpy as np
    from sglang.srt.layers.attention.local_attention import make_local_attention_virtual_batches

    chunk = 32
    model = Model(server_args)
    model.attention_chunk_size = chunk
    backends, layer = backends_of(model, "imbrex"), layer_of(use_irope=True)
    requests = [model.request(index, 140) for index in range(3)]
    for step, counts in (("prompts", (37, 5, 60)), ("prompts' second part", (20, 40, 30)), ("decode", (1, 1, 1))):
        starts, lens = np.cumsum([0, *counts]).astype(np.int32), np.array([r.computed + n for r, n in zip(requests, counts)], np.int32)
        table_of_slots = model.req_to_token_pool.req_to_token[:3]
        q_lens, _, k_lens, slots = make_local_attention_virtual_batches(chunk, starts, lens, table_of_slots, 1, preserve_attn_chunk_size=True)
        visible = []  # of each token, in the order of the step: the slots that SGLang's kernel is given for it
        for count, keys, row in zip(q_lens, k_lens, slots):
            visible += [set(row[: keys - count + 1 + i].tolist()) for i in range(count)]
        visible = iter(visible)

        def seen(request, count):
            own = request.slots[: request.computed + count].tolist()
            rows = [next(visible) for _ in range(count)]
            return torch.tensor([[slot in row for slot in own] for row in rows])

        mode = ForwardMode.DECODE if step == "decode" else ForwardMode.EXTEND
        table.step(f"local attention (iRoPE): {step}", model, backends, layer, list(zip(requests, counts)), mode, seen)


def grown(expanded, topk, count):
    """`count` random tokens of a drafter, each behind the root or behind another of them."""
    chosen = set()
    while len(chosen) < count:
        ready = [x for x in range(topk * len(expanded)) if x not in chosen and (x < topk or int(expanded[x // topk]) in chosen)]
        chosen.add(ready[int(torch.randint(len(ready), (1,)))])
    return sorted(chosen)


def main(folder):
    imbrex.sglang.register()
    torch.manual_seed(5)
    server_args = ServerArgs(
        model_path=folder,
        device="cpu",
        attention_backend="torch_native",
        max_total_tokens=SLOTS,
        max_running_requests=8,
        context_length=CONTEXT,
        disable_overlap_schedule=True,
        chunked_prefill_size=-1,
    )
    publish(server_args, role="scheduler", ranks=SpawnRanks(**{name: None if name == "dp_rank" else 0 for name in SpawnRanks.__struct_fields__}))
    table = Table()
    for cases in (drafts, encoders, encoder_decoders, local, temperatures):
        cases(table, server_args)
    table.print()
    return int(table.far)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
