"""The arrays of a step of MLA as one object, in FlashInfer's newer form of plan(), and tensors in its newer form of run()."""
from dataclasses import dataclass
from typing import Any, Optional, Tuple

import torch

from ._wrapper import on_host


@dataclass(frozen=True)
class MLAPlanMetadata:
    """A step as CSR arrays (qo_indptr, kv_indptr, kv_indices, kv_len_arr), as a dense table (cum_seq_lens_q, block_tables, seq_lens), or both."""

    qo_indptr: Optional[torch.Tensor] = None
    kv_indptr: Optional[torch.Tensor] = None
    kv_indices: Optional[torch.Tensor] = None
    kv_len_arr: Optional[torch.Tensor] = None
    cum_seq_lens_q: Optional[torch.Tensor] = None
    block_tables: Optional[torch.Tensor] = None
    seq_lens: Optional[torch.Tensor] = None
    max_q_len: Optional[int] = None

    @classmethod
    def csr(cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor) -> "MLAPlanMetadata":
        """Starts of queries and of pages, the pages, and lengths."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)

    @classmethod
    def dense(
        cls, cum_seq_lens_q: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, max_q_len: Optional[int] = None
    ) -> "MLAPlanMetadata":
        """Starts of queries, a row of pages for each request, and lengths."""
        return cls(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens, max_q_len=max_q_len)

    @classmethod
    def dual(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        *,
        cum_seq_lens_q: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_q_len: Optional[int] = None,
    ) -> "MLAPlanMetadata":
        """Both, of which imbrex reads the CSR arrays."""
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)


def csr_arrays(metadata: MLAPlanMetadata, page_size: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qo_indptr, kv_indptr, kv_indices and kv_len_arr, made of the dense table where there are no others."""
    m = metadata
    given = m.qo_indptr, m.kv_indptr, m.kv_indices, m.kv_len_arr
    if all(x is not None for x in given):
        return given
    if any(x is not None for x in given) or m.cum_seq_lens_q is None or m.block_tables is None or m.seq_lens is None:
        raise TypeError("metadata: expected qo_indptr, kv_indptr, kv_indices and kv_len_arr, or cum_seq_lens_q, block_tables and seq_lens")
    lens = on_host(m.seq_lens, "seq_lens")
    table = m.block_tables
    if table.ndim != 2 or table.shape[0] < len(lens):
        raise ValueError(f"block_tables: expected [{len(lens)}, pages], got {list(table.shape)}")
    counts = (lens.clamp(min=0) + page_size - 1) // page_size
    if len(counts) and int(counts.max()) > table.shape[1]:
        raise ValueError(f"block_tables: expected {int(counts.max())} pages for {int(lens.max())} keys, got {list(table.shape)}")
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device="cpu")
    indptr[1:] = counts.cumsum(0)
    used = torch.arange(table.shape[1], dtype=torch.int32, device="cpu") < counts[:, None]
    return m.cum_seq_lens_q, indptr.to(m.seq_lens.device), table[: len(lens)][used.to(table.device)].to(torch.int32), m.seq_lens


def parts_of(value: Any, name: str, first_dim: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """The first first_dim columns and those behind them, of one tensor, of a pair, or of a pair of both (of which the one tensor is taken)."""
    if isinstance(value, tuple) and len(value) == 2:
        if not any(isinstance(x, tuple) for x in value):
            return value
        value = value[1] if isinstance(value[0], tuple) else value[0]
    if not torch.is_tensor(value):
        raise TypeError(f"{name}: expected a tensor or a pair of tensors, got {type(value).__name__}")
    return value[..., :first_dim], value[..., first_dim:]
