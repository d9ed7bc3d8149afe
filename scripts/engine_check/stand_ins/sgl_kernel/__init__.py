"""A stand-in for SGLang's own kernels (the wheel is of CUDA): every name can be imported, and few can be called: those of drafts' trees and slots. SGLang
otherwise takes PyTorch."""

import ctypes
import sys
import types


class _StandIn(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            raise NotImplementedError(f"{name} is not in the stand-in of sgl_kernel")

        return call


sys.modules[__name__].__class__ = _StandIn
__version__ = "0.0.0"


def _parts(rows, starts, ends):
    """Each request's row, its part, and where that is among all parts."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        yield row, slice(start, end), slice(at, at + end - start)
        at += end - start


def assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, width):
    for row, there, here in _parts(rows, starts, ends):
        table[row, there] = slots[here].to(table.dtype)


def assign_extend_cache_locs_cpu(rows, table, starts, ends, slots, width):
    for row, there, here in _parts(rows, starts, ends):
        slots[here] = table[row, there].to(slots.dtype)


def assign_draft_cache_locs_contiguous_cpu(rows, table, lens, slots, width, topk, num_steps):
    assign_extend_cache_locs_cpu(rows, table, lens, lens + topk * num_steps, slots, width)


def fill_accept_out_cache_loc_cpu(accepted, slots, found):
    kept = accepted[accepted > -1]
    found[: kept.numel()] = slots[kept.long()]


def fill_bonus_tokens_cpu(tokens, lens, found, width):
    for row, count in enumerate(lens.tolist()):
        found[row] = tokens.reshape(-1)[row * width + count - 1]


def copy_all_layer_kv_cache_cpu(addresses, sizes, to, of):
    for address, size in zip(addresses.tolist(), sizes.tolist()):
        rows = [ctypes.string_at(address + slot * size, size) for slot in of.tolist()]
        for slot, row in zip(to.tolist(), rows):
            ctypes.memmove(address + slot * size, row, size)


def build_tree_kernel_efficient_cpu(*args):
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(*args)


def verify_tree_greedy_cpu(*, retrive_index, retrive_next_token, retrive_next_sibling, **args):
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    links = dict(retrieve_index=retrive_index, retrieve_next_token=retrive_next_token, retrieve_next_sibling=retrive_next_sibling)
    verify_tree_greedy_triton(**args, **links)


def rotate_input_ids_cpu(tokens, starts, lens, new, places=None):
    """Moves each request's tokens by one place to the front; at its place, or the end, comes a new one."""
    for row, (start, count) in enumerate(zip(starts.tolist(), lens.tolist())):
        if count > 0:
            tokens[start : start + count - 1] = tokens[start + 1 : start + count].clone()
            tokens[start + count - 1 if places is None else int(places[row])] = new.reshape(-1)[row]
