"""The steps of a draft model that decodes one token of each branch at a time: SGLang asks one object for the backends of all of them.

The branches of a request (top-k of them) are requests to imbrex. Their tables are of the committed tokens and of the branch's own drafts, so that
they are the same in every step; only the lengths grow by one. On a GPU lengths and plans are made anew within the graph of all steps.
"""

from typing import Any, Dict, List, Optional

import torch
from sglang.srt.speculative.spec_utils import resolve_draft_decode_window

from ..plan import Workspace
from .backend import Backend, Step
from .pages import branch_table

Tensor = torch.Tensor


class StepBackend(Backend):
    """The backend of a draft model's step, which its DraftSteps plans. SGLang asks it for the attention of layers alone."""

    def __init__(self, runner: Any, index: int, workspace: Optional[Workspace]) -> None:
        super().__init__(runner)
        self.index = index  # so many drafts of a branch are in the cache before this step's
        self._workspace = workspace or self._workspace
        self._recent, self._first = resolve_draft_decode_window(runner)

    def _spec_fields(self, layer: Any, q: Tensor, sinks: bool, step: Optional[Step] = None) -> Dict[str, Any]:
        """With --speculative-draft-window-size a draft sees the last tokens of the committed ones, the first of them, and those of its branch."""
        fields = super()._spec_fields(layer, q, sinks, step)
        if step is None or not self._recent:
            return fields
        reach = self._recent + self.index
        if not self._first:
            return {**fields, "window_left": reach}
        return {**fields, "mask_mod": f"kv < {self._first} | q - kv <= {reach}"}


class DraftSteps:
    """What SGLang calls a multi-step draft backend: one backend for each step but the last, of which it samples alone."""

    def __init__(self, runner: Any, topk: int, speculative_num_steps: int) -> None:
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.attn_backends: List[StepBackend] = []
        for index in range(speculative_num_steps - 1):
            self.attn_backends.append(StepBackend(runner, index, self.attn_backends[0]._workspace if index else None))
        first = self.attn_backends[0]
        self.on_device, self.needs_cpu_seq_lens = first.on_device, first.needs_cpu_seq_lens
        self.page_size, self.max_keys, self.device = first.page_size, first.max_keys, first.device
        self._table: Optional[Tensor] = None  # of graphs, at one address

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plans steps that run outside of a graph."""
        if forward_batch.forward_mode.is_idle():
            return
        lens = self._lens(forward_batch)
        self._begin(lens, self._fill_table(forward_batch, lens), graph=False)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        columns = -(-self.max_keys // self.page_size)
        self._table = torch.zeros((max_bs * self.topk, columns), dtype=torch.int32, device=self.device)
        for backend in self.attn_backends:
            backend.begin_graphs(max_bs * self.topk, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fills the table that a graph's plans read; on a CPU, which has no graphs, also begins the steps."""
        if forward_batch.forward_mode.is_idle():
            return
        lens = self._lens(forward_batch)
        table = self._fill_table(forward_batch, lens, self._table)
        if not self.on_device:
            self._begin(lens, table, graph=True)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Begins the steps of a graph, whose layers plan them from the lengths that are on the GPU when it is replayed."""
        if self.on_device:
            lens = self._lens(forward_batch)
            self._begin(lens, self._table[: lens.numel() * self.topk], graph=True)

    def _lens(self, batch: Any) -> Tensor:
        """Committed tokens of each request, int32 where plans read lengths."""
        return batch.seq_lens[: batch.batch_size].to(torch.int32)

    def _fill_table(self, batch: Any, lens: Tensor, out: Optional[Tensor] = None) -> Tensor:
        known = getattr(batch, "max_seq_len_host", None)
        longest = self.max_keys if known is None else known
        if not self.on_device:
            longest = int(lens.max()) if lens.numel() else 0
        rows, steps = batch.req_pool_indices[: lens.numel()], self.speculative_num_steps
        num_keys = min(longest + steps, self.max_keys)
        return branch_table(self.attn_backends[0].req_to_token, rows, lens, num_keys, self.page_size, self.topk, steps, out)

    def _begin(self, lens: Tensor, table: Tensor, graph: bool) -> None:
        lens = lens.repeat_interleave(self.topk) if self.topk > 1 else lens
        starts = torch.arange(lens.numel() + 1, dtype=torch.int32, device=lens.device)
        for backend in self.attn_backends:
            backend.begin_step(starts, lens + backend.index + 1, table, graph)
