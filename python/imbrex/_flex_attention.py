"""torch.nn.attention.flex_attention on plans: functions become expressions, which a layer's spec holds."""
import math
import weakref

import torch

from . import _core
from ._expressions import trace_mask_mod, trace_score_mod
from ._frameworks import device_name, dtype_name, no_gradient, stream_address
from ._plan_cache import Limits, PlanCache
from ._torch_attention import equal_lengths, is_capturing
from .plan import KvLayer, Plan

__all__ = ["flex_attention"]

_CPU = torch.device("cpu")
_plans = PlanCache()


def _plan_for(device, needed, spec, stream):
    def make(limits):
        return Plan(_core.AttentionSpec(kind="encoder_decoder", block_size=0, causal=False, **spec), device, ordered=True, **limits.arguments())

    return _plans.find((device, *spec.items()), needed, make, stream)


def _on(device, traced):
    """The tensors of a traced function by their names, on a device; none without a function."""
    return {} if traced is None else {name: tensor.to(device) for name, tensor in traced.tensors.items()}


def _rows(x):
    """[b, h, s, d] as [b * s, h, d]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _check(query, key, value, enable_gqa):
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected [batch, heads, length, dim], got {list(x.shape)}")
        if x.device != query.device or x.dtype != query.dtype:
            raise ValueError(f"{name}: expected {query.dtype} on {query.device}, got {x.dtype} on {x.device}")
    if key.shape[:3] != value.shape[:3] or key.shape[0] not in (1, query.shape[0]) or key.shape[3] != query.shape[3]:
        raise ValueError(f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)} do not fit")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"expected as many key heads as query heads without enable_gqa, got {key.shape[1]} and {query.shape[1]}")


# --- masks


def _listed(counts, indices, columns):
    """The blocks that lists name, as bool [batch, heads, blocks of queries, blocks of keys]."""
    named = torch.arange(indices.shape[-1], device=_CPU) < counts.to(_CPU).unsqueeze(-1)
    blocks = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=_CPU)
    return blocks.scatter_(-1, torch.where(named, indices.to(_CPU), columns).clamp(max=columns).long(), True)[..., :-1]


class _Blocks:
    """What the lists of a BlockMask say: which blocks are seen as far as its mask_mod shows them, and which are seen whole."""

    def __init__(self, block_mask, num_queries, num_keys):
        self.rows, self.columns = block_mask.BLOCK_SIZE
        lists = [(block_mask.kv_num_blocks, block_mask.kv_indices), (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)]
        count = -(-num_keys // self.columns)
        partial, full = (None if counts is None else _listed(counts, indices, count) for counts, indices in lists)
        if partial.shape[2] * self.rows < num_queries:
            raise ValueError(f"block_mask: expected blocks of {num_queries} queries, got {partial.shape[2]} of {self.rows}")
        self.partial, self.full = partial, torch.zeros_like(partial) if full is None else full
        self.mask_mod = block_mask.mask_mod

    def are_those_of_the_function(self, num_queries, num_keys):
        """Whether mask_mod hides all blocks that no list names, and shows the whole of those that are seen whole."""
        if bool((self.partial | self.full).all()) and not bool(self.full.any()):
            return True
        traced = trace_mask_mod(self.mask_mod, num_queries, num_keys)
        tensors = _on(_CPU, traced)
        rows = -(-num_queries // self.rows)
        for b in range(self.partial.shape[0]):
            for h in range(self.partial.shape[1]):
                tiles = _core.mask_tiles(
                    traced.text, tensors, batch=b, head=h, q_len=num_queries, kv_len=num_keys, tile_q=self.rows, tile_kv=self.columns
                )
                tiles = torch.frombuffer(bytearray(tiles), dtype=torch.uint8).view(rows, -1)
                partial, full = self.partial[b, h, :rows], self.full[b, h, :rows]
                if bool((tiles[~(partial | full)] != 0).any()) or bool((tiles[full] != 2).any()):
                    return False
        return True

    def mask(self, b, h, q, kv):
        """The mask_mod of lists and function."""
        heads = self.partial.shape[1]
        block = ((b if self.partial.shape[0] > 1 else 0) * heads + (h if heads > 1 else 0), q // self.rows, kv // self.columns)
        return self.full.flatten(0, 1)[block] | (self.partial.flatten(0, 1)[block] & self.mask_mod(b, h, q, kv))


_checked = weakref.WeakKeyDictionary()  # of a BlockMask: what was found out about it, and its state then


def _version(x):
    """Changes when a tensor is written to; tensors of inference mode do not say."""
    return 0 if x is None or x.is_inference() else x._version


def _mask_mod_of(block_mask, num_queries, num_keys):
    """The function that says what a BlockMask, or a mask_mod in its place, shows. Lists count where they say something else than the function."""
    if not hasattr(block_mask, "kv_indices"):
        return block_mask
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    state = (block_mask.mask_mod, num_queries, num_keys, *map(_version, lists))
    known = _checked.get(block_mask)
    if known is None or known[0] != state or any(old is not new for old, new in zip(known[2], lists)):
        blocks = _Blocks(block_mask, num_queries, num_keys)
        known = (state, None if blocks.are_those_of_the_function(num_queries, num_keys) else blocks.mask, lists)
        _checked[block_mask] = known
    return known[1] or block_mask.mask_mod


# --- the function


def _wants_lse(return_lse, return_aux):
    if return_aux is None:
        return return_lse
    if return_lse:
        raise ValueError("return_lse and return_aux: expected one of the two, got both")
    if getattr(return_aux, "max_scores", False):
        raise NotImplementedError("imbrex: return_aux.max_scores: the greatest scores are not kept")
    return return_aux.lse


def flex_attention(
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False, kernel_options=None, return_aux=None
):
    """See imbrex.torch.flex_attention. kernel_options is for PyTorch's kernels."""
    _check(query, key, value, enable_gqa)
    no_gradient(query, key, value)
    wants_lse = _wants_lse(return_lse, return_aux)
    b, h, sq, d = query.shape
    sk, dv = key.shape[2], value.shape[3]
    out = query.new_zeros((b * sq, h, dv))
    lse = query.new_full((b * sq, h), -math.inf, dtype=torch.float32) if wants_lse else None
    if out.numel() and sk:
        if is_capturing(query):
            raise RuntimeError("imbrex: flex_attention makes a plan on the host in each call, which a CUDA graph cannot capture")
        mask = None if block_mask is None else trace_mask_mod(_mask_mod_of(block_mask, sq, sk), sq, sk)
        score = None if score_mod is None else trace_score_mod(score_mod, sq, sk)
        spec = {
            "num_q_heads": h,
            "num_kv_heads": key.shape[1],
            "head_dim_qk": d,
            "head_dim_v": dv,
            "q_dtype": dtype_name(query),
            "kv_dtype": dtype_name(key),
            "scale": float(scale or 0.0),
            "mask_mod": "" if mask is None else mask.text,
            "score_mod": "" if score is None else score.text,
        }
        stream = stream_address(None, query)
        plan = _plan_for(device_name(query), Limits(b, b * sq, sk), spec, stream).plan
        lengths = equal_lengths(b, sq, sk)
        plan.update(
            lengths.query_start_loc,
            lengths.seq_lens,
            kv_start_loc=torch.arange(b + 1, dtype=torch.int32, device=query.device) * sk,
            mask_tensors=_on(_CPU, mask),
            stream=stream,
        )
        key, value = key.expand(b, *key.shape[1:]), value.expand(b, *value.shape[1:])
        layer = KvLayer(_rows(key), _rows(value))
        plan.run(_rows(query), layer, out, lse=lse, score_tensors=_on(query.device, score), stream=stream)
    out = out.view(b, sq, h, dv).transpose(1, 2)
    lse = None if lse is None else lse.view(b, sq, h).transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput  # of PyTorch 2.9 on

        return out, AuxOutput(lse=lse)
    return (out, lse) if return_lse else out
