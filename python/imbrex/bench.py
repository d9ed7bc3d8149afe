"""python -m imbrex.bench: imbrex beside whatever of PyTorch's attention, flash-attn and FlashInfer is installed, in one process on the same data.

Everybody's output is compared with float64 on random rows before it is timed; then all take turns, round by round. On a GPU steps of up to 16
queries a request are timed inside a CUDA graph, over caches that L2 does not hold; others back to back, as long as the clock needs to settle.
"""
import argparse
import json
import re
import statistics
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

try:
    import torch
except ImportError:
    sys.exit("imbrex.bench: expected PyTorch, which is not installed; `imbrex bench` times imbrex alone")

import imbrex

Call = Callable[[], Any]
_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_TOLERANCE = {"bf16": 2e-2, "f16": 4e-3, "f32": 2e-3}
_SMALL = 16  # queries a request: what is timed inside a graph
_L2_BYTES = 600 << 20  # so much of caches that none is in L2 when it is its turn again


class NotHere(Exception):
    """Why somebody does not run a batch."""


def parse_batch(text: str) -> List[Tuple[int, int]]:
    """[(query_len, seq_len), ..] of "32q1s4k_2q512": items [count]q<queries>[k][s<keys>[k]] joined by ',' or '_'."""

    def number(digits: str, kilo: Optional[str]) -> int:
        return int(digits) * (1024 if kilo else 1)

    requests = []
    for item in re.split("[,_]", text):
        found = re.fullmatch(r"(\d*)q(\d+)(k?)(?:s(\d+)(k?))?", item)
        if not found:
            raise ValueError(f'expected [count]q<queries>[k][s<keys>[k]], got "{item}"')
        count, q, q_kilo, s, s_kilo = found.groups()
        q_len = number(q, q_kilo)
        seq_len = number(s, s_kilo) if s else q_len
        if not 1 <= q_len <= seq_len or not int(count or 1):
            raise ValueError(f'expected 1 or more requests and 1 <= queries <= keys, got "{item}"')
        requests += [(q_len, seq_len)] * int(count or 1)
    return requests


def starts_of(lens: List[int], device: Any) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device=device)


class Problem:
    """A batch with random data: several caches whose pages lie in one random order, NaN in front of what nobody may read."""

    def __init__(self, requests: List[Tuple[int, int]], args: argparse.Namespace):
        generator = torch.Generator().manual_seed(args.seed)
        self.q_lens, self.seq_lens = [r[0] for r in requests], [r[1] for r in requests]
        self.num_reqs, self.device, self.page = len(requests), torch.device(args.device), args.block_size
        self.heads, self.kv_heads = args.heads
        self.dim, self.dtype = args.head_dim, _DTYPES[args.dtype]
        columns = [-(-n // self.page) for n in self.seq_lens]
        total = sum(columns)
        order = torch.randperm(total, generator=generator)
        self.table = torch.zeros(self.num_reqs, max(columns), dtype=torch.int32)
        pages = []
        for r, n in enumerate(columns):
            ids = order[sum(columns[:r]) : sum(columns[:r]) + n]
            self.table[r, :n] = ids
            pages.append(ids)
        self.pages = pages
        self.table = self.table.to(self.device)
        one = total * self.page * self.kv_heads * self.dim * self.dtype.itemsize * 2
        small = max(self.q_lens) <= _SMALL
        self.copies = min(64, -(-_L2_BYTES // one)) if small and self.device.type == "cuda" else 1
        self.caches = []
        torch.manual_seed(args.seed)
        for _ in range(self.copies):
            k, v = (torch.randn(total, self.page, self.kv_heads, self.dim, device=self.device).to(self.dtype) for _ in range(2))
            for ids, n in zip(pages, self.seq_lens):
                if n % self.page:
                    k[ids[-1], n % self.page :] = float("nan")
                    v[ids[-1], n % self.page :] = float("nan")
            self.caches.append((k, v))
        self.q = torch.randn(sum(self.q_lens), self.heads, self.dim, device=self.device).to(self.dtype)
        self.small = small

    def dense(self, copy: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of equal requests [requests, kv heads, keys, dim], out of the pages."""
        both = []
        for cache in self.caches[copy]:
            rows = [cache[ids.to(self.device)].flatten(0, 1)[:n] for ids, n in zip(self.pages, self.seq_lens)]
            both.append(torch.stack(rows).transpose(1, 2).contiguous())
        return both[0], both[1]

    def work(self) -> Tuple[float, float]:
        """FLOPs of what is visible, and bytes of keys and values."""
        pairs = sum(q * s - q * (q - 1) // 2 for q, s in zip(self.q_lens, self.seq_lens))
        size = sum(self.seq_lens) * self.kv_heads * self.dim * 2 * self.dtype.itemsize
        return 4.0 * pairs * self.heads * self.dim, float(size)

    def check(self, out: torch.Tensor) -> float:
        """The largest error over random rows against float64."""
        worst, start = 0.0, 0
        generator = torch.Generator().manual_seed(1)
        for r in sorted(set(torch.randint(self.num_reqs, (4,), generator=generator).tolist())):
            start = sum(self.q_lens[:r])
            for i in {0, self.q_lens[r] - 1, int(torch.randint(self.q_lens[r], (1,), generator=generator))}:
                seen = self.seq_lens[r] - self.q_lens[r] + i + 1
                k, v = (c[self.pages[r].to(self.device)].flatten(0, 1)[:seen].double() for c in self.caches[0])
                group = self.heads // self.kv_heads
                logits = torch.einsum("hd,shd->hs", self.q[start + i].double(), k.repeat_interleave(group, 1)) * self.dim**-0.5
                expected = torch.einsum("hs,shd->hd", logits.softmax(-1), v.repeat_interleave(group, 1))
                error = (out[start + i].double() - expected).abs().max().item()
                worst = max(worst, float("inf") if error != error else error)
        return worst


class Contender(NamedTuple):
    calls: List[Call]  # one for each cache
    rows: Callable[[Any], torch.Tensor]  # of what a call returns: [num_tokens, heads, dim]


def _as_rows(out: Any) -> torch.Tensor:
    return out[0] if isinstance(out, tuple) else out


def imbrex_calls(p: Problem) -> Contender:
    spec = imbrex.AttentionSpec(p.heads, p.kv_heads, p.dim, q_dtype={v: k for k, v in _DTYPES.items()}[p.dtype], block_size=p.page)
    plan = imbrex.Plan(
        spec,
        str(p.device) if p.device.type == "cpu" else f"cuda:{p.device.index or 0}",
        max_num_reqs=p.num_reqs,
        max_num_tokens=sum(p.q_lens),
        max_seq_len=max(p.seq_lens),
        max_query_len=1 if max(p.q_lens) == 1 else 0,
    )
    plan.update(starts_of(p.q_lens, "cpu"), torch.tensor(p.seq_lens, dtype=torch.int32), block_table=p.table)
    out = torch.empty_like(p.q)
    return Contender([lambda c=c: plan.run(p.q, c, out) for c in p.caches], _as_rows)


def sdpa_calls(p: Problem, backend: Any) -> Contender:
    """PyTorch's attention over keys without pages: it has none."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if len(set(zip(p.q_lens, p.seq_lens))) > 1:
        raise NotHere("requests of different lengths")
    q_len, seq_len = p.q_lens[0], p.seq_lens[0]
    if q_len not in (1, seq_len):
        raise NotHere("causal is aligned at the top left there")
    if backend == SDPBackend.EFFICIENT_ATTENTION and p.heads != p.kv_heads:
        raise NotHere("no grouped queries there")
    q = p.q.view(p.num_reqs, q_len, p.heads, p.dim).transpose(1, 2)
    keys = [p.dense(i) for i in range(p.copies)]

    def call(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q_len > 1, enable_gqa=p.heads != p.kv_heads)

    return Contender([lambda k=k, v=v: call(k, v) for k, v in keys], lambda out: out.transpose(1, 2).reshape(-1, p.heads, p.dim))


def flash_attn_calls(p: Problem) -> Contender:
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # its own, not imbrex's

    if p.page % 256:
        raise NotHere("pages there have a multiple of 256 tokens")
    if len(set(p.q_lens)) == 1 and p.small:
        q = p.q.view(p.num_reqs, p.q_lens[0], p.heads, p.dim)
        lens = torch.tensor(p.seq_lens, dtype=torch.int32, device=p.device)
        options = dict(cache_seqlens=lens, block_table=p.table, causal=True)
        return Contender([lambda c=c: flash_attn_with_kvcache(q, *c, **options) for c in p.caches], lambda out: out.reshape(-1, p.heads, p.dim))
    lengths = (starts_of(p.q_lens, p.device), starts_of(p.seq_lens, p.device), max(p.q_lens), max(p.seq_lens))
    return Contender([lambda c=c: flash_attn_varlen_func(p.q, *c, *lengths, causal=True, block_table=p.table) for c in p.caches], _as_rows)


def flash_attn_3_calls(p: Problem) -> Contender:
    from flash_attn_interface import flash_attn_with_kvcache

    lens = torch.tensor(p.seq_lens, dtype=torch.int32, device=p.device)
    options = dict(cache_seqlens=lens, page_table=p.table, cu_seqlens_q=starts_of(p.q_lens, p.device), max_seqlen_q=max(p.q_lens), causal=True)
    return Contender([lambda c=c: flash_attn_with_kvcache(p.q, *c, **options) for c in p.caches], _as_rows)


def flashinfer_calls(p: Problem) -> Contender:
    import flashinfer

    columns = [len(ids) for ids in p.pages]
    pages = (starts_of(columns, p.device), torch.cat(p.pages).to(device=p.device, dtype=torch.int32))
    last = torch.tensor([(n - 1) % p.page + 1 for n in p.seq_lens], dtype=torch.int32, device=p.device)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=p.device)
    shape = (p.heads, p.kv_heads, p.dim, p.page)
    if max(p.q_lens) == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*pages, last, *shape, q_data_type=p.dtype, kv_data_type=p.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(starts_of(p.q_lens, p.device), *pages, last, *shape, causal=True, q_data_type=p.dtype, kv_data_type=p.dtype)
    return Contender([lambda c=c: wrapper.run(p.q, c) for c in p.caches], _as_rows)


def contenders(device: torch.device) -> Dict[str, Callable[[Problem], Contender]]:
    from torch.nn.attention import SDPBackend

    named = {"imbrex": imbrex_calls}
    sdpa = {"flash": SDPBackend.FLASH_ATTENTION}
    if device.type == "cuda":
        sdpa = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
        named.update({"flash-attn-3": flash_attn_3_calls, "flash-attn": flash_attn_calls, "flashinfer": flashinfer_calls})
    for name, backend in sdpa.items():
        named["sdpa-" + name] = lambda p, backend=backend: sdpa_calls(p, backend)
    return named


def timer_of(calls: List[Call], p: Problem, seconds: float) -> Callable[[], List[float]]:
    """A function that measures once more: microseconds of a call, several of them."""
    if p.device.type == "cpu":

        def host() -> List[float]:
            times, began = [], time.perf_counter()
            while time.perf_counter() - began < seconds or len(times) < 3:
                t = time.perf_counter()
                calls[len(times) % len(calls)]()
                times.append((time.perf_counter() - t) * 1e6)
            return times

        return host

    def event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def between(run: Call, count: int) -> float:
        begin, end = event(), event()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / count

    estimate = between(calls[0], 1)
    if p.small:
        count = len(calls) * max(1, round(min(50.0, max(1.0, 20e3 / estimate)) / len(calls)))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for i in range(count):
                calls[i % len(calls)]()
        graph.replay()
        torch.cuda.synchronize()
        replays = max(3, min(20, int(seconds * 1e6 / (estimate * count))))
        # A graph keeps nothing of what its calls read and write.
        return lambda calls=calls: [between(graph.replay, count) for _ in range(replays)]

    count = max(5, min(200, int(seconds * 1e6 / estimate)))

    def back_to_back() -> List[float]:
        for i in range(max(2, count // 5)):
            calls[i % len(calls)]()
        events = [(event(), event()) for _ in range(count)]
        for i, (begin, end) in enumerate(events):
            begin.record()
            calls[i % len(calls)]()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in events]

    return back_to_back


def measure(text: str, args: argparse.Namespace) -> List[Dict[str, Any]]:
    """A row for everybody: times, or why not."""
    p = Problem(parse_batch(text), args)
    flops, size = p.work()
    rows, timers = [], {}
    for name, make in contenders(p.device).items():
        if name != "imbrex" and args.peers and name not in args.peers:
            continue
        row: Dict[str, Any] = {"batch": text, "name": name}
        rows.append(row)
        try:
            contender = make(p)
            row["error"] = p.check(contender.rows(contender.calls[0]()))
            if not row["error"] <= _TOLERANCE[args.dtype]:
                row["why"] = f"wrong: off by {row['error']:.2g}"
                continue
            timers[name] = timer_of(contender.calls, p, args.seconds)
        except ImportError:
            row["why"] = "not installed"
        except NotHere as reason:
            row["why"] = str(reason)
        except Exception as error:  # a peer's own refusal is a result
            if name == "imbrex":
                raise
            row["why"] = str(error).strip().splitlines()[0][:100] if str(error).strip() else type(error).__name__
    times: Dict[str, List[float]] = {name: [] for name in timers}
    for _ in range(args.rounds):
        for name, timer in timers.items():
            times[name] += timer()
    for row in rows:
        if row["name"] in times:
            us = statistics.median(times[row["name"]])
            row.update(us=us, best_us=min(times[row["name"]]), tflops=flops / us * 1e-6, tbs=size / us * 1e-6)
    own = next(row for row in rows if row["name"] == "imbrex")
    for row in rows:
        if "us" in row and "us" in own:
            row["ratio"] = row["us"] / own["us"]
    return rows


def arguments(argv: Optional[List[str]] = None) -> argparse.Namespace:
    """The command line; `batch` is never empty. Exits with 2 where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m imbrex.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batch", nargs="*", default=[], help="vLLM's notation, as of `imbrex bench`: q2k 32q1s4k 2q512s4k,16q1s2k (causal)")
    parser.add_argument("--heads", default="32/8", help="query heads / KV heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=list(_DTYPES), default="bf16")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a page")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=[], help="only these, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="in which everybody has a turn")
    parser.add_argument("--seconds", type=float, default=0.12, help="of a turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    args = parser.parse_args(argv)
    try:
        args.heads = [int(n) for n in args.heads.split("/")]
        if len(args.heads) != 2 or args.block_size < 1 or args.rounds < 1:
            raise ValueError("expected --heads Q/KV, and --block-size and --rounds of 1 or more")
        imbrex.AttentionSpec(*args.heads, args.head_dim, block_size=args.block_size)
        args.batch = args.batch or (["q2k", "4q512s4k", "32q1s4k"] if args.device != "cpu" else ["q512", "8q1s1k"])
        for text in args.batch:
            parse_batch(text)
    except (ValueError, imbrex.Error) as error:
        parser.error(str(error))
    return args


def main(argv: Optional[List[str]] = None) -> int:
    args = arguments(argv)
    if torch.device(args.device).type == "cuda":
        print(f"{torch.cuda.get_device_name(args.device)}; PyTorch {torch.__version__}", file=sys.stderr)
    every, wrong = [], False
    print(f"{'batch':<22} {'':<15} {'median us':>10} {'best us':>10} {'TFLOP/s':>8} {'TB/s':>6} {'time/imbrex':>12} {'error':>8}")
    with torch.no_grad():
        for text in args.batch:
            rows = measure(text, args)
            every += rows
            for row in rows:
                head = f"{text:<22} {row['name']:<15}"
                if "us" in row:
                    figures = (row["us"], row["best_us"], row["tflops"], row["tbs"], row.get("ratio", float("nan")), row["error"])
                    print(head, "{:>10.1f} {:>10.1f} {:>8.1f} {:>6.2f} {:>12.3f} {:>8.1e}".format(*figures))
                else:
                    print(head, row["why"])
                wrong = wrong or (row["name"] == "imbrex" and "us" not in row)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "device": args.device, "arguments": vars(args), "rows": every}, file, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
