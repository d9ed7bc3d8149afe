"""Right calls of the surfaces that take arrays of any framework, for fuzz_surfaces.py: with NumPy's."""

import math
from typing import Any, Callable, Dict, NamedTuple

import numpy as np

import imbrex

BLOCK = 16


class Surface(NamedTuple):
    """Arguments by name, and what is done with them: a list of all arrays that come of it."""

    arguments: Dict[str, Any]
    call: Callable


class Step(NamedTuple):
    """Lengths of a step and where its keys lie."""

    query_start_loc: Any
    kv_start_loc: Any
    seq_lens: Any
    block_table: Any
    kv_indptr: Any
    kv_indices: Any
    kv_last_page_len: Any
    slot_mapping: Any
    num_blocks: int


def step_of(rng, longest=40, newest=6):
    """Of requests whose pages are in no order; queries are the last keys of each."""
    queries = [rng.randint(1, newest) for _ in range(rng.randint(1, 3))]
    lens = [n + rng.randint(0, longest) for n in queries]
    counts = [-(-n // BLOCK) for n in lens]
    num_blocks = sum(counts) + rng.randint(0, 2)
    blocks = rng.sample(range(num_blocks), num_blocks)
    starts = lambda numbers: np.cumsum([0, *numbers], dtype=np.int32)
    indptr = starts(counts)
    pages = [blocks[indptr[r] : indptr[r + 1]] for r in range(len(lens))]
    table = np.full((len(lens), max(counts) + rng.randint(0, 1)), 2**31 - 1, np.int32)
    for row, of_request in zip(table, pages):
        row[: len(of_request)] = of_request
    slots = [of[j // BLOCK] * BLOCK + j % BLOCK for of, n, q in zip(pages, lens, queries) for j in range(n - q, n)]
    return Step(
        starts(queries),
        starts(lens),
        np.array(lens, np.int32),
        table,
        indptr,
        np.array([b for of in pages for b in of], np.int32),
        np.array([(n - 1) % BLOCK + 1 for n in lens], np.int32),
        np.array(slots, np.int64),
        num_blocks,
    )


def floats(rng, *shape, dtype=np.float32):
    return np.random.default_rng(rng.randrange(1 << 30)).standard_normal(shape, np.float32).astype(dtype)


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    dtype: Any


def shape_of(rng):
    kv_heads = rng.randint(1, 2)
    return Shape(kv_heads * rng.randint(1, 3), kv_heads, rng.choice((16, 32, 64)), rng.choice((np.float32, np.float16)))


def score_of(rng, heads):
    """What many functions take beside the arrays."""
    score = dict(causal=rng.random() < 0.5, window=(rng.choice((-1, 5)), -1), scale=rng.choice((None, 0.25)), soft_cap=rng.choice((0.0, 20.0)))
    score["sinks"] = floats(rng, heads) if rng.random() < 0.2 else None
    score["alibi_slopes"] = floats(rng, heads) if rng.random() < 0.2 else None
    return score


def _arrays(result):
    return [np.asarray(a) for a in (result if isinstance(result, tuple) else (result,))]


def varlen(rng):
    step, s = step_of(rng), shape_of(rng)
    tokens, keys = int(step.query_start_loc[-1]), int(step.kv_start_loc[-1])
    arguments = dict(
        q=floats(rng, tokens, s.heads, s.dim, dtype=s.dtype),
        k=floats(rng, keys, s.kv_heads, s.dim, dtype=s.dtype),
        v=floats(rng, keys, s.kv_heads, s.dim, dtype=s.dtype),
        query_start_loc=step.query_start_loc,
        kv_start_loc=step.kv_start_loc,
        return_lse=rng.random() < 0.5,
        **score_of(rng, s.heads),
    )
    if rng.random() < 0.3:
        arguments["out"] = np.zeros((tokens, s.heads, s.dim), s.dtype)
    return Surface(arguments, lambda a: _arrays(imbrex.attention_varlen(**a)))


def paged(rng):
    step, s = step_of(rng), shape_of(rng)
    arguments = dict(
        q=floats(rng, int(step.query_start_loc[-1]), s.heads, s.dim, dtype=s.dtype),
        k_cache=floats(rng, step.num_blocks, BLOCK, s.kv_heads, s.dim, dtype=s.dtype),
        v_cache=floats(rng, step.num_blocks, BLOCK, s.kv_heads, s.dim, dtype=s.dtype),
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        return_lse=rng.random() < 0.5,
        **score_of(rng, s.heads),
    )
    arguments.update(_pages(step, rng))
    return Surface(arguments, lambda a: _arrays(imbrex.attention_paged(**a)))


def _pages(step, rng):
    if rng.random() < 0.5:
        return dict(block_table=step.block_table)
    return dict(kv_indptr=step.kv_indptr, kv_indices=step.kv_indices, kv_last_page_len=step.kv_last_page_len)


def merge(rng):
    tokens, heads, dim, parts = rng.randint(0, 4), rng.randint(1, 3), rng.randint(1, 140), rng.randint(1, 3)
    arguments = dict(
        outs=[floats(rng, tokens, heads, dim) for _ in range(parts)], lses=[floats(rng, tokens, heads) for _ in range(parts)], num_threads=1
    )
    if rng.random() < 0.3:
        arguments.update(out=np.zeros((tokens, heads, dim), np.float32), lse=np.zeros((tokens, heads), np.float32))
    return Surface(arguments, lambda a: _arrays(imbrex.merge_states(**a)))


_PLAN = ("backend", "max_num_reqs", "max_num_tokens", "max_seq_len", "max_query_len", "min_query_len", "num_threads", "balanced", "load_on_demand")
_SPEC = (
    "kind",
    "num_q_heads",
    "num_kv_heads",
    "head_dim_qk",
    "head_dim_v",
    "q_dtype",
    "kv_dtype",
    "block_size",
    "causal",
    "window_left",
    "chunk",
    "soft_cap",
)
_WRITE = ("k", "v")
_CACHE = ("k_cache", "v_cache")
_RUN = ("q", "out", "lse")


def _spec_arguments(rng, s, block_size):
    type_ = "f32" if s.dtype is np.float32 else "f16"
    return dict(
        kind="decoder",
        num_q_heads=s.heads,
        num_kv_heads=s.kv_heads,
        head_dim_qk=s.dim,
        head_dim_v=s.dim,
        q_dtype=type_,
        kv_dtype=type_,
        block_size=block_size,
        causal=True,
        window_left=rng.choice((-1, 5)),
        chunk=0,
        soft_cap=0.0,
    )


def plan(rng):
    """A plan of its own, a step of it, new keys and values, and a run. The plan of the right call takes the wrong ones too."""
    step, s = step_of(rng), shape_of(rng)
    ragged = rng.random() < 0.3
    tokens, keys = int(step.query_start_loc[-1]), int(step.kv_start_loc[-1])
    cache = (keys,) if ragged else (step.num_blocks, BLOCK)
    arguments = dict(
        **_spec_arguments(rng, s, 0 if ragged else BLOCK),
        backend=rng.choice(("", "cpu_generic", "reference")),
        max_num_reqs=8,
        max_num_tokens=64,
        max_seq_len=200,
        max_query_len=0,
        min_query_len=0,
        num_threads=rng.choice((1, 2)),
        balanced=False,
        load_on_demand=False,
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        k_cache=floats(rng, *cache, s.kv_heads, s.dim, dtype=s.dtype),
        v_cache=floats(rng, *cache, s.kv_heads, s.dim, dtype=s.dtype),
        q=floats(rng, tokens, s.heads, s.dim, dtype=s.dtype),
        out=np.zeros((tokens, s.heads, s.dim), s.dtype),
        lse=np.zeros((tokens, s.heads), np.float32),
    )
    if ragged:
        arguments.update(kv_start_loc=step.kv_start_loc)
    else:
        arguments.update(_pages(step, rng), slot_mapping=step.slot_mapping)
        arguments.update({name: floats(rng, tokens, s.kv_heads, s.dim, dtype=s.dtype) for name in _WRITE})
    made = {}

    def call(a):
        key = repr([a.get(name) for name in (*_SPEC, *_PLAN)])
        if key not in made:
            spec = imbrex.AttentionSpec(**{name: a[name] for name in _SPEC})
            made[key] = imbrex.Plan(spec, **{name: a[name] for name in _PLAN})
        p = made[key]
        of_batch = set(a) - {*_SPEC, *_PLAN, *_WRITE, *_CACHE, *_RUN}
        p.update(**{name: a[name] for name in of_batch})
        caches = [np.copy(a[name]) if isinstance(a[name], np.ndarray) and a[name].flags.writeable else a[name] for name in _CACHE]
        before = [np.copy(c) for c in caches if isinstance(c, np.ndarray) and not c.flags.writeable]
        if "k" in a:
            p.write_kv(tuple(caches), a["k"], a["v"])
        out = p.run(a["q"], tuple(caches), a["out"], lse=a["lse"])
        assert all(b.tobytes() == c.tobytes() for b, c in zip(before, (c for c in caches if not c.flags.writeable))), "a read-only cache was written"
        return [np.copy(x) for x in (out, a["lse"], *caches) if x is not None]

    return Surface(arguments, call)


_MLA_SPEC = (
    "num_heads",
    "kv_lora_rank",
    "qk_nope_dim",
    "qk_rope_dim",
    "v_dim",
    "dtype",
    "kv_dtype",
    "kv_format",
    "block_size",
    "window_left",
    "scale",
)
_MLA_PLAN = ("backend", "max_num_reqs", "max_num_tokens", "max_seq_len", "num_threads")
_MLA_CALL = ("latent", "rope", "q", "kv_b", "k_cache", "k_rope", "out", "lse")


def mla_plan(rng):
    """As plan(), of latent attention, over one tensor or two."""
    step, heads, rank, nope, rope, value = step_of(rng), rng.randint(1, 3), 32, 16, 8, 16
    apart, tokens = rng.random() < 0.5, int(step.query_start_loc[-1])
    arguments = dict(
        num_heads=heads,
        kv_lora_rank=rank,
        qk_nope_dim=nope,
        qk_rope_dim=rope,
        v_dim=value,
        dtype="f32",
        kv_dtype="f32",
        kv_format="latent_rope" if apart else "latent",
        block_size=BLOCK,
        window_left=rng.choice((-1, 5)),
        scale=0.0,
        backend=rng.choice(("", "cpu_generic", "reference")),
        max_num_reqs=8,
        max_num_tokens=64,
        max_seq_len=200,
        num_threads=rng.choice((1, 2)),
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        block_table=step.block_table,
        slot_mapping=step.slot_mapping,
        latent=floats(rng, tokens, rank),
        rope=floats(rng, tokens, rope),
        q=floats(rng, tokens, heads, nope + rope),
        kv_b=floats(rng, heads, nope + value, rank),
        k_cache=floats(rng, step.num_blocks, BLOCK, 1, rank + (0 if apart else rope)),
        k_rope=floats(rng, step.num_blocks, BLOCK, 1, rope) if apart else None,
        out=np.zeros((tokens, heads, value), np.float32),
        lse=np.zeros((tokens, heads), np.float32),
    )
    made = {}

    def call(a):
        key = repr([a.get(name) for name in (*_MLA_SPEC, *_MLA_PLAN)])
        if key not in made:
            made[key] = imbrex.MlaPlan(imbrex.MlaSpec(**{name: a[name] for name in _MLA_SPEC}), **{name: a[name] for name in _MLA_PLAN})
        p = made[key]
        p.update(**{name: a[name] for name in set(a) - {*_MLA_SPEC, *_MLA_PLAN, *_MLA_CALL}})
        k, k_rope = (np.copy(x) if isinstance(x, np.ndarray) and x.flags.writeable else x for x in (a["k_cache"], a["k_rope"]))
        layer = imbrex.KvLayer(k, k_rope=k_rope)
        p.write_kv(layer, a["latent"], a["rope"])
        out = p.run(a["q"], a["kv_b"], layer, a["out"], lse=a["lse"])
        return [np.copy(x) for x in (out, a["lse"], k, k_rope) if x is not None]

    return Surface(arguments, call)


def cache(rng):
    s = shape_of(rng)
    arguments = dict(_spec_arguments(rng, s, BLOCK), num_layers=2, num_blocks=3, order="lbhtd", index=1)

    def call(a):
        spec = imbrex.AttentionSpec(**{name: a[name] for name in _SPEC})
        layers = a["num_layers"]
        memory = imbrex.KvCache(spec, layers, a["num_blocks"], a["order"])
        if math.prod((memory.nbytes, 1)) > 1 << 28:
            raise MemoryError("more than a test touches")
        return [np.from_dlpack(x) for x in memory.layer(a["index"]) if x is not None]

    return Surface(arguments, call)


SURFACES = [
    ("attention_varlen", varlen),
    ("attention_paged", paged),
    ("merge_states", merge),
    ("Plan", plan),
    ("Plan", plan),
    ("MlaPlan", mla_plan),
    ("KvCache", cache),
]
