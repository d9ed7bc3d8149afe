"""Right calls of the surfaces that take PyTorch's tensors, for fuzz_surfaces.py: imbrex.torch, imbrex.flash_attn, imbrex.flashinfer, and those of layers with a
state, which are in fuzz_torch_states.py.

Arguments are NumPy's arrays, so that mistakes are made and memory ends as there; a tensor shares the array that it is made of.
"""

import warnings

import numpy as np
import torch

import imbrex.flash_attn
import imbrex.flash_mla
import imbrex.flashinfer
import imbrex.torch

import fuzz_numpy
import fuzz_torch_states
from fuzz_numpy import BLOCK, Surface, floats, score_of, shape_of, step_of

warnings.filterwarnings("ignore", message=".*not writable.*")
warnings.filterwarnings("ignore", category=DeprecationWarning)


def _tensor(value):
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy() if any(s < 0 for s in value.strides) else value)
    return [_tensor(x) for x in value] if isinstance(value, list) and value and isinstance(value[0], np.ndarray) else value


def _arrays(result):
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [x.detach().flatten().contiguous().view(torch.uint8).numpy().copy() for x in results if torch.is_tensor(x)]


def _surface(function, arguments, written=()):
    """Of a function by keywords. What it writes in place is copied first, and is one of the results."""

    def call(a):
        given = {name: _tensor(value) for name, value in a.items()}
        for name in written:
            if torch.is_tensor(given[name]):
                given[name] = _tensor(np.array(a[name]))
        result = function(**given)
        return _arrays(result) + _arrays([given[name] for name in written])

    return Surface(arguments, call)


def _score(rng, heads):
    return {name: value for name, value in score_of(rng, heads).items() if value is not None}


def _cache(rng, step, s, names=("k_cache", "v_cache")):
    return {name: floats(rng, step.num_blocks, BLOCK, s.kv_heads, s.dim, dtype=s.dtype) for name in names}


def _ragged(rng, step, s):
    tokens, keys = int(step.query_start_loc[-1]), int(step.kv_start_loc[-1])
    kv = {name: floats(rng, keys, s.kv_heads, s.dim, dtype=s.dtype) for name in ("k", "v")}
    return dict(q=floats(rng, tokens, s.heads, s.dim, dtype=s.dtype), **kv)


def _longest(step):
    return int(np.diff(step.query_start_loc).max()), int(step.seq_lens.max())


def dense(rng):
    s, batch, queries, keys = shape_of(rng), rng.randint(1, 3), rng.randint(1, 6), rng.randint(6, 40)
    arguments = dict(
        q=floats(rng, batch, s.heads, queries, s.dim, dtype=s.dtype),
        k=floats(rng, batch, s.kv_heads, keys, s.dim, dtype=s.dtype),
        v=floats(rng, batch, s.kv_heads, keys, s.dim, dtype=s.dtype),
        **_score(rng, s.heads),
    )
    if rng.random() < 0.4:
        arguments["mask"] = floats(rng, rng.choice((1, batch)), 1, queries, keys) > 0
    return _surface(imbrex.torch.attention, arguments)


def varlen(rng):
    step, s = step_of(rng), shape_of(rng)
    longest = dict(zip(("max_query_len", "max_seq_len"), _longest(step)))
    starts = dict(query_start_loc=step.query_start_loc, kv_start_loc=step.kv_start_loc)
    return _surface(imbrex.torch.varlen_attention, dict(**_ragged(rng, step, s), **starts, **longest, **_score(rng, s.heads)))


def paged(rng):
    step, s = step_of(rng), shape_of(rng)
    arguments = dict(
        q=floats(rng, int(step.query_start_loc[-1]), s.heads, s.dim, dtype=s.dtype),
        **_cache(rng, step, s),
        query_start_loc=step.query_start_loc,
        seq_lens=step.seq_lens,
        block_table=step.block_table,
        **dict(zip(("max_query_len", "max_seq_len"), _longest(step))),
        **_score(rng, s.heads),
    )
    return _surface(imbrex.torch.paged_attention, arguments)


def write_kv(rng):
    step, s = step_of(rng), shape_of(rng)
    new = {name: floats(rng, len(step.slot_mapping), s.kv_heads, s.dim, dtype=s.dtype) for name in ("k", "v")}
    return _surface(imbrex.torch.write_kv, dict(**_cache(rng, step, s), **new, slot_mapping=step.slot_mapping), ("k_cache", "v_cache"))


def _flash_score(rng):
    return dict(causal=rng.random() < 0.5, window_size=(rng.choice((-1, 5)), -1), softcap=rng.choice((0.0, 20.0)), softmax_scale=0.25)


def flash(rng):
    s, batch, queries, keys = shape_of(rng), rng.randint(1, 3), rng.randint(1, 6), rng.randint(6, 40)
    arguments = dict(
        q=floats(rng, batch, queries, s.heads, s.dim, dtype=s.dtype),
        k=floats(rng, batch, keys, s.kv_heads, s.dim, dtype=s.dtype),
        v=floats(rng, batch, keys, s.kv_heads, s.dim, dtype=s.dtype),
        **_flash_score(rng),
    )
    return _surface(imbrex.flash_attn.flash_attn_func, arguments)


def flash_varlen(rng):
    step, s = step_of(rng), shape_of(rng)
    arguments = dict(
        _ragged(rng, step, s),
        cu_seqlens_q=step.query_start_loc,
        cu_seqlens_k=step.kv_start_loc,
        **dict(zip(("max_seqlen_q", "max_seqlen_k"), _longest(step))),
        **_flash_score(rng),
    )
    if rng.random() < 0.4:
        arguments.update(_cache(rng, step, s, ("k", "v")), block_table=step.block_table)
    return _surface(imbrex.flash_attn.flash_attn_varlen_func, arguments)


def flash_cache(rng):
    s, batch, room, queries = shape_of(rng), rng.randint(1, 3), rng.choice((16, 24, 64)), rng.randint(1, 3)
    arguments = dict(
        q=floats(rng, batch, queries, s.heads, s.dim, dtype=s.dtype),
        k_cache=floats(rng, batch + 1, room, s.kv_heads, s.dim, dtype=s.dtype),
        v_cache=floats(rng, batch + 1, room, s.kv_heads, s.dim, dtype=s.dtype),
        cache_seqlens=np.array([rng.randint(3, room - 3) for _ in range(batch)], np.int32),
        **_flash_score(rng),
    )
    if rng.random() < 0.5:
        arguments.update({name: floats(rng, batch, queries, s.kv_heads, s.dim, dtype=s.dtype) for name in ("k", "v")})
    if rng.random() < 0.4:
        arguments.update(cache_batch_idx=np.array(rng.sample(range(batch + 1), batch), np.int32))
    return _surface(imbrex.flash_attn.flash_attn_with_kvcache, arguments, ("k_cache", "v_cache"))


def _workspace():
    return torch.empty(1 << 20, dtype=torch.uint8)


def _wrapped(make, arguments, plan, run):
    """A wrapper's plan() and run(), whose arguments are named. The wrapper takes right and wrong calls alike."""
    wrapper = make()

    def call(a):
        given = {name: _tensor(value) for name, value in a.items()}
        wrapper.plan(**{name: given[name] for name in plan if name in given})
        return _arrays(wrapper.run(*(run(given) if callable(run) else [given[name] for name in run])))

    return Surface(arguments, call)


def _wrapper_arguments(s):
    type_ = "float32" if s.dtype is np.float32 else "float16"
    return dict(num_qo_heads=s.heads, num_kv_heads=s.kv_heads, window_left=-1, logits_soft_cap=0.0, q_data_type=type_, kv_data_type=type_)


def decode_wrapper(rng):
    step, s = step_of(rng, newest=1), shape_of(rng)
    arguments = dict(
        indptr=step.kv_indptr, indices=step.kv_indices, last_page_len=step.kv_last_page_len, head_dim=s.dim, page_size=BLOCK, **_wrapper_arguments(s)
    )
    plan = set(arguments)
    arguments.update(q=floats(rng, len(step.seq_lens), s.heads, s.dim, dtype=s.dtype), cache=list(_cache(rng, step, s).values()))
    return _wrapped(lambda: imbrex.flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(), "NHD"), arguments, plan, ("q", "cache"))


def prefill_wrapper(rng):
    step, s = step_of(rng), shape_of(rng)
    arguments = dict(
        qo_indptr=step.query_start_loc,
        paged_kv_indptr=step.kv_indptr,
        paged_kv_indices=step.kv_indices,
        paged_kv_last_page_len=step.kv_last_page_len,
        head_dim_qk=s.dim,
        page_size=BLOCK,
        causal=True,
        **_wrapper_arguments(s),
    )
    if rng.random() < 0.3:
        pairs = int((np.diff(step.query_start_loc) * step.seq_lens).sum())
        arguments.update(custom_mask=floats(rng, pairs) > 0)
    plan = set(arguments)
    arguments.update(q=floats(rng, int(step.query_start_loc[-1]), s.heads, s.dim, dtype=s.dtype), cache=list(_cache(rng, step, s).values()))
    return _wrapped(lambda: imbrex.flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(), "NHD"), arguments, plan, ("q", "cache"))


def ragged_wrapper(rng):
    step, s = step_of(rng), shape_of(rng)
    arguments = dict(qo_indptr=step.query_start_loc, kv_indptr=step.kv_start_loc, head_dim_qk=s.dim, causal=True, **_wrapper_arguments(s))
    plan = set(arguments)
    arguments.update(_ragged(rng, step, s))
    return _wrapped(lambda: imbrex.flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(), "NHD"), arguments, plan, ("q", "k", "v"))


def mla_wrapper(rng):
    step, heads, ckv, kpe = step_of(rng), rng.randint(1, 3), 64, 16
    tokens = int(step.query_start_loc[-1])
    arguments = dict(
        qo_indptr=step.query_start_loc,
        kv_indptr=step.kv_indptr,
        kv_indices=step.kv_indices,
        kv_len_arr=step.seq_lens,
        num_heads=heads,
        head_dim_ckv=ckv,
        head_dim_kpe=kpe,
        page_size=BLOCK,
        causal=True,
        sm_scale=0.1,
        q_data_type="float16",
        kv_data_type="float16",
    )
    plan = set(arguments)
    arguments.update(
        q_nope=floats(rng, tokens, heads, ckv, dtype=np.float16),
        q_pe=floats(rng, tokens, heads, kpe, dtype=np.float16),
    )
    if rng.random() < 0.5:
        arguments["cache"] = floats(rng, step.num_blocks, BLOCK, ckv + kpe, dtype=np.float16)
        run = lambda a: (a["q_nope"], a["q_pe"], a["cache"][..., :ckv], a["cache"][..., ckv:])
    else:
        arguments.update(
            ckv_cache=floats(rng, step.num_blocks, BLOCK, ckv, dtype=np.float16), kpe_cache=floats(rng, step.num_blocks, BLOCK, kpe, dtype=np.float16)
        )
        run = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    return _wrapped(lambda: imbrex.flashinfer.BatchMLAPagedAttentionWrapper(_workspace()), arguments, plan, run)


def flash_mla(rng):
    step, heads, queries, dim = step_of(rng), rng.randint(1, 3), rng.randint(1, 3), 80
    dtype = rng.choice((np.float32, np.float16))
    arguments = dict(
        q=floats(rng, len(step.seq_lens), queries, heads, dim, dtype=dtype),
        k_cache=floats(rng, step.num_blocks, BLOCK, 1, dim, dtype=dtype),
        block_table=step.block_table,
        cache_seqlens=step.seq_lens,
        head_dim_v=64,
        softmax_scale=rng.choice((None, 0.1)),
        causal=rng.random() < 0.5,
    )

    def call(**given):
        return imbrex.flash_mla.flash_mla_with_kvcache(tile_scheduler_metadata=imbrex.flash_mla.get_mla_metadata()[0], **given)

    return _surface(call, arguments)


def append(rng):
    step, s = step_of(rng), shape_of(rng)
    queries = np.diff(step.query_start_loc)
    names = [(r, int(n) - int(q) + i) for r, (n, q) in enumerate(zip(step.seq_lens, queries)) for i in range(q)]
    arguments = dict(
        append_key=floats(rng, len(names), s.kv_heads, s.dim, dtype=s.dtype),
        append_value=floats(rng, len(names), s.kv_heads, s.dim, dtype=s.dtype),
        batch_indices=np.array([r for r, _ in names], np.int32),
        positions=np.array([p for _, p in names], np.int32),
        **_cache(rng, step, s),
        kv_indices=step.kv_indices,
        kv_indptr=step.kv_indptr,
        kv_last_page_len=step.kv_last_page_len,
        kv_layout="NHD",
    )

    def function(k_cache, v_cache, **others):
        imbrex.flashinfer.append_paged_kv_cache(paged_kv_cache=(k_cache, v_cache), **others)

    return _surface(function, arguments, ("k_cache", "v_cache"))


def single(rng):
    s, queries, keys = shape_of(rng), rng.randint(1, 5), rng.randint(5, 40)
    arguments = dict(
        q=floats(rng, queries, s.heads, s.dim, dtype=s.dtype),
        k=floats(rng, keys, s.kv_heads, s.dim, dtype=s.dtype),
        v=floats(rng, keys, s.kv_heads, s.dim, dtype=s.dtype),
        causal=rng.random() < 0.5,
        window_left=-1,
        kv_layout="NHD",
    )
    if rng.random() < 0.3:
        arguments["custom_mask"] = floats(rng, queries, keys) > 0
    return _surface(imbrex.flashinfer.single_prefill_with_kv_cache, arguments)


def merge(rng):
    tokens, parts, heads, dim = rng.randint(0, 4), rng.randint(1, 3), rng.randint(1, 3), rng.choice((16, 64))
    return _surface(imbrex.flashinfer.merge_states, dict(v=floats(rng, tokens, parts, heads, dim), s=floats(rng, tokens, parts, heads)))


# Those that take arrays of any framework take tensors too.
def _of_any(make):
    def made(rng):
        surface = make(rng)
        return Surface(surface.arguments, lambda a: surface.call({name: _tensor(value) for name, value in a.items()}))

    return made


def _of_states(make):
    return lambda rng: _surface(*make(rng))


SURFACES = [
    ("imbrex.torch.attention", dense),
    ("imbrex.torch.varlen_attention", varlen),
    ("imbrex.torch.paged_attention", paged),
    ("imbrex.torch.write_kv", write_kv),
    ("flash_attn_func", flash),
    ("flash_attn_varlen_func", flash_varlen),
    ("flash_attn_with_kvcache", flash_cache),
    ("flashinfer decode", decode_wrapper),
    ("flashinfer prefill", prefill_wrapper),
    ("flashinfer ragged", ragged_wrapper),
    ("flashinfer MLA", mla_wrapper),
    ("flash_mla_with_kvcache", flash_mla),
    ("flashinfer append", append),
    ("flashinfer single", single),
    ("flashinfer merge_states", merge),
    ("attention_varlen", _of_any(fuzz_numpy.varlen)),
    ("attention_paged", _of_any(fuzz_numpy.paged)),
    *((name, _of_states(make)) for name, make in fuzz_torch_states.MAKERS.items()),
]
