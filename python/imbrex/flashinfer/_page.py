"""Pages: lengths, places of new tokens, and writing them."""
from typing import Optional, Sequence, Tuple

import torch

from .._torch_attention import no_gradient
from ._options import check_layout, refuse_nvfp4
from ._run import Cache, unpack_cache


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Keys of each request, [num_reqs]. A request without pages has kv_last_page_len keys, as in FlashInfer: 0 must be there."""
    return torch.clamp(kv_indptr[1:] - kv_indptr[:-1] - 1, min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: Optional[torch.Tensor] = None,
    positions: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Request and position of each of nnz new tokens, int32 [nnz] each: the last tokens of seq_lens, as many as append_indptr says.

    Tokens of no request have request -1 and position 0. Nothing waits for the device, and a CUDA graph may hold the call.
    """
    device = append_indptr.device
    starts = append_indptr.to(torch.int64)
    token = torch.arange(nnz, device=device)
    last = starts.shape[0] - 2
    if last < 0:
        request, position = torch.full_like(token, -1), torch.zeros_like(token)
    else:
        request = torch.searchsorted(starts[1:].contiguous(), token, right=True)
        there = (request <= last) & (token >= starts[0])
        request = request.clamp(max=last)
        position = torch.where(there, token + seq_lens.to(device, torch.int64)[request] - starts[1:][request], 0)
        request = torch.where(there, request, -1)
    results = []
    for name, given, values in (("batch_indices", batch_indices, request), ("positions", positions, position)):
        if given is None:
            given = torch.empty((nnz,), dtype=torch.int32, device=device)
        elif tuple(given.shape) != (nnz,) or given.dtype != torch.int32 or given.device != device:
            raise ValueError(f"{name}: expected torch.int32 [{nnz}] on {device}, got {given.dtype} {list(given.shape)} on {given.device}")
        results.append(given.copy_(values))
    return results[0], results[1]


def _append(
    caches: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> None:
    """Writes new [nnz, ..] to caches [num_pages, page_size, ..]. The host does not wait for the device.

    Tokens of no request are given the place and the value of the first token that has one; if none has, what lies at some place already.
    """
    no_gradient(*caches, *new)
    for cache, x in zip(caches, new):
        if x.dtype != cache.dtype or x.shape[1:] != cache.shape[2:]:
            raise ValueError(f"expected new tokens {cache.dtype} [nnz, {list(cache.shape[2:])}] like the cache, got {x.dtype} {list(x.shape)}")
    if not len(batch_indices) or not len(kv_indices):
        return
    page_size, device = caches[0].shape[1], caches[0].device
    batch_indices, positions, kv_indices, kv_indptr = (t.to(device) for t in (batch_indices, positions, kv_indices, kv_indptr))
    there = batch_indices >= 0
    request, position = torch.where(there, batch_indices, 0).long(), torch.where(there, positions, 0).long()
    page = kv_indices[torch.where(there, kv_indptr[request] + position // page_size, 0).long()].long()
    offset = position % page_size
    first = there.int().argmax(0, keepdim=True)
    page, offset = torch.where(there, page, page[first]), torch.where(there, offset, offset[first])
    for cache, x in zip(caches, new):
        if x.dtype.itemsize == 1:
            cache, x = cache.view(torch.uint8), x.view(torch.uint8)
        dims = (-1,) + (1,) * (x.ndim - 1)
        spare = torch.where(there[first].view(dims), x[first], cache[page[first], offset[first]])
        cache[page, offset] = torch.where(there.view(dims), x, spare)


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes append_key and append_value [nnz, num_kv_heads, head_dim], of the cache's type, to their pages; request -1 is skipped.

    Pages for the new tokens are in kv_indices already. kv_last_page_len is not needed. A CUDA graph may hold the call.
    """
    caches = unpack_cache(paged_kv_cache, check_layout(kv_layout))
    refuse_nvfp4(None, *caches)
    _append(caches, (append_key, append_value), batch_indices, positions, kv_indices, kv_indptr)


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """append_paged_kv_cache() for MLA: append_ckv [nnz, ckv_dim] and append_kpe [nnz, kpe_dim] to [num_pages, page_size, dim]."""
    refuse_nvfp4(None, ckv_cache, kpe_cache)
    _append((ckv_cache, kpe_cache), (append_ckv, append_kpe), batch_indices, positions, kv_indices, kv_indptr)
