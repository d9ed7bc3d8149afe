"""The backend that SGLang's model runner makes and asks. Importing this checks SGLang's version."""

import logging
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import sglang
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel, get_spec

from .. import _core
from .._plan_cache import Kept, Limits, PlanCache
from ..engines import CheckedLayer, announce, check_pages, check_version, device_text, floats, make_plan, settings, type_name
from ..plan import KvLayer, Plan, Workspace
from . import WRITTEN_FOR
from .layers import mask_fields, refuse_layer, score_mod
from .pages import SlotCheck, block_table, check_pool, kv_layer, latent_dims, rows_of
from .verify import MOST_TREE_TOKENS, Drafts, asked_mask, drafts_of, drafts_of_each

logger = logging.getLogger("imbrex")

check_version("SGLang", sglang.__version__, WRITTEN_FOR, least_patch=True)


@dataclass
class Step:
    """A step: the arrays that plans are updated with. Lengths are int32 on the host, or on the GPU where the host does not know them."""

    number: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    table: torch.Tensor
    encoder: Optional[Tuple[torch.Tensor, torch.Tensor]]  # lengths and table of the encoder's tokens, for layers of cross attention
    drafts: Drafts
    prompts: bool  # tokens of prompts, where bidirectional layers of decoders see those behind them
    num_tokens: int
    graph: bool
    on_device: bool

    def update(self, plan: Plan) -> None:
        lens, table = (self.seq_lens, self.table) if plan.spec.kind == "decoder" else self.encoder
        arrays = dict(block_table=table)
        if plan.spec.custom_mask:
            arrays.update(custom_mask=self.drafts.mask)
        if plan.spec.tree:
            arrays.update(draft_parents=self.drafts.parents)
        if plan.spec.block_size == 0:  # over the step's own keys and values
            arrays = dict(kv_start_loc=self.query_start_loc)
        if self.on_device:
            plan.update_on_device(self.query_start_loc, lens, max_num_tokens=self.num_tokens, **arrays)
        else:
            plan.update(self.query_start_loc, lens, **arrays)


_SMALLEST = Limits(32, 1024, 1)  # of eager steps


class Backend(AttentionBackend):
    """imbrex for layers with keys and values of their own, or with latents (MLA), over SGLang's pools of token slots or pages.

    SGLang's models with latents multiply queries by the weight themselves: attention is over the pool's latents, which all heads share. A
    step of prompts without a prefix in the cache comes with keys and values of all heads instead.
    A plan for each kind of layer is made when the first layer of it runs, and updated once a step. Steps in a CUDA graph have plans of
    their own, which are sized once: a graph holds their addresses.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.settings = settings()
        self._refuse(runner)
        self.device = torch.device(runner.device)
        self.device_text = device_text(self.device)
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.req_to_token = runner.req_to_token_pool.req_to_token
        # An encoder's tokens are in front of the request's, which then begin amid a page.
        self.page_size = 1 if runner.model_config.is_encoder_decoder else runner.page_size or 1
        self.latent_dims = latent_dims(runner.token_to_kv_pool)
        self.max_keys = self.req_to_token.shape[1]
        self.chunk = getattr(runner, "attention_chunk_size", None) or 0  # of layers with local attention
        self.max_context_len = runner.model_config.context_len  # SGLang's workers size masks by it
        self.of_drafts = bool(getattr(runner, "is_draft_worker", False))
        gpu = self.device_text != "cpu"
        speculative = runner.spec_algorithm.is_speculative()
        wanted = self.settings.on_device
        if gpu and speculative and wanted == "never":
            raise ValueError('imbrex: expected on_device "auto" or "always" with speculative decoding on a GPU, got "never"')
        self.on_device = gpu and (wanted == "always" or (wanted == "auto" and speculative))
        self.needs_cpu_seq_lens = not self.on_device  # SGLang then does not wait for the GPU to know them
        self.forward_metadata: Optional[Step] = None
        self._eager = PlanCache(_SMALLEST)
        self._workspace = Workspace(self.device_text)  # of the plans of graphs, which replay one after the other
        self._captured: Dict[Tuple, Kept] = {}  # also updated before every replay, so that they belong to the backend and not to a graph
        self._graph_room = (0, 0)
        self._graph_table: Optional[torch.Tensor] = None
        self._graph_encoder_table: Optional[torch.Tensor] = None
        self._graph_mask: Optional[torch.Tensor] = None
        self._num_steps = 0
        self._glued = False  # whether tables are as wide as the longest request that may come
        self._checked = set()
        self._slot_check = SlotCheck(self.page_size) if self.settings.validate and self.page_size > 1 else None

    @staticmethod
    def _refuse(runner: Any) -> None:
        for what, found in (
            ("decode context parallelism", get_parallel().attn_dcp_size > 1),
            ("a unified memory pool, whose slots are translated", runner.kv_index_translator.is_translating),
        ):
            if found:
                raise NotImplementedError(f"imbrex does not have this in SGLang: {what}")
        pool = runner.token_to_kv_pool
        check_pool(pool)
        if runner.model_config.is_encoder_decoder and getattr(pool, "kv_cache_layout", None) == "hnd" and (runner.page_size or 1) > 1:
            raise NotImplementedError("imbrex: expected --page-size 1 with kv_cache_layout hnd for an encoder-decoder model in SGLang")

    # Steps.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans a step that runs outside of a graph."""
        self._begin(forward_batch, graph=False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plans a step of a graph, before it is captured and before each replay. A graph holds only the layers."""
        mode = forward_batch.forward_mode
        if not (mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2()):
            raise NotImplementedError(f"imbrex: expected a CUDA graph of decoding, verification or a draft's extend in SGLang, got {mode.name}")
        if self._plans_in_graph(mode):
            return
        self._begin(forward_batch, graph=True)
        step = self.forward_metadata
        if step is None:
            return
        for kept in self._captured.values():
            if not kept.plan.spec.custom_mask or step.drafts.mask is not None:
                self._update(kept, step)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Begins a draft's extend, of which SGLang's runners keep every input at one address: its layers plan it within the graph. In other steps
        the captured kernels read the memory of plans that are updated before each replay."""
        if self._plans_in_graph(forward_batch.forward_mode):
            self._begin(forward_batch, graph=True)

    def _plans_in_graph(self, mode: Any) -> bool:
        return self.on_device and mode.is_draft_extend_v2()

    def draft_extend_metadata_captured_in_graph(self) -> bool:
        return self.on_device

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        columns = -(-self.max_keys // self.page_size)
        self._graph_table, self._graph_encoder_table = (torch.zeros((max_bs, columns), dtype=torch.int32, device=self.device) for _ in range(2))
        self.begin_graphs(max_bs, max_num_tokens)

    def begin_graphs(self, max_bs: int, max_num_tokens: int) -> None:
        """Before graphs are captured: those of before are no longer replayed."""
        self._graph_room = (max_bs, max_num_tokens)
        self._graph_mask = None
        self._captured = {}

    def glue_target_verify_metadata(self) -> str:
        return self._glue()

    def glue_draft_metadata(self) -> str:
        return self._glue()

    def _glue(self) -> str:
        """Why SGLang may not capture what comes before a replay too (its glue graph); empty where it may."""
        if not self.on_device:
            return "imbrex plans from lengths on the host"
        if (get_spec().speculative_eagle_topk or 1) > 1:
            return "links between the drafts of a tree are new tensors in each step"
        self._glued = True
        return ""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # a row of padding has one token, which is its own key, in slot 0

    @property
    def verify_mask(self) -> Any:
        return asked_mask(self.device)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: Optional[int]) -> None:
        """Does nothing: SGLang's stream for plans waits for the drafts, so that the step was planned with their links."""

    def _begin(self, batch: Any, graph: bool) -> None:
        mode = batch.forward_mode
        self._num_steps += 1
        if mode.is_idle():
            self.forward_metadata = None
            return
        if getattr(batch, "multi_item_delimiter_indices", None) is not None:
            raise NotImplementedError("imbrex: expected requests without items, got multi_item_delimiter_indices (multi-item scoring)")
        num_reqs, drafted = batch.batch_size, mode.is_target_verify() or mode.is_draft_extend_v2()
        query_lens, ahead = self._query_lens(batch, num_reqs)
        host = self._host_lens(batch, num_reqs, query_lens)
        on_device = host is None
        if on_device and not self.on_device:
            raise ValueError('imbrex: expected lengths on the host, got none: the setting on_device "always" does without')
        lens = batch.seq_lens[:num_reqs].to(torch.int32) if on_device else host
        lens = lens + ahead
        if graph and mode.is_draft_extend_v2():
            lens = lens.clamp(min=query_lens)  # of padding, which is a token long
        starts = torch.zeros(num_reqs + 1, dtype=torch.int32, device=lens.device)
        if isinstance(query_lens, int):
            starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=lens.device) * query_lens
            num_tokens = num_reqs * query_lens
        else:
            starts[1:] = query_lens.to(lens.device).cumsum(0)
            num_tokens = int(starts[-1]) if not on_device else batch.input_ids.numel() if drafted else int(batch.extend_num_tokens)
        known = None if self._glued or self._plans_in_graph(mode) else getattr(batch, "max_seq_len_host", None)
        most = ahead if isinstance(ahead, int) else batch.spec_info.draft_token_num
        longest = int(lens.max()) if not on_device and num_reqs else self.max_keys if known is None else known + most
        out = self._graph_table if graph else None
        rows = batch.req_pool_indices[:num_reqs]
        encoder = None if batch.encoder_lens is None else self._encoder(batch, rows, graph, on_device)
        behind = None if encoder is None else batch.encoder_lens[:num_reqs]
        table = block_table(self.req_to_token, rows, min(longest, self.max_keys), self.page_size, out, behind)
        unwritten = batch.out_cache_loc is None  # by steps over the target's own cache (FROZEN_KV_MTP)
        looked_at = not (graph or on_device or drafted or unwritten or (mode.is_decode() and self.device_text != "cpu"))
        if self._slot_check is not None and looked_at:
            self._slot_check(table, starts, lens, batch.out_cache_loc)
        drafts = self._drafts(batch, graph, None if on_device else lens) if mode.is_target_verify() else Drafts()
        prompts = mode.is_extend() and not mode.is_target_verify()
        self.forward_metadata = Step(self._num_steps, starts, lens, table, encoder, drafts, prompts, num_tokens, graph, on_device)

    def begin_step(self, starts: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, graph: bool) -> None:
        """Begins a step of one token a request with these arrays. Its first layer of each kind plans it, within the graph too where there is one."""
        self._num_steps += 1
        self.forward_metadata = Step(self._num_steps, starts, lens, table, None, Drafts(), False, lens.numel(), graph, self.on_device)

    def _query_lens(self, batch: Any, num_reqs: int) -> Tuple[Any, Any]:
        """Query tokens of each request, and how many of them seq_lens does not count: each as one number or int32 [requests]."""
        mode = batch.forward_mode
        if mode.is_decode():
            if batch.spec_info is not None:
                raise NotImplementedError(
                    "imbrex: expected steps that decode drafts to be planned by a draft worker's backends in SGLang, or without spec_info"
                )
            return 1, 0
        if mode.is_target_verify():
            drafts = drafts_of_each(batch.spec_info)
            return drafts, drafts
        if mode.is_draft_extend_v2():
            if batch.spec_info.num_front_tokens:
                raise NotImplementedError("imbrex: expected no tokens in front of a draft's extend in SGLang: SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX=0")
            return batch.spec_info.num_tokens_per_req, 0
        if mode.is_dllm_extend() or not mode.is_extend():
            raise NotImplementedError(f"imbrex: expected a step to extend, decode, mix or verify, got {mode.name}")
        if batch.extend_seq_lens_cpu is not None:
            return torch.as_tensor(batch.extend_seq_lens_cpu, dtype=torch.int32, device="cpu"), 0
        return batch.extend_seq_lens[:num_reqs].to(torch.int32), 0

    def _host_lens(self, batch: Any, num_reqs: int, query_lens: Any) -> Optional[torch.Tensor]:
        lens = batch.seq_lens if self.device_text == "cpu" else batch.seq_lens_cpu
        known = lens is not None and (isinstance(query_lens, int) or query_lens.device.type == "cpu")
        mode = batch.forward_mode
        drafted = mode.is_target_verify() or mode.is_draft_extend_v2() or (self.of_drafts and mode.is_decode())
        if not known or self.on_device and (self.settings.on_device == "always" or drafted):
            return None
        return torch.as_tensor(lens, device="cpu")[:num_reqs].to(torch.int32)

    def _encoder(self, batch: Any, rows: torch.Tensor, graph: bool, on_device: bool) -> Tuple[torch.Tensor, torch.Tensor]:
        """Lengths and table of the encoder's tokens, which are in front of each request's own."""
        lens = batch.encoder_lens[: rows.numel()].to(torch.int32)
        longest = self.max_keys
        if not on_device:
            known = getattr(batch, "encoder_lens_cpu", None)  # not in a graph's batch, nor of padding
            of_all = known is not None and len(known) == rows.numel()
            lens = torch.as_tensor(known, dtype=torch.int32, device="cpu") if of_all else lens.cpu()
            longest = int(lens.max()) if lens.numel() else 0
        return lens, block_table(self.req_to_token, rows, longest, 1, self._graph_encoder_table if graph else None)

    def _drafts(self, batch: Any, graph: bool, lens: Optional[torch.Tensor]) -> Drafts:
        drafts = drafts_of(batch.spec_info, batch.batch_size, lens, getattr(batch, "num_padding", 0), graph, self.device)
        if drafts.parents is not None and lens is not None:
            return drafts._replace(parents=drafts.parents.cpu())
        if drafts.mask is None or not graph:
            return drafts
        if self._graph_mask is None:
            width = batch.spec_info.draft_token_num
            self._graph_mask = torch.ones(self._graph_room[0] * width * (self.max_keys + width), dtype=torch.uint8, device=self.device)
        count = min(drafts.mask.numel(), self._graph_mask.numel())
        self._graph_mask[:count].copy_(drafts.mask[:count])
        return drafts._replace(mask=self._graph_mask if lens is None else self._graph_mask[:count])

    # Plans.

    def _update(self, kept: Kept, step: Step) -> None:
        if kept.batch != step.number:
            kept.batch = None
            step.update(kept.plan)
            kept.batch = step.number

    def _plan(self, layer: Any, q: torch.Tensor, sinks: Any) -> Plan:
        step = self.forward_metadata
        if step.drafts.mask is not None and layer.sliding_window_size > -1:
            raise NotImplementedError(
                f"imbrex: expected a tree of at most {MOST_TREE_TOKENS} draft tokens, and the links between them, with a sliding window, whose "
                "positions are depths in the tree, got a mask of all keys"
            )
        fields = self._spec_fields(layer, q, sinks is not None, step)
        key = tuple(fields.items())
        max_seq_len = self.max_keys + self.page_size
        if step.graph:
            room = self._graph_room
            limits = Limits(*room, max_seq_len, -(-room[1] // room[0]))
            kept = self._captured.get(key)
            if kept is None:
                kept = self._captured[key] = Kept(self._make(layer, fields, limits, workspace=self._workspace), limits)
        else:
            needed = Limits(step.seq_lens.shape[0], step.num_tokens, max_seq_len)
            kept = self._eager.find(key, needed, lambda limits: self._make(layer, fields, limits, ordered=True))
        self._update(kept, step)
        return kept.plan

    def _make(self, layer: Any, fields: Dict[str, Any], limits: Limits, **options: Any) -> Plan:
        spec = _core.AttentionSpec(**fields)
        plan = make_plan(spec, self.device_text, self.settings, on_device=self.on_device, **limits.arguments(), **options)
        check = "self check passed" if layer.layer_id in self._checked else "self check left out"
        check = "no pages to check" if spec.block_size == 0 else check
        announce(logger, plan, f"layers like layer {layer.layer_id}", check)
        return plan

    def _spec_fields(self, layer: Any, q: torch.Tensor, sinks: bool, step: Optional[Step] = None) -> Dict[str, Any]:
        """step: None for the check of a layer's pages, which has none of the step's own."""
        kv_dtype = type_name(getattr(self.token_to_kv_pool, "full_kv_pool", self.token_to_kv_pool).dtype)
        latent, expanded = self._is_latent(layer), self._is_expanded(layer)
        cross = step is not None and layer.is_cross_attention
        drafts = Drafts() if step is None or cross else step.drafts
        return dict(
            kind="encoder_decoder" if cross else "decoder",
            num_q_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim_qk=layer.qk_head_dim,
            head_dim_v=layer.v_head_dim,
            q_dtype=type_name(q.dtype),
            kv_dtype=type_name(q.dtype) if expanded else kv_dtype,
            kv_format="latent" if latent else "strided",
            block_size=0 if expanded else self.page_size,
            **mask_fields(layer, step is not None and step.prompts, self.chunk),
            scale=float(layer.scaling),
            soft_cap=float(layer.logit_cap or 0),
            sinks=sinks,
            score_mod="" if step is None else score_mod(layer, drafts),
            custom_mask=drafts.mask is not None,
            tree=drafts.tree,
        )

    # Layers.

    def _is_latent(self, layer: Any) -> bool:
        """Whether a layer's queries are absorbed: its keys are rows of a pool of latents."""
        dims = self.latent_dims
        return dims is not None and (layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim) == (1, sum(dims), dims[0])

    def _is_expanded(self, layer: Any) -> bool:
        """Whether a layer of such a model brings keys and values of all its heads."""
        return self.latent_dims is not None and not self._is_latent(layer)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        """One token a request: q [requests, heads * dim]. Returns [requests, heads * v_head_dim]."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        """Any number of tokens a request, behind what is in the cache; also the verification of drafts."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_mixed(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        """As forward_extend(): a request that decodes extends by one token."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _attend(self, q, k, v, layer, forward_batch, save_kv_cache, sinks=None, **kwargs):
        refuse_layer(layer, forward_batch, kwargs)
        if q.element_size() == 1:
            raise NotImplementedError(f"imbrex: expected queries of f32, bf16 or f16 in SGLang, got {q.dtype}")
        if self._is_expanded(layer):
            kv = self._own_keys(q, k, v, layer, forward_batch, save_kv_cache)
        else:
            self._check(layer, q)
            if k is not None and save_kv_cache:
                self._write(layer, KVWriteLoc.for_layer(forward_batch, layer), k, v)
            kv = kv_layer(self.token_to_kv_pool, layer, self.page_size)
        extras = {} if sinks is None else {"sinks": floats(sinks, q.device)}
        plan = self._plan(layer, q, sinks)
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = q.new_empty((q.shape[0], layer.tp_q_head_num * layer.v_head_dim))
        plan.run(q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim), kv, out.view(-1, layer.tp_q_head_num, layer.v_head_dim), **extras)
        return out

    def _own_keys(self, q, k, v, layer, batch, save_kv_cache) -> KvLayer:
        """Keys and values of a step's own tokens, which are all that its requests have."""
        prefixes = batch.extend_prefix_lens_cpu
        if save_kv_cache or prefixes is None or any(prefixes) or k is None or k.shape[0] != q.shape[0]:
            raise NotImplementedError(
                f"imbrex: expected keys of all heads for steps of new prompts alone in SGLang, got prefixes of {prefixes} tokens"
            )
        return KvLayer(k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim))

    def _write(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes new keys and values by the pool's own method, which may do more than that; it divides by the scales in place."""
        k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        if self.latent_dims is not None or (layer.k_scale is None and layer.v_scale is None):
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        else:
            self.token_to_kv_pool.set_kv_buffer(layer, where, k.clone(), v.clone(), layer.k_scale, layer.v_scale)

    def _check(self, layer: Any, q: torch.Tensor) -> None:
        """Checks a layer's pages before its first step."""
        if not self.settings.self_check or layer.layer_id in self._checked:
            return
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        pool, spec = self.token_to_kv_pool, _core.AttentionSpec(**self._spec_fields(layer, q, False))
        buffers = pool.get_kv_buffer(layer.layer_id)

        def write(plan: Plan, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
            self._write(layer, KVWriteLoc(slots), k, v)

        checked = CheckedLayer(
            name=f"layer {layer.layer_id}",
            spec=spec,
            kv=kv_layer(pool, layer, self.page_size),
            write=write,
            rows=lambda slots: tuple(rows_of(x, slots, self.page_size) for x in buffers),
            extras={},
            score={name: getattr(spec, name) for name in ("scale", "soft_cap", "window_left", "chunk")},
            first_block=1,  # slot 0 is that of padding, to which the pool's kernels for GPUs do not write
        )
        check_pages([checked], self.device_text, self.settings)
        self._checked.add(layer.layer_id)
