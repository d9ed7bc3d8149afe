"""Steps with drafts for layers with a state, in engines that keep the state behind each token of a step in a slot of its own. No engine is imported here.

vLLM gives a request 1 + num_drafts slots: the state behind the step's i-th token goes to the i-th of them, and the next step begins at the slot of the last
token that was accepted. These slots may be anywhere, so the recurrence is computed in passes, one for each token of the requests that verify drafts: a pass
reads the slot that the pass before it has written. A convolution has all its rows in the first slot, which is how plans with drafts have them: one call.
"""
from functools import partial
from typing import Any, List, NamedTuple, Optional, Union

import torch

from ._engine_states import Kind, LayerPlans, StepPlans
from .engines import Settings
from .plan import Workspace
from .recurrent import RecurrentPlan

Tensor = torch.Tensor


def _rows(at: Tensor) -> Union[slice, Tensor]:
    """Increasing numbers of rows as a slice, if their distances are equal: it makes a view."""
    first, last = (int(at[0]), int(at[-1])) if len(at) else (0, -1)
    step = max(1, (last - first) // max(1, len(at) - 1))
    return slice(first, last + 1, step) if torch.equal(at, torch.arange(first, last + 1, step, dtype=at.dtype)) else at


class _Pass(NamedTuple):
    plans: StepPlans
    tokens: Union[slice, Tensor]


class _Passes:
    """Has what layers use of a RecurrentPlan, for the passes of a step."""

    def __init__(self, plans: List[RecurrentPlan], tokens: List[Union[slice, Tensor]], spec: Any) -> None:
        self._passes, self.spec = list(zip(plans, tokens)), spec

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        *,
        gate: Optional[Tensor] = None,
        beta: Optional[Tensor] = None,
        out: Optional[Tensor] = None,
        **parameters: Any,
    ) -> Tensor:
        """As RecurrentPlan.run()."""
        out = torch.empty_like(v, memory_format=torch.contiguous_format) if out is None else out
        for plan, tokens in self._passes:
            q_of, k_of, v_of, gate_of, beta_of = (None if x is None else x[tokens] for x in (q, k, v, gate, beta))
            inputs = dict(parameters, gate=gate_of, beta=beta_of)
            if isinstance(tokens, slice):
                plan.run(q_of, k_of, v_of, state, out=out[tokens], **inputs)
            else:
                out[tokens] = plan.run(q_of, k_of, v_of, state, **inputs)
        return out


class DraftStep:
    """What a step of DraftPlans is computed with."""

    def __init__(self, convs: StepPlans, passes: List[_Pass], like: StepPlans) -> None:
        self._convs, self._passes, self._like = convs, passes, like

    def __getitem__(self, kind: Kind) -> LayerPlans:
        conv = self._convs[Kind(kind.conv)].conv
        if kind.recurrence is None:
            return LayerPlans(conv, None)
        recurrence = Kind(None, kind.recurrence)
        plans = [one.plans[recurrence].recurrence for one in self._passes]
        return LayerPlans(conv, _Passes(plans, [one.tokens for one in self._passes], self._like[recurrence].recurrence.spec))


class DraftPlans:
    """The plans of some kinds of layers whose convolutions have `num_drafts`. For one thread at a time, and one stream."""

    def __init__(
        self,
        device: torch.device,
        name: str,
        chosen: Settings,
        num_drafts: int,
        *,
        on_device: bool = False,
        workspace: Optional[Workspace] = None,
        max_num_reqs: int,
        max_num_tokens: int,
        max_seq_len: int,
    ) -> None:
        make = partial(StepPlans, name, chosen, on_device=on_device, workspace=workspace, max_num_reqs=max_num_reqs, max_seq_len=max_seq_len)
        self._device, self._on_device, self._recurrent = device, on_device, False
        self._convs, self._prompts = make(max_num_tokens=max_num_tokens), make(max_num_tokens=max_num_tokens)
        self._tokens = [make(max_num_tokens=max_num_reqs) for _ in range(1 + num_drafts)]

    def add(self, kind: Kind) -> None:
        self._convs.add(Kind(kind.conv))
        if kind.recurrence is not None:
            self._recurrent = True
            for plans in (self._prompts, *self._tokens):
                plans.add(Kind(None, kind.recurrence))

    def __getitem__(self, kind: Kind) -> LayerPlans:
        """For what is said of them."""
        recurrence = None if kind.recurrence is None else self._prompts[Kind(None, kind.recurrence)].recurrence
        return LayerPlans(self._convs[Kind(kind.conv)].conv, recurrence)

    def update(self, starts: Tensor, seq_lens: Tensor, slots: Tensor, verifies: Tensor, accepted: Tensor) -> DraftStep:
        """One step of requests: starts [n + 1] int32 and verifies [n] bool are on the host; seq_lens [n], slots [n, 1 + num_drafts] and accepted [n] int32 where the
        plans' steps are. All tokens of a request that verifies, but the first one, are drafts; it begins behind `accepted` tokens of the step before, at least one.
        """
        lens = starts.diff()
        verifies = verifies & (lens > 0)
        drafts = torch.where(verifies, lens - 1, 0).to(torch.int32)
        there, columns = verifies.to(self._device), slots.t().contiguous()
        kept = torch.where(there, accepted - 1, 0).to(torch.int32)
        self._update(self._convs, starts, seq_lens, columns[0], num_drafts=drafts.to(self._device), accepted_drafts=kept)
        passes = self._passes(starts, seq_lens, columns, verifies, kept) if self._recurrent else []
        return DraftStep(self._convs, passes, self._prompts)

    def _passes(self, starts: Tensor, seq_lens: Tensor, columns: Tensor, verifies: Tensor, kept: Tensor) -> List[_Pass]:
        """Few tokens of a prompt go through passes too, in their slot: a graph of decode has nothing else, and vLLM may take it for a prompt of as many tokens."""
        lens, passes = starts.diff(), []
        prompts = ~verifies & (lens > len(self._tokens))
        if prompts.any():
            tokens = torch.repeat_interleave(prompts, lens).nonzero().flatten()
            self._update(self._prompts, _starts(torch.where(prompts, lens, 0)), seq_lens, columns[0])
            passes.append(_Pass(self._prompts, self._there(_rows(tokens))))
        others, there = lens[~prompts], verifies.to(self._device)
        before, lens_there = seq_lens - lens.to(self._device), lens.to(self._device)
        sources = columns.gather(0, kept[None].long())[0]
        for i in range(int(others.max()) if len(others) else 0):
            own, slots = ~prompts & (lens > i), torch.where(there, columns[i], columns[0])
            lengths = before + lens_there.clamp(max=i + 1)
            self._update(self._tokens[i], _starts(own), lengths, slots, source_slots=sources)
            passes.append(_Pass(self._tokens[i], self._there(_rows((starts[:-1] + i)[own].long()))))
            sources = slots
        return passes

    def _there(self, tokens: Union[slice, Tensor]) -> Union[slice, Tensor]:
        return tokens if isinstance(tokens, slice) else tokens.to(self._device)

    def _update(self, plans: StepPlans, starts: Tensor, seq_lens: Tensor, slots: Tensor, **options: Tensor) -> None:
        if self._on_device:
            plans.update_on_device(starts.to(self._device), seq_lens, slots, int(starts[-1]), **options)
        else:
            plans.update(starts, seq_lens, slots, **options)


def _starts(lens: Tensor) -> Tensor:
    return torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
