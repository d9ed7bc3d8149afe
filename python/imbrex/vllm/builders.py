"""What builders of vLLM have in common, whatever their layers: settings, the layers of the group, and the limits of its plans."""

from functools import cached_property
from typing import Any, ClassVar, Dict, List

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionMetadataBuilder

from ..engines import device_text, settings, shared_workspace
from ..plan import Workspace


class BuilderSetup:
    """In front of a class of vLLM's builders."""

    overlaps: ClassVar[bool] = False  # whether the halves of a step may be computed by turns on two streams (dual batch overlap)

    def _set_up(self, kv_cache_spec: Any, layer_names: List[str], vllm_config: Any, device: torch.device) -> None:
        """The first thing that __init__ does."""
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        given = vllm_config.additional_config
        self.settings = settings(given.get("imbrex") if isinstance(given, dict) else None)
        self.device_text = device_text(device)
        self._refuse_configuration()
        self._take_layers()

    def _take_layers(self) -> None:
        self._num_names = len(self.layer_names)
        self.layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, self.layer_names)

    def _plan_layers(self) -> None:
        """Plans for the layers of the group."""
        raise NotImplementedError

    def _plan_added_layers(self) -> None:
        """The first thing of a step: vLLM's proposers make the builder of a draft's first layer, and add the names of the others to the same list behind that."""
        if len(self.layer_names) > self._num_names:
            self._take_layers()
            self._plan_layers()

    @cached_property
    def workspace(self) -> Workspace:
        """Scratch that all plans of the device share; with dual batch overlap, whose halves have builders of their own, those of a builder."""
        return Workspace(self.device_text) if self.vllm_config.parallel_config.use_ubatching else shared_workspace(self.device_text)

    def _refuse_configuration(self) -> None:
        if self.vllm_config.parallel_config.use_ubatching and not self.overlaps:
            raise NotImplementedError("imbrex: expected one stream for a step, got dual batch overlap, whose halves have their own")

    def _limits(self, ahead: int = 0) -> Dict[str, int]:
        """Of plans of all steps. Lengths may be `ahead` of what vLLM has decided, and a step have so many tokens more of each request."""
        scheduler = self.vllm_config.scheduler_config
        max_num_tokens = max(scheduler.max_num_batched_tokens, self._most_captured()) + scheduler.max_num_seqs * ahead
        return dict(
            max_num_reqs=scheduler.max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_seq_len=max(self.vllm_config.model_config.max_model_len + ahead, max_num_tokens),  # warm-up steps have lengths of their own
        )

    def _decode_limits(self, limits: Dict[str, int]) -> Dict[str, int]:
        """Of plans of steps with one token a request."""
        return dict(limits, max_num_tokens=max(limits["max_num_reqs"], self._most_captured()))

    def _most_captured(self) -> int:
        return self.vllm_config.compilation_config.max_cudagraph_capture_size or 0

    def _decode_has_graphs(self) -> bool:
        """Whether full graphs are captured of decode alone, and other steps have none: what a graph of a plan launches is what the plan's limits
        allow, so that those of a plan with one token a request have no launches for prompts."""
        mode = getattr(self.vllm_config.compilation_config, "cudagraph_mode", None)
        return self.vllm_config.speculative_config is None and mode is not None and mode.separate_routine()
