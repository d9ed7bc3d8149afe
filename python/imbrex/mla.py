"""Multi-head latent attention (MLA) of DeepSeek's and Kimi's layers."""
from typing import Any, List, Optional, Tuple

from . import _core
from ._frameworks import empty, exported, no_gradient, stream_address
from .plan import Array, DeviceLike, KvLayer, Workspace, _device


class MlaPlan:
    """Everything one step needs, decided once and reused by every layer of the same spec. For one thread at a time.

    A plan computes each request in one of two ways, which str() explains: in latent space, or with keys and values of all heads expanded in chunks. `backend`
    forces one ("" takes the first that runs the spec). num_threads: 0 is PyTorch's threads where it is loaded, else one for each core.
    max_query_len bounds the query tokens of a request: 1 is a plan for decode, which a GPU's graphs may hold; with the same min_query_len it is
    one for verify of so many tokens, whose graphs have no launches for others. on_device is for update_on_device(). out_dtype ("bf16") is what every output will have.
    KvCache(spec.latent_spec, ...) makes the cache.
    """

    def __init__(
        self,
        spec: _core.MlaSpec,
        device: DeviceLike = "cpu",
        *,
        backend: str = "",
        max_num_reqs: int = 256,
        max_num_tokens: int = 8192,
        max_seq_len: int = 131072,
        max_query_len: int = 0,
        min_query_len: int = 0,
        num_threads: int = 0,
        validate: bool = True,
        on_device: bool = False,
        out_dtype: Optional[str] = None,
        workspace: Optional[Workspace] = None,
    ) -> None:
        self.spec = spec
        self._stream = 0  # of the last update_on_device()
        self._device = _device(device)
        self._gpu = self._device.index if self._device.type == "cuda" else None
        self._plan = _core.MlaPlan(
            spec,
            self._device,
            backend=backend,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            max_query_len=max_query_len,
            min_query_len=min_query_len,
            num_threads=num_threads,
            validate=validate,
            on_device=on_device,
            out_dtype=out_dtype,
            workspace=None if workspace is None else workspace._shared,
        )

    def update(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        *,
        block_table: Optional[Array] = None,
        kv_indptr: Optional[Array] = None,
        kv_indices: Optional[Array] = None,
        slot_mapping: Optional[Array] = None,
        custom_mask: Optional[Array] = None,
        positions: Optional[Array] = None,
        draft_parents: Optional[Array] = None,
        num_drafts: Optional[Array] = None,
        packed_mask: Optional[Array] = None,
        mask_indptr: Optional[Array] = None,
        stream: Any = None,
    ) -> None:
        """One scheduler step, in the arrays of Plan.update()."""
        anchor = next((a for a in (block_table, kv_indices, slot_mapping) if a is not None), query_start_loc)
        self._plan.update(
            exported(query_start_loc),
            exported(seq_lens),
            block_table=exported(block_table),
            kv_indptr=exported(kv_indptr),
            kv_indices=exported(kv_indices),
            slot_mapping=exported(slot_mapping),
            custom_mask=exported(custom_mask),
            positions=exported(positions),
            draft_parents=exported(draft_parents),
            num_drafts=exported(num_drafts),
            packed_mask=exported(packed_mask),
            mask_indptr=exported(mask_indptr),
            stream=stream_address(stream, anchor, self._gpu),
        )

    def update_on_device(
        self,
        query_start_loc: Array,
        seq_lens: Array,
        *,
        max_num_tokens: int = 0,
        block_table: Optional[Array] = None,
        kv_indptr: Optional[Array] = None,
        kv_indices: Optional[Array] = None,
        slot_mapping: Optional[Array] = None,
        custom_mask: Optional[Array] = None,
        positions: Optional[Array] = None,
        draft_parents: Optional[Array] = None,
        num_drafts: Optional[Array] = None,
        packed_mask: Optional[Array] = None,
        stream: Any = None,
    ) -> None:
        """One scheduler step whose lengths are on the GPU, as Plan.update_on_device().

        For a plan made with on_device=True whose limits keep every request in latent space, as max_query_len=1 does.
        """
        self._stream = stream_address(stream, query_start_loc)
        self._plan.update_on_device(
            exported(query_start_loc),
            exported(seq_lens),
            max_num_tokens,
            block_table=exported(block_table),
            kv_indptr=exported(kv_indptr),
            kv_indices=exported(kv_indices),
            slot_mapping=exported(slot_mapping),
            custom_mask=exported(custom_mask),
            positions=exported(positions),
            draft_parents=exported(draft_parents),
            num_drafts=exported(num_drafts),
            packed_mask=exported(packed_mask),
            stream=self._stream,
        )

    def device_problems(self) -> List[_core.Reason]:
        """Why requests were left out by update_on_device() since the last call. Waits for that call's stream."""
        return self._plan.device_problems(self._stream)

    def write_kv(self, layer: Tuple[Array, ...], latent: Array, rope: Optional[Array] = None, *, stream: Any = None) -> None:
        """This step's latents [num_tokens, kv_lora_rank] and the rotated parts of their keys [num_tokens, qk_rope_dim] to their slots of a layer.

        It comes before run(), which reads all keys from the cache. `layer` is (k,) or a KvLayer, without v; without qk_rope_dim there is no rope.
        """
        layer = KvLayer(*layer)
        no_gradient(layer.k, layer.k_rope, latent, rope)
        parts = layer.k, layer.k_scale, layer.k_rope, layer.k_rope_scale
        self._plan.write_kv(*map(exported, (*parts, latent, rope)), stream=stream_address(stream, latent))

    def run(
        self,
        q: Array,
        kv_b: Optional[Array],
        layer: Tuple[Array, ...],
        out: Optional[Array] = None,
        *,
        lse: Optional[Array] = None,
        sinks: Optional[Array] = None,
        stream: Any = None,
    ) -> Array:
        """Attention of q [>= num_tokens, num_heads, q_dim]: the part without a position, then the rotated one.

        kv_b [num_heads, qk_nope_dim + v_dim, kv_lora_rank] is the weight of kv_b_proj, viewed by heads; None for a spec with absorbed=True. Returns out
        [.., num_heads, out_dim], which is made when it is not given. There is no backward pass.
        """
        layer = KvLayer(*layer)
        no_gradient(q, kv_b, layer.k, layer.k_rope, out, lse, sinks)
        if out is None:
            out = empty(q, (q.shape[0], self.spec.num_heads, self.spec.out_dim), self.spec.dtype)
        arrays = map(exported, (q, kv_b, layer.k, layer.k_scale, layer.k_rope, layer.k_rope_scale, out, lse))
        self._plan.run(*arrays, sinks=exported(sinks), stream=stream_address(stream, q))
        return out

    def __str__(self) -> str:
        return str(self._plan)
