"""Layers with a state in vLLM: a backend whose metadata is a step that is planned already. Its layers are in state_layers.py."""

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Union

import torch
import vllm
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadata, CommonAttentionMetadata
from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from .._engine_drafts import DraftPlans, DraftStep
from .._engine_states import Kind, LayerPlans, StepPlans, announce
from ..engines import check_version
from . import WRITTEN_FOR
from .builders import BuilderSetup

check_version("vLLM", vllm.__version__, WRITTEN_FOR, least_patch=False)

logger = init_logger("vllm.imbrex")

_NULL_BLOCK = 0  # the block of requests that are not there


@dataclass
class StateMetadata(AttentionMetadata):
    """A step that the plans of its layers know; those of a step without real requests are None."""

    plans: Optional[Union[StepPlans, DraftStep]]

    def plans_of(self, kind: Kind) -> Optional[LayerPlans]:
        return None if self.plans is None else self.plans[kind]


class StateBuilder(BuilderSetup, ShortConvAttentionMetadataBuilder):
    """Plans for each kind of layer in a group; vLLM calls build() once a step and, where it replays a graph, before that.

    Nothing of the base class is used but its name: vLLM tells builders of a few classes how many drafts were accepted, and no others.
    """

    _cudagraph_support = AttentionCGSupport.ALWAYS
    reorder_batch_threshold = None
    supports_update_block_table = False

    def __init__(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        self._set_up(kv_cache_spec, layer_names, vllm_config, device)
        # The table that says which slot a request has is on the GPU alone, so steps are planned there.
        self.on_device = self.device_text != "cpu"
        self.num_drafts = vllm_config.num_speculative_tokens
        limits = self._limits()
        self.plans = self._make_plans(**limits)
        self.decode_plans = self._make_plans(**self._decode_limits(limits)) if self._decode_has_graphs() else self.plans
        self._announce()

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """With drafts a graph has a pass for each token of a request, so that a graph of decode holds steps whose requests all have as many."""
        return AttentionCGSupport.UNIFORM_BATCH if vllm_config.num_speculative_tokens else cls._cudagraph_support

    def _make_plans(self, **limits: int) -> Union[StepPlans, DraftPlans]:
        options = dict(limits, on_device=self.on_device, workspace=self.workspace)
        if self.num_drafts:
            plans = DraftPlans(self.device, self.device_text, self.settings, self.num_drafts, **options)
        else:
            plans = StepPlans(self.device_text, self.settings, **options)
        for layer in self.layers.values():
            plans.add(layer.kind)
        return plans

    def _refuse_configuration(self) -> None:
        super()._refuse_configuration()
        if self.settings.on_device == "never" and self.device_text != "cpu":
            raise ValueError('imbrex: expected on_device "auto" or "always" with layers that have a state on a GPU, got "never"')

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        *,
        num_accepted_tokens: Optional[torch.Tensor] = None,
        num_decode_draft_tokens_cpu: Optional[torch.Tensor] = None,
    ) -> StateMetadata:
        """num_decode_draft_tokens_cpu is -1 of requests that verify nothing, such as prompts; a request that might have had drafts has 0 of them."""
        cam = common_attn_metadata
        mode = self.vllm_config.cache_config.mamba_cache_mode
        table = mamba_get_block_table_tensor(cam.block_table_tensor, cam.seq_lens, self.kv_cache_spec, mode)
        slots = table[: cam.num_reqs, : 1 + self.num_drafts].to(torch.int32)
        if not self.on_device and not (slots[:, 0] != _NULL_BLOCK).any():  # a warm-up
            return StateMetadata(None)
        if self.num_drafts:
            drafts = torch.full((cam.num_reqs,), -1) if num_decode_draft_tokens_cpu is None else num_decode_draft_tokens_cpu[: cam.num_reqs]
            accepted = torch.ones_like(slots[:, 0]) if num_accepted_tokens is None else num_accepted_tokens[: cam.num_reqs]
            starts = cam.query_start_loc_cpu[: cam.num_reqs + 1]
            return StateMetadata(self.plans.update(starts, cam.seq_lens[: cam.num_reqs], slots, drafts >= 0, accepted))
        slots = slots[:, 0].contiguous()
        plans = self.decode_plans if cam.max_query_len == 1 else self.plans
        if self.on_device:
            plans.update_on_device(cam.query_start_loc[: cam.num_reqs + 1], cam.seq_lens[: cam.num_reqs], slots, cam.num_actual_tokens)
        else:
            plans.update(cam.query_start_loc_cpu[: cam.num_reqs + 1], cam.seq_lens[: cam.num_reqs], slots)
        return StateMetadata(plans)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> StateMetadata:
        """With drafts every request of such a batch verifies as many as it may."""
        cam = common_attn_metadata
        drafts = cam.query_start_loc_cpu.diff() - 1 if self.num_drafts else None
        return self.build(0, cam, num_decode_draft_tokens_cpu=drafts)

    def _announce(self) -> None:
        kinds: Dict[Kind, List[str]] = {}
        for name, layer in self.layers.items():
            kinds.setdefault(layer.kind, []).append(name)
        for kind, names in kinds.items():
            text = "1 layer" if len(names) == 1 else f"{len(names)} layers"
            announce(logger, self.plans[kind], f"{text} from {names[0]} on")


class StateBackend(AttentionBackend):
    """What vLLM asks for layers with a state. Their forward() is in the layers."""

    @staticmethod
    def get_name() -> str:
        return "IMBREX_STATES"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("imbrex: layers with a state have no attention implementation")

    @staticmethod
    def get_builder_cls() -> type:
        return StateBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
