"""Block-sparse attention, through page tables: blocks of keys are pages, and rows of blocks are requests."""
from typing import Any, Optional

import torch

from ._masks import mask_arrays
from ._options import DTypeLike, refuse, refuse_given, score_fields, torch_dtype
from ._plans import Step
from ._run import Result, Scale, Types, scales_of
from ._wrapper import Wrapper, as_tensor, check_starts, on_host


def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """A mask of blocks [nnz, R, C] as rows of all keys that a row of blocks sees, flat: row by row, request by request."""
    starts = on_host(indptr, "indptr").tolist()
    return torch.cat([mask[a:b].transpose(0, 1).reshape(-1) for a, b in zip(starts, starts[1:])] or [mask.reshape(-1)])


class BlockSparseAttentionWrapper(Wrapper):
    """Blocks of R queries by C keys, from a BSR matrix that all heads share.

    It costs what dense attention over the blocks that are there costs, by pages of C keys: small C is slow on GPUs, as small pages are. A
    mask within blocks takes a byte for each (query, key) and the kernels for custom masks.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, "NHD", False, backend)
        self._block = 0

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Optional[torch.Tensor] = None,
        packed_mask: Optional[torch.Tensor] = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        q_data_type: DTypeLike = "float16",
        kv_data_type: Optional[DTypeLike] = None,
        o_data_type: DTypeLike = "float16",
        non_blocking: bool = True,
        block_mask: Optional[torch.Tensor] = None,
    ) -> None:
        """indptr [ceil(M / R) + 1] and indices [indptr[-1]]: blocks of keys that each row of blocks sees, of M queries and N keys.

        mask bool [nnz, R, C] hides within blocks; packed_mask is the same as segment_packbits of convert_bsr_mask_layout. `causal` counts
        positions in the keys that a row of blocks sees, put together, as FlashInfer does; it has no effect beside a mask.
        """
        refuse_given("masks of each head are those of VariableBlockSparseAttentionWrapper", block_mask=block_mask)
        q_type = torch_dtype(q_data_type)
        types = Types(q_type, torch_dtype(kv_data_type or q_type), torch_dtype(o_data_type))
        starts = on_host(indptr, "indptr")
        check_starts(starts, "indptr")
        rows = len(starts) - 1
        if rows != -(-M // R) or N % C:
            raise ValueError(f"expected indptr of ceil(M / R) + 1 entries and N divisible by C, got {len(starts)}, M={M}, R={R}, N={N}, C={C}")
        columns = on_host(indices, "indices")
        if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < N // C:
            raise ValueError(f"indices: expected 0 to {N // C - 1}, got {int(columns.min())} to {int(columns.max())}")
        lens = (starts[1:] - starts[:-1]) * C
        queries = torch.clamp(torch.arange(rows + 1, dtype=torch.int32, device="cpu") * R, max=M)
        if mask is not None and packed_mask is None and M % R:  # the last row of blocks has fewer queries
            last = mask[int(starts[-2]) :, : M % R].transpose(0, 1).reshape(-1)
            mask = torch.cat([convert_bsr_mask_layout(mask[: int(starts[-2])], starts[:-1]), last])
        elif mask is not None and packed_mask is None:
            mask = convert_bsr_mask_layout(mask, starts)
        counts = ((queries[1:] - queries[:-1]).long() * lens.long()).tolist()
        arrays = mask_arrays(mask, packed_mask, counts, self.device)
        self._block = C
        fields = dict(
            kind="encoder_decoder",  # there may be fewer keys than queries
            num_q_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            block_size=C,
            causal=bool(causal) and arrays is None,
            custom_mask=arrays is not None,
            **score_fields(pos_encoding_mode, -1, logits_soft_cap, sm_scale),
        )
        self._begin(fields, types, Step(queries, lens, self._paged_arrays(None, starts, indices, arrays, non_blocking)))

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
    ) -> Result:
        """q [M, num_qo_heads, head_dim], k and v [N, num_kv_heads, head_dim]. Returns out of o_data_type, with return_lse (out, lse)."""
        return self._sparse(q, k, v, {}, (scale_q, scale_k, scale_v), out=out, lse=lse, return_lse=return_lse)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: Scale = None,
        scale_k: Scale = None,
        scale_v: Scale = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> Result:
        """Deprecated: run() with options of its own in the place of plan()'s."""
        return self._sparse(q, k, v, score_fields(pos_encoding_mode, -1, logits_soft_cap, sm_scale), (scale_q, scale_k, scale_v))

    def _sparse(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, changes: Any, scales: Any, **options: Any) -> Result:
        pages = [x.unflatten(0, (-1, self._block)) if self._block else x for x in (k, v)]
        return self._attend(q, *pages, changes, **scales_of((), q, *scales), **options)


class VariableBlockSparseAttentionWrapper(Wrapper):
    """Blocks of any sizes, with a pattern and sizes for each kv head.

    Every key is a page of its own, and every (kv head, row of blocks) a request with one kv head: plan() writes an index for each key that
    a row of blocks sees, run() copies q and the output for groups of more than one head, and GPUs load such keys one by one. For blocks of
    one size that heads share BlockSparseAttentionWrapper is faster.
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, "NHD", False, backend)
        self._num_kv_heads = 0

    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
        non_blocking: bool = True,
        q_data_type: DTypeLike = "float16",
        kv_data_type: Optional[DTypeLike] = None,
    ) -> None:
        """block_mask_map bool [num_kv_heads, MB, NB], block_row_sz [num_kv_heads, MB], block_col_sz [num_kv_heads, NB].

        `causal` counts positions in the keys that a row of blocks sees, put together, as FlashInfer does.
        """
        q_type = torch_dtype(q_data_type)
        types = Types(q_type, torch_dtype(kv_data_type or q_type), q_type)
        seen, rows, columns = (as_tensor(t).detach().cpu() for t in (block_mask_map, block_row_sz, block_col_sz))
        if seen.ndim != 3 or rows.shape != seen.shape[:2] or columns.shape != (seen.shape[0], seen.shape[2]) or len(seen) != num_kv_heads:
            raise ValueError(
                f"expected block_mask_map [{num_kv_heads}, MB, NB], block_row_sz [.., MB] and block_col_sz [.., NB], got "
                f"{list(seen.shape)}, {list(rows.shape)} and {list(columns.shape)}"
            )
        if num_qo_heads % num_kv_heads:
            raise ValueError(f"num_qo_heads: expected a multiple of {num_kv_heads}, got {num_qo_heads}")
        seen, rows, columns = seen.bool(), rows.long(), columns.long()
        if len({*rows.sum(1).tolist()}) > 1 or len({*columns.sum(1).tolist()}) > 1:
            raise ValueError("block_row_sz and block_col_sz: expected the same sums for all heads, the lengths of q and k")
        lens = (seen * columns[:, None, :]).sum(-1).flatten()
        # Keys of all heads lie one head after the other. An index is where its block begins, and which key of the block it is.
        begins = (columns.flatten().cumsum(0) - columns.flatten()).view_as(columns)
        head, _, column = seen.nonzero(as_tuple=True)
        sizes = columns[head, column]
        ends = sizes.cumsum(0)
        within = torch.arange(int(sizes.sum()), device="cpu") - torch.repeat_interleave(ends - sizes, sizes)
        indices = (torch.repeat_interleave(begins[head, column], sizes) + within).to(torch.int32)
        starts = torch.nn.functional.pad(rows.flatten().cumsum(0), (1, 0)).to(torch.int32)
        indptr = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
        self._num_kv_heads = num_kv_heads
        fields = dict(
            kind="encoder_decoder",  # there may be fewer keys than queries
            num_q_heads=num_qo_heads // num_kv_heads,
            num_kv_heads=1,
            head_dim_qk=head_dim,
            block_size=1,
            causal=bool(causal),
            **score_fields(pos_encoding_mode, -1, logits_soft_cap, sm_scale),
        )
        self._check_alibi(fields)
        arrays = self._paged_arrays(None, indptr, indices.to(self.device, non_blocking=non_blocking), None, non_blocking)
        self._begin(fields, types, Step(starts, lens.to(torch.int32), arrays))

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        enable_pdl: Optional[bool] = None,
    ) -> Result:
        """q [num_qo_heads, qo_len, head_dim], k and v [num_kv_heads, kv_len, head_dim]. Returns out of q's shape, or with return_lse both.

        lse is float32 [num_qo_heads, qo_len] in base 2. out and lse, if given, are of these shapes.
        """
        return self._sparse(q, k, v, {}, out, lse, return_lse)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: Optional[float] = None,
        sm_scale: Optional[float] = None,
        rope_scale: Optional[float] = None,
        rope_theta: Optional[float] = None,
    ) -> Result:
        """Deprecated: run() with options of its own in the place of plan()'s."""
        return self._sparse(q, k, v, score_fields(pos_encoding_mode, -1, logits_soft_cap, sm_scale), None, None, False)

    def _check_alibi(self, fields: Any) -> None:
        if fields.get("alibi") and self._num_kv_heads > 1:
            refuse("pos_encoding_mode='ALIBI' with several kv heads", "make a wrapper for each of them")

    def _sparse(self, q, k, v, changes: Any, out: Optional[torch.Tensor], lse: Optional[torch.Tensor], return_lse: bool) -> Result:
        self._check_alibi(changes)
        heads, length, dim = q.shape
        kv_heads = max(self._num_kv_heads, 1)
        tokens = q.unflatten(0, (kv_heads, -1)).transpose(1, 2).reshape(kv_heads * length, heads // kv_heads, dim)
        pages = [x.reshape(-1, 1, 1, x.shape[-1]) for x in (k, v)]
        own, own_lse = self._attend(tokens, *pages, changes, return_lse=True)
        own = own.unflatten(0, (kv_heads, length)).transpose(1, 2).reshape(heads, length, -1)
        own_lse = own_lse.unflatten(0, (kv_heads, length)).transpose(1, 2).reshape(heads, length)
        for name, given, made in (("out", out, own), ("lse", lse, own_lse)):
            if given is not None and (given.shape != made.shape or given.dtype != made.dtype):
                raise ValueError(f"{name}: expected {made.dtype} {list(made.shape)}, got {given.dtype} {list(given.shape)}")
        own = own if out is None else out.copy_(own)
        own_lse = own_lse if lse is None else lse.copy_(own_lse)
        return (own, own_lse) if return_lse else own
