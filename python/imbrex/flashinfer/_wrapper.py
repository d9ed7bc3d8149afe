"""The base of all wrappers: a device, plans, and steps made of FlashInfer's arrays."""
from typing import Any, Dict, Optional, Tuple

import torch

from ._masks import mask_arrays
from ._options import alibi_slopes, backend_name, check_layout, check_supported, refuse_jit
from ._plans import Limits, Plans, Step
from ._run import Result, Types, attend

_USUAL_SEQ_LEN = 131072


def as_tensor(array: Any) -> torch.Tensor:
    """A tensor as it is; lists and arrays on the host, whatever torch.set_default_device() says."""
    return array if torch.is_tensor(array) else torch.as_tensor(array, device="cpu")


def on_host(array: Any, name: str) -> torch.Tensor:
    """An array that plan() reads, as int32 on the host. From a GPU it is copied, which waits for the stream."""
    array = as_tensor(array)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected 1 dimension, got {list(array.shape)}")
    return array.detach().to("cpu", torch.int32).contiguous()


def check_starts(starts: torch.Tensor, name: str) -> None:
    if not len(starts) or int(starts[0]) != 0:
        raise ValueError(f"{name}: expected [num_reqs + 1] that begins with 0, got {starts[:4].tolist()}")


def cut_starts(given: Any, starts: torch.Tensor, name: str, num_reqs: int, of: str) -> Tuple[torch.Tensor, torch.Tensor]:
    """The array and a copy on the host, both cut to [num_reqs + 1], since FlashInfer reads no further. of: an array with num_reqs entries."""
    if len(starts) <= num_reqs:
        raise ValueError(f"{name}: expected {num_reqs + 1} entries, for the {num_reqs} requests of {of}, got {len(starts)}")
    return as_tensor(given)[: num_reqs + 1], starts[: num_reqs + 1]


def lens_of_pages(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Keys of each request, all on the host: none without pages."""
    check_starts(indptr, "kv_indptr")
    pages = indptr[1:] - indptr[:-1]
    if len(last_page_len) != len(pages):
        raise ValueError(f"last_page_len: expected [{len(pages)}], got {list(last_page_len.shape)}")
    wrong = (pages > 0) & ((last_page_len < 1) | (last_page_len > page_size))
    if wrong.any():
        r = int(wrong.nonzero()[0])
        raise ValueError(f"last_page_len: expected 1 to {page_size}, got {int(last_page_len[r])} for request {r}")
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len, 0).to(torch.int32)


def check_room(indptr: torch.Tensor, lens: torch.Tensor, page_size: int) -> None:
    """Whether there are pages for kv_len_arr, all on the host."""
    check_starts(indptr, "kv_indptr")
    room = (indptr[1:] - indptr[:-1]) * page_size
    if len(room) != len(lens) or bool((lens > room).any()):
        raise ValueError(f"kv_len_arr: expected at most {room.tolist()} keys, for which there are pages, got {lens.tolist()}")


def check_lens(given: Optional[torch.Tensor], lens: torch.Tensor, name: str) -> None:
    """Checks that an argument which only FlashInfer's other backends need agrees with the others. A request without keys may be padding in it."""
    if given is None:
        return
    given = as_tensor(given).detach().to("cpu", torch.int64).flatten()
    if len(given) != len(lens) or bool(((given != lens) & (lens > 0)).any()):
        raise ValueError(f"{name}: expected {lens.tolist()}, as the other arrays say, got {given.tolist()}")


class Buffers:
    """The user's arrays of a wrapper for graphs, which plan() fills and kernels read in place."""

    def __init__(self, **buffers: Any) -> None:
        for name, buffer in buffers.items():
            if not torch.is_tensor(buffer):
                raise ValueError(f"{name}: expected a tensor with use_cuda_graph=True, got {type(buffer).__name__}")
        self.all: Dict[str, torch.Tensor] = buffers
        for name, buffer in buffers.items():
            if buffer.dtype != torch.int32 or buffer.ndim != 1 or not buffer.is_contiguous():
                raise ValueError(f"{name}: expected contiguous torch.int32 with 1 dimension, got {buffer.dtype} {list(buffer.shape)}")

    def check_sizes(self, first: str, **more: int) -> None:
        """Buffers of one batch: each as long as the first and so many entries more."""
        for name, extra in more.items():
            if len(self.all[name]) != len(self.all[first]) + extra:
                raise ValueError(
                    f"{name}: expected a buffer of {len(self.all[first]) + extra} beside {first} of {len(self.all[first])}, got "
                    f"{len(self.all[name])}"
                )

    def fill(self, name: str, values: torch.Tensor, non_blocking: bool, part: bool = False) -> torch.Tensor:
        """The whole buffer, after `values` were written to it, or with `part` to its beginning."""
        buffer = self.all[name]
        if len(values) > len(buffer) or (len(values) < len(buffer) and not part):
            raise ValueError(f"{name}: expected {'at most ' if part else ''}{len(buffer)} values, as large as the buffer, got {len(values)}")
        buffer[: len(values)].copy_(values, non_blocking=non_blocking)
        return buffer


class Wrapper:
    """plan() once a step, run() once a layer. imbrex owns its scratch: of float_workspace_buffer the device counts, and nothing else.

    max_seq_len: with use_cuda_graph, keys of a request that later steps may have; scratch grows with it. To be set before the first plan().
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        refuse_jit(jit_args, jit_kwargs)
        self.device = float_workspace_buffer.device
        self.max_seq_len = _USUAL_SEQ_LEN
        self._kv_layout = check_layout(kv_layout)
        self._use_cuda_graph = use_cuda_graph
        self._plans = Plans(self.device, backend_name(backend), use_cuda_graph)
        self._types: Optional[Types] = None
        self._alibi = False
        self._mask_room: Optional[torch.Tensor] = None
        self._most_tokens: Optional[int] = None  # with use_cuda_graph: query tokens of the first step

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: Any) -> None:
        """Does nothing: there is no workspace. The buffers have to be on the wrapper's device."""
        if float_workspace_buffer.device != self.device:
            raise ValueError(f"float_workspace_buffer: expected memory of {self.device}, got {float_workspace_buffer.device}")

    def end_forward(self) -> None:
        """Does nothing."""

    def workspace_size(self, *args: Any, **kwargs: Any) -> Tuple[int, int]:
        """Bytes of workspace that a plan() with these arguments needs: (0, 0)."""
        return 0, 0

    def _begin(self, fields: Dict[str, Any], types: Types, step: Step, most_keys: Optional[int] = None) -> None:
        """most_keys: more than these no request can have, with use_cuda_graph."""
        check_supported(types.q, types.kv, fields["head_dim_qk"], fields.get("head_dim_v", fields["head_dim_qk"]))
        limits = None
        if self._use_cuda_graph:
            needs = step.needs
            if self._most_tokens is None:
                self._most_tokens = needs.num_tokens
            elif needs.num_tokens > self._most_tokens:
                raise ValueError(f"qo_indptr: expected at most {self._most_tokens} tokens, those of the first plan(), got {needs.num_tokens}")
            longest = max(self.max_seq_len, needs.seq_len)
            longest = longest if most_keys is None else min(longest, most_keys)
            limits = Limits(len(step.seq_lens), self._most_tokens, longest, step.query_len)
        self._types, self._alibi = types, fields["alibi"]
        if self._alibi:
            alibi_slopes(fields["num_q_heads"], self.device)  # are there before a graph needs them
        self._plans.begin({**fields, **types.fields()}, step, limits)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, changes: Optional[Dict[str, Any]] = None, **options: Any) -> Result:
        if self._types is None:
            raise RuntimeError("imbrex.flashinfer: run() before plan()")
        changes = changes or {}
        return attend(self._plans, self._types, q, k, v, alibi=changes.get("alibi", self._alibi), changes=changes, **options)

    def _paged_arrays(
        self, buffers: Optional[Buffers], indptr: torch.Tensor, indices: torch.Tensor, mask: Optional[Dict[str, torch.Tensor]], non_blocking: bool
    ) -> Dict[str, torch.Tensor]:
        """The arrays that say where pages are: all on the host if the indices are there (except for graphs and custom masks), else all on the device."""
        indices = as_tensor(indices).detach()
        if indices.ndim != 1:
            raise ValueError(f"kv_indices: expected 1 dimension, got {list(indices.shape)}")
        if buffers is not None:
            arrays = dict(
                kv_indptr=buffers.fill("kv_indptr", indptr, non_blocking),
                kv_indices=buffers.fill("kv_indices", indices, non_blocking, part=True),
            )
        else:
            where = indices.device if mask is None else self.device
            arrays = {n: x.to(where, torch.int32).contiguous() for n, x in (("kv_indptr", indptr), ("kv_indices", indices))}
        return {**arrays, **(mask or {})}

    def _mask(
        self,
        custom_mask: Optional[torch.Tensor],
        packed_custom_mask: Optional[torch.Tensor],
        starts: torch.Tensor,
        lens: torch.Tensor,
        custom_mask_buf: Optional[torch.Tensor],
        mask_indptr_buf: Optional[torch.Tensor],
    ) -> Optional[Dict[str, torch.Tensor]]:
        """What mask_arrays() makes on the device. With use_cuda_graph always bits at one place, as many as custom_mask_buf holds."""
        if custom_mask is None and packed_custom_mask is None:
            return None
        if self._use_cuda_graph and self._mask_room is None:
            if custom_mask_buf is None or mask_indptr_buf is None:
                raise ValueError("custom_mask_buf and mask_indptr_buf: expected tensors for custom masks with use_cuda_graph=True, got None")
            self._mask_room = torch.empty(custom_mask_buf.numel(), dtype=torch.uint8, device=self.device)
        counts = ((starts[1:] - starts[:-1]).long() * lens.long()).tolist()
        return mask_arrays(custom_mask, packed_custom_mask, counts, self.device, self._mask_room)
