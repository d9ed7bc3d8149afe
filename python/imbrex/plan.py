"""Selection, plans and caches in the shape that Python users expect."""
import sys
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from . import _core
from ._frameworks import empty, exported, no_gradient, stream_address


Array = Any  # of any framework with DLPack
DeviceLike = Union[str, _core.Device]


def _device(device: DeviceLike) -> _core.Device:
    return device if isinstance(device, _core.Device) else _core.Device(str(device))


Spec = Union[_core.AttentionSpec, _core.ShortConvSpec, _core.MlaSpec, _core.RecurrentSpec]


def select(
    spec: Spec,
    device: DeviceLike = "cpu",
    *,
    forced: str = "",
    forced_prefill: str = "",
    forced_decode: str = "",
    phase: str = "any",
) -> Union[_core.Selection, _core.ShortConvSelection, _core.MlaSelection, _core.RecurrentSelection]:
    """Which backend runs a spec on a device, with every reason against the others.

    `forced` is a backend or a name that users of vLLM ("FLASH_ATTN") or SGLang ("fa3") know; `phase` is "any", "prefill" or "decode". That
    nothing runs the spec is no error: `.backend` is None then, and `.proposals` has changes of the spec after which something does.
    """
    return _core.select(spec, _device(device), forced=forced, forced_prefill=forced_prefill, forced_decode=forced_decode, phase=phase)


def explain(spec: Spec, device: DeviceLike = "cpu", **options: str) -> str:
    """The table of `imbrex select`: every backend, and why it was taken or passed over."""
    return str(select(spec, device, **options))


def _exported_by_name(arrays: Optional[Mapping[str, Array]]) -> Dict[str, Array]:
    return {name: exported(array) for name, array in (arrays or {}).items()}


class KvLayer(NamedTuple):
    """One layer's pages.

    k [num_blocks, block_size, num_kv_heads, head_dim_qk] and v [.., head_dim_v] with any strides; ragged (block_size 0) [num_rows,
    num_kv_heads, head_dim]; of kv_format "amx_packed" uint8 [num_blocks, num_kv_heads, bytes]. Of "latent" k alone: a value is the first
    head_dim_v elements of its key. Of "latent_rope" k has these elements, and k_rope those behind them. Of "fp8_ds_mla" k is uint8
    [num_blocks, block_size, 656]. Scales are float32 [1] or [num_kv_heads]: an fp8 element e stands for e * scale; k_rope_scale is given
    where k_scale is.
    """

    k: Array
    v: Optional[Array] = None
    k_scale: Optional[Array] = None
    v_scale: Optional[Array] = None
    k_rope: Optional[Array] = None
    k_rope_scale: Optional[Array] = None


class KvCache:
    """Owned, zeroed memory for all layers of one spec.

    `order` names the physical order of the dimensions, outermost first: l(ayer), b(lock), h(ead), t(oken), d(im). Arrays of a layer are for
    `from_dlpack` of any framework, and keep the memory alive.
    """

    def __init__(self, spec: _core.AttentionSpec, num_layers: int, num_blocks: int, order: str = "lbhtd", device: DeviceLike = "cpu") -> None:
        self.spec = spec
        self.device = _device(device)
        self._memory = _core.KvCache(spec, num_layers, num_blocks, order, self.device)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def num_layers(self) -> int:
        return self._memory.num_layers

    @property
    def num_blocks(self) -> int:
        return self._memory.num_blocks

    def layer(self, index: int) -> KvLayer:
        return KvLayer(*self._memory.layer(index))

    def copy_blocks(self, copies: Sequence[Tuple[int, int]], *, stream: Any = None) -> None:
        """Copies whole blocks, (from, to) each, in all layers: what the blocks of BlockPool.make_writable() need.

        In the order of `stream` (None: the one that PyTorch would use now for the cache's GPU, else the default stream). No block may be
        written twice, or both read and written.
        """
        torch = sys.modules.get("torch")
        if stream is None and torch is not None and self.device.type == "cuda" and torch.cuda.is_initialized():
            stream = torch.cuda.current_stream(self.device.index)
        self._memory.copy_blocks(copies, stream_address(stream, None))


class Workspace:
    """Scratch memory that plans of one device share: as much as the one that needs most, where without it each has its own.

    For plans whose work is in one order, as that of one stream is: two that share it must not compute at the same time. They may be made,
    updated and freed on any thread. It grows when a plan is made; CUDA graphs go on with the memory that they were captured with.
    """

    def __init__(self, device: DeviceLike) -> None:
        self._shared = _core.Workspace(_device(device))

    @property
    def nbytes(self) -> int:
        """The bytes held now; 0 on a CPU, whose plans have scratch of their own."""
        return self._shared.nbytes


class Plan:
    """Everything one step needs, decided once and reused by every layer of the same spec. For one thread at a time, and one stream.

    `backend` forces one ("" takes the first that runs the spec). The limits bound every later batch; max_query_len=1 is a plan for decode, the
    same min_query_len and max_query_len one for verify of so many tokens. shared_prompts says that requests may begin with the same blocks:
    a GPU's kernels of decode then share reads of these, and neighbours most of all with `balanced`.
    num_threads is for CPUs: 0 is PyTorch's threads where it is loaded, else one for each core, shared among plans. `balanced` splits by load:
    results then depend on the batch. on_device is for update_on_device(). load_on_demand compiles a GPU kernel when a step first needs it; such
    a plan cannot be captured into a graph. With `ordered`, calls may come on several streams: each waits for the one before, which costs a
    microsecond or two. out_dtype ("bf16") is what every output will have: a GPU's plan then makes no kernels for others. `workspace` is scratch
    that it shares with other plans.
    """

    def __init__(
        self,
        spec: _core.AttentionSpec,
        device: DeviceLike = "cpu",
        *,
        backend: str = "",
        max_num_reqs: int = 256,
        max_num_tokens: int = 8192,
        max_seq_len: int = 131072,
        max_query_len: int = 0,
        min_query_len: int = 0,
        shared_prompts: bool = False,
        num_threads: int = 0,
        balanced: bool = False,
        validate: bool = True,
        load_on_demand: bool = False,
        on_device: bool = False,
        ordered: bool = False,
        out_dtype: Optional[str] = None,
        workspace: Optional[Workspace] = None,
    ) -> None:
        self.spec = spec
        self._stream = 0  # of the last update_on_device()
        device = _device(device)
        self._gpu = device.index if device.type == "cuda" else None
        self._plan = _core.Plan(
            spec,
            device,
            backend=backend,
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max_seq_len,
            max_query_len=max_query_len,
            min_query_len=min_query_len,
            shared_prompts=shared_prompts,
            num_threads=num_threads,
            balanced=balanced,
            validate=validate,
            load_on_demand=load_on_demand,
            on_device=on_device,
            ordered=ordered,
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
        kv_last_page_len: Optional[Array] = None,
        kv_start_loc: Optional[Array] = None,
        slot_mapping: Optional[Array] = None,
        custom_mask: Optional[Array] = None,
        positions: Optional[Array] = None,
        draft_parents: Optional[Array] = None,
        num_drafts: Optional[Array] = None,
        mask_tensors: Optional[Mapping[str, Array]] = None,
        packed_mask: Optional[Array] = None,
        mask_indptr: Optional[Array] = None,
        stream: Any = None,
    ) -> None:
        """One scheduler step.

        query_start_loc int32 [num_reqs + 1] and seq_lens int32 [num_reqs] are on the host; seq_lens counts this step's tokens too. Where keys
        are: block_table int32 [num_reqs, max_blocks]; or kv_indptr [num_reqs + 1], kv_indices and, optional, kv_last_page_len [num_reqs]; or,
        for ragged keys, kv_start_loc [num_reqs + 1]. slot_mapping int64 [num_tokens] is for write_kv(): block * block_size + offset, -1 is not
        written. custom_mask uint8 [sum of q_len * seq_len]. These are used where they lie and kept until the next update. positions int32
        [num_tokens], on the host, for a spec with positions=True: where each query stands among its request's keys. draft_parents int32
        [num_tokens], on the host, for a spec with tree=True: the token of its request that each follows, counted from 0, or -1; without it, a
        chain. With num_drafts int32 [num_reqs] that of a request's last tokens alone. mask_tensors are those
        that the spec's mask_mod reads, by name, on the host: int32, float32, or uint8 for bool. packed_mask uint8, in place of custom_mask, has
        a bit for each (query, key), the lowest of a byte first; a request's bits begin with a byte of their own, behind those of the one in
        front or, with mask_indptr int32 [num_reqs + 1] on the host, at the byte that it has.
        """
        anchor = next((a for a in (block_table, kv_indices, kv_start_loc, slot_mapping) if a is not None), query_start_loc)
        self._plan.update(
            exported(query_start_loc),
            exported(seq_lens),
            block_table=exported(block_table),
            kv_indptr=exported(kv_indptr),
            kv_indices=exported(kv_indices),
            kv_last_page_len=exported(kv_last_page_len),
            kv_start_loc=exported(kv_start_loc),
            slot_mapping=exported(slot_mapping),
            custom_mask=exported(custom_mask),
            positions=exported(positions),
            draft_parents=exported(draft_parents),
            num_drafts=exported(num_drafts),
            mask_tensors=_exported_by_name(mask_tensors),
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
        kv_start_loc: Optional[Array] = None,
        slot_mapping: Optional[Array] = None,
        custom_mask: Optional[Array] = None,
        positions: Optional[Array] = None,
        draft_parents: Optional[Array] = None,
        num_drafts: Optional[Array] = None,
        packed_mask: Optional[Array] = None,
        stream: Any = None,
    ) -> None:
        """One scheduler step whose lengths are on the GPU: a kernel plans it there, the host waits for nothing, and a graph may hold the call.

        Arrays are as in update(), all of them on the GPU, and read when the kernel runs. max_num_tokens bounds query_start_loc[-1]; 0 is the
        plan's limit. A request beyond the limits is left out; device_problems() says why. For a plan made with on_device=True.
        """
        self._stream = stream_address(stream, query_start_loc)
        self._plan.update_on_device(
            exported(query_start_loc),
            exported(seq_lens),
            max_num_tokens,
            block_table=exported(block_table),
            kv_indptr=exported(kv_indptr),
            kv_indices=exported(kv_indices),
            kv_start_loc=exported(kv_start_loc),
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

    def write_kv(self, layer: Tuple[Array, ...], k: Array, v: Optional[Array] = None, *, stream: Any = None) -> None:
        """This step's k [num_tokens, num_kv_heads, head_dim_qk] and v to their slots of a layer, converted where the cache has another type.

        Of kv_format "latent", "latent_rope" and "fp8_ds_mla" k alone.
        """
        layer = KvLayer(*layer)
        no_gradient(layer.k, layer.v, k, v)
        self._plan.write_kv(*map(exported, (*layer, k, v)), stream=stream_address(stream, k))

    def run(
        self,
        q: Array,
        layer: Tuple[Array, ...],
        out: Optional[Array] = None,
        *,
        lse: Optional[Array] = None,
        q_scale: Optional[Array] = None,
        sinks: Optional[Array] = None,
        alibi_slopes: Optional[Array] = None,
        head_scales: Optional[Array] = None,
        relative_bias: Optional[Array] = None,
        score_tensors: Optional[Mapping[str, Array]] = None,
        stream: Any = None,
    ) -> Array:
        """Attention of q [>= num_tokens, num_q_heads, head_dim_qk] over a layer's pages.

        Returns out [.., num_q_heads, head_dim_v], which is made when it is not given. lse float32 [.., num_q_heads] receives the natural
        logarithm of the softmax's denominator. The others are float32 [num_q_heads], where the spec has them; score_tensors are those
        that its score_mod reads, by name. out and lse have memory of their
        own. There is no backward pass: tensors that want a gradient are refused.
        """
        layer = KvLayer(*layer)
        no_gradient(q, *layer, out, lse, q_scale, sinks, alibi_slopes, head_scales, relative_bias)
        if out is None:
            out = empty(q, (q.shape[0], self.spec.num_q_heads, self.spec.head_dim_v), self.spec.out_dtypes[0])
        self._plan.run(
            *map(exported, (q, *layer, out, lse)),
            q_scale=exported(q_scale),
            sinks=exported(sinks),
            alibi_slopes=exported(alibi_slopes),
            head_scales=exported(head_scales),
            relative_bias=exported(relative_bias),
            score_tensors=_exported_by_name(score_tensors),
            stream=stream_address(stream, q),
        )
        return out

    def prepare(self, q: Array, layer: Tuple[Array, ...], out: Array) -> _core.PreparedRun:
        """Returns run() for other arrays of the same shapes, strides and types: it is called with their addresses and a stream's.

        Of a layer without scales and a spec without further arrays; nothing is checked that run() checked.
        """
        return self._plan.prepare(*map(exported, (q, *KvLayer(*layer)[:2], out)))

    def keep_for_capture(self, stream: Any) -> None:
        """Makes the CUDA graph that a stream is captured into keep this plan's memory until the graph is gone.

        Memory of graphs that are gone is freed by a later call that needs a plan of the package's own, or by release_captured().
        """
        self._plan.keep_for_capture(stream_address(stream, None))

    @property
    def num_graphs(self) -> int:
        """How often graphs keep the plan."""
        _core.release_captured()
        return self._plan.num_graphs

    def __str__(self) -> str:
        return str(self._plan)
