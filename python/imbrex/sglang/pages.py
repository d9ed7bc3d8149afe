"""SGLang's pools as imbrex sees them: pages of a layer by their strides, and tables of pages out of tables of token slots."""

from typing import Any, Optional, Tuple

import torch

from ..engines import as_bytes, floats
from ..plan import KvLayer


def check_pool(pool: Any) -> None:
    """Raises NotImplementedError for a pool whose pages imbrex does not read."""
    from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

    if isinstance(pool, BaseSWAKVPool):
        raise NotImplementedError(
            f"imbrex: expected one pool for all layers, got {type(pool).__name__} with one for sliding windows: --disable-hybrid-swa-memory"
        )
    pool = getattr(pool, "full_kv_pool", pool)
    if latent_dims(pool) is not None:
        plain = not pool.use_dsa and pool.kv_scale_buffer is None and pool.kv_cache_dim == sum(latent_dims(pool))
        if not plain:
            raise NotImplementedError(f"imbrex: expected latents as plain numbers and no sparse attention, got {type(pool).__name__}")
        return
    if getattr(pool, "is_quantized_kv_cache", False):
        kind = f"{type(pool).__name__} with {pool.quant_method.name}"
        raise NotImplementedError(f"imbrex: expected a pool of floating-point numbers, got {kind}")
    layout = getattr(pool, "kv_cache_layout", None)
    if layout not in ("nhd", "hnd"):
        raise NotImplementedError(f"imbrex: expected a pool with kv_cache_layout nhd or hnd, got {type(pool).__name__} with {layout}")


def latent_dims(pool: Any) -> Optional[Tuple[int, int]]:
    """Elements of a latent, and of the part of a key with a position, in a pool of latents (MLA); None for another pool."""
    pool = getattr(pool, "full_kv_pool", pool)
    rank = getattr(pool, "kv_lora_rank", None)
    return None if rank is None else (rank, pool.qk_rope_head_dim)


def pages_of(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """[pages, page_size, heads, dim] of a pool's buffer: [tokens, heads, dim], or with hnd [pages, heads, page_size, dim]."""
    if buffer.dim() == 4:
        return as_bytes(buffer.permute(0, 2, 1, 3))
    num_pages = buffer.shape[0] // page_size
    return as_bytes(buffer[: num_pages * page_size].unflatten(0, (num_pages, page_size)))


def scales_of(layer: Any, buffer: torch.Tensor) -> Tuple[Any, Any]:
    """The scales of an fp8 cache; none for another type, which SGLang fills without them."""
    if buffer.element_size() != 1:
        return None, None
    return tuple(None if s is None else floats(torch.as_tensor(s), buffer.device) for s in (layer.k_scale, layer.v_scale))


def kv_layer(pool: Any, layer: Any, page_size: int) -> KvLayer:
    k, v = pool.get_kv_buffer(layer.layer_id)
    if latent_dims(pool) is not None:
        return KvLayer(pages_of(k, page_size))  # SGLang stores latents without a scale
    return KvLayer(pages_of(k, page_size), pages_of(v, page_size), *scales_of(layer, k))


def rows_of(buffer: torch.Tensor, slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """[n, heads, dim] at token slots, by the pool's own indices."""
    return buffer[slots // page_size, :, slots % page_size] if buffer.dim() == 4 else buffer[slots]


class SlotCheck:
    """Whether the slots of a step's new tokens lie in their pages in the order of the tokens, which is what a table with one entry a page says.

    Other slots would give wrong numbers, since imbrex would look for the tokens elsewhere. On a CPU the step fails; on a GPU, which the host
    does not wait for, a later step. Slot 0 is SGLang's for padding, and no request's: all tokens have it in a step that is made up, as before
    a graph of prefill is captured.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._wrong: Any = None  # of an earlier step, on its way from the GPU
        self._arrived: Any = None

    def __call__(self, table: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, slots: torch.Tensor) -> None:
        """table [requests, pages] on the slots' device; starts and lens on the host, lens with the new tokens."""
        if self._arrived is not None and not self._arrived.query():
            return
        self._refuse(self._wrong)
        counts = starts.diff()
        rows = torch.arange(lens.numel()).repeat_interleave(counts)
        positions = (torch.arange(rows.numel()) + (lens - counts - starts[:-1])[rows]).to(slots.device, non_blocking=True)
        pages = table[rows.to(slots.device, non_blocking=True), positions // self.page_size]
        slots = slots[: rows.numel()]
        wrong = ((slots != pages * self.page_size + positions % self.page_size) & (slots != 0)).any()
        if not wrong.is_cuda:
            return self._refuse(wrong)
        self._wrong = torch.empty((), dtype=torch.bool, pin_memory=True)
        self._wrong.copy_(wrong, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def _refuse(self, wrong: Any) -> None:
        if wrong is not None and bool(wrong):
            raise NotImplementedError(
                f"imbrex: expected new tokens in the order of their slots within a page of {self.page_size}, got another: --page-size 1 takes any"
            )


def block_table(req_to_token: torch.Tensor, rows: torch.Tensor, num_keys: int, page_size: int, out: Any = None, behind: Any = None) -> torch.Tensor:
    """int32 [requests, pages] for num_keys keys each, of the token slots that requests have; into a part of `out` where that is given.

    behind: how many slots of each request, [requests], are not its keys' but in front of them; with pages of one token.
    """
    if behind is None:
        table = req_to_token[:, : max(1, num_keys) : page_size].index_select(0, rows.long())
    else:
        columns = torch.arange(max(1, num_keys), device=rows.device) + behind.long()[:, None]
        table = req_to_token[rows.long()[:, None], columns.clamp(max=req_to_token.shape[1] - 1)]
    return _pages_of_slots(table, page_size, out)


def branch_table(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    num_keys: int,
    page_size: int,
    topk: int,
    num_steps: int,
    out: Any = None,
) -> torch.Tensor:
    """int32 [requests * topk, pages] for num_keys keys of each branch of drafts; into a part of `out` where that is given.

    lens: committed tokens of each request. Its row goes on with the slots of a branch's drafts, branch after branch. With pages of more than one
    token those of a branch begin with a copy of the committed tokens that are in the last page, so that they are whole pages.
    """
    if topk == 1:
        return block_table(req_to_token, rows, num_keys, page_size, out)
    lens = lens.to(rows.device)
    whole = (lens // page_size)[:, None, None]
    own_pages = (lens % page_size + num_steps + page_size - 1)[:, None, None] // page_size
    columns = torch.arange(-(-max(1, num_keys) // page_size), device=rows.device)
    branches = torch.arange(topk, device=rows.device)[:, None]
    places = (columns + (columns >= whole) * branches * own_pages) * page_size
    table = req_to_token[rows.long()[:, None, None], places.clamp(max=req_to_token.shape[1] - 1)].flatten(0, 1)
    return _pages_of_slots(table, page_size, out)


def _pages_of_slots(table: torch.Tensor, page_size: int, out: Any) -> torch.Tensor:
    """Of a table of the first slot in each page."""
    if page_size > 1:
        table = table // page_size
    if out is None:
        return table
    view = out[: table.shape[0], : table.shape[1]]
    view.copy_(table)
    return view
