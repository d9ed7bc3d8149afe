"""The attention layer of LLM serving: backends selected with a reason, steps planned once, a paged KV cache, and kernels of its own.

Arrays are those of any framework with DLPack (PyTorch, NumPy, CuPy, JAX), on the host or an NVIDIA GPU, and are never copied. NumPy has no
bfloat16 and no fp8: there uint16 and uint8 arrays hold their bits. On a GPU work goes to the current stream of the array's framework, or
to `stream`: an address, or an object of PyTorch or CuPy.

    spec = imbrex.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim_qk=128)
    print(imbrex.explain(spec, "cpu"))                     # which backend, and why not the others
    plan = imbrex.Plan(spec, "cpu")
    cache = imbrex.KvCache(spec, num_layers=32, num_blocks=1024)
    plan.update(query_start_loc, seq_lens, block_table=block_table, slot_mapping=slot_mapping)   # once a step
    plan.write_kv(cache.layer(i), k, v)                                                          # once a layer
    out = plan.run(q, cache.layer(i))
"""
from ._core import (
    AttentionSpec,
    BlockPool,
    Device,
    Error,
    MlaSelection,
    MlaSpec,
    Reason,
    RecurrentSelection,
    RecurrentSpec,
    Selection,
    ShortConvSelection,
    ShortConvSpec,
    backends,
    hash_block,
    num_cuda_devices,
)
from . import batches
from .attention import attention_paged, attention_varlen, merge_state, merge_states
from .mla import MlaPlan
from .plan import KvCache, KvLayer, Plan, Workspace, explain, select
from .recurrent import RecurrentPlan
from .short_conv import ShortConvPlan

__all__ = [
    "AttentionSpec",
    "BlockPool",
    "Device",
    "Error",
    "KvCache",
    "KvLayer",
    "MlaPlan",
    "MlaSelection",
    "MlaSpec",
    "Plan",
    "Reason",
    "RecurrentPlan",
    "RecurrentSelection",
    "RecurrentSpec",
    "Selection",
    "ShortConvPlan",
    "ShortConvSelection",
    "ShortConvSpec",
    "Workspace",
    "attention_paged",
    "attention_varlen",
    "backends",
    "batches",
    "explain",
    "hash_block",
    "merge_state",
    "merge_states",
    "num_cuda_devices",
    "select",
]
