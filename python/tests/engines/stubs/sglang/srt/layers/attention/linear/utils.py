from dataclasses import dataclass
from enum import Enum

import torch


class LinearAttnKernelBackend(Enum):
    TRITON = "triton"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value):
        return cls.CUSTOM

    def is_triton(self):
        return self is LinearAttnKernelBackend.TRITON

    def is_custom(self):
        return self is LinearAttnKernelBackend.CUSTOM


@dataclass(frozen=True)
class LinearAttnBackends:
    decode: LinearAttnKernelBackend
    prefill: LinearAttnKernelBackend
    verify: LinearAttnKernelBackend


class Dispatcher:
    """Knows Triton's kernels alone."""

    def __init__(self, backends):
        for name in ("decode", "prefill", "verify"):
            if not getattr(backends, name).is_triton():
                raise ValueError(f"Unsupported {name} backend: {getattr(backends, name)}")
        self.decode_kernel = self.extend_kernel = self.verify_kernel = self.tree_verify_kernel = "triton"
        self.supports_packed_decode = self.supports_packed_decode_safe_gate = True


def backend_with(names, copies=False):
    """A backend whose methods find functions in `names`, the module's globals. copies: its prompts get contiguous copies of states that are not, as on GPUs."""

    class Backend:
        requires_contiguous_prefill_state = copies

        def __init__(self, model_runner):
            self.kernel_dispatcher = Dispatcher(model_runner.linear_attn_backends)

        def forward_decode(self, x, conv_states, weight, bias, indices):
            can_fuse = names.get("can_use_fused_qkvzba_causal_conv1d_update_contiguous")
            if can_fuse is not None and can_fuse(x)[0]:
                return "SGLang's fused kernel"
            return names["causal_conv1d_update"](x, conv_states, weight, bias, "silu", conv_state_indices=indices)

        def forward_extend(self, x, conv_states, weight, bias, indices, starts, earlier, *drafts):
            if drafts:
                return self.verify(x, conv_states, weight, bias, indices, *drafts)
            if self.requires_contiguous_prefill_state and not conv_states.is_contiguous():
                copied = conv_states[indices.long()].contiguous()
                own = torch.arange(len(indices), dtype=indices.dtype, device=indices.device)
                out = self.forward_extend(x, copied, weight, bias, own, starts, earlier)
                conv_states[indices.long()] = copied
                return out
            return names["causal_conv1d_fn"](
                x.transpose(0, 1),
                weight,
                bias,
                activation="silu",
                conv_states=conv_states,
                has_initial_state=earlier,
                cache_indices=indices,
                query_start_loc=starts,
                seq_lens_cpu=starts.diff().tolist(),
            )

        def verify(self, x, conv_states, weight, bias, indices, windows, rows, *tree):
            """A part of forward_extend(), for drafts."""
            trees = dict(zip(("retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token"), tree or [None] * 3))
            places = dict(conv_state_indices=indices, intermediate_conv_window=windows, intermediate_state_indices=rows)
            return names["causal_conv1d_update"](x, conv_states, weight, bias, "silu", **places, **trees)

    return Backend
