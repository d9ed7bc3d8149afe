"""What stands beside flash-attn's functions: import lines of programs, bert_padding, rotary positions, and FlashAttention 3's module."""
import importlib.util
import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from imbrex import flash_attn, flash_attn_interface as three  # noqa: E402
from imbrex.flash_attn import bert_padding  # noqa: E402
from imbrex.flash_attn.layers import rotary  # noqa: E402
from torch_reference import DEVICES, arrays, near, paged, reference  # noqa: E402

# A program that knows flash_attn only: import lines as models and transformers have them, and one padded batch.
PROGRAM = """
import sys, torch
import imbrex.flash_attn as flash_attn
import imbrex.flash_attn_interface as flash_attn_interface
sys.modules["flash_attn"], sys.modules["flash_attn_interface"] = flash_attn, flash_attn_interface

import importlib.util
assert importlib.util.find_spec("flash_attn") is not None and importlib.util.find_spec("flash_attn_interface") is not None
import flash_attn as fa
assert fa is flash_attn and tuple(int(n) for n in fa.__version__.split(".")) >= (2, 3, 3)
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_gpu, flash_attn_varlen_kvpacked_func, _flash_attn_forward
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn_interface import flash_attn_func as flash_attn_3_func
import flash_attn.layers.rotary

torch.manual_seed(0)
mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
x = torch.randn(2, 5, 4, 32)
flat, indices, starts, longest, _ = unpad_input(x, mask)
out = pad_input(flash_attn_varlen_func(flat, flat, flat, starts, starts, longest, longest, causal=True), indices, 2, 5)
assert torch.equal(out[0, :3], flash_attn_func(*[x[:1, :3]] * 3, causal=True)[0]) and not out[0, 3:].any()
assert torch.equal(out[1:], flash_attn_3_func(*[x[1:]] * 3, causal=True))
"""


def test_programs_that_import_flash_attn():
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=dict(PYTHONPATH=":".join(p for p in sys.path if p)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert importlib.util.find_spec("imbrex.flash_attn").name == "imbrex.flash_attn"


BESIDE = {
    "bert_padding.unpad_input": "hidden_states, attention_mask, unused_mask=None",
    "bert_padding.unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    "bert_padding.pad_input": "hidden_states, indices, batch, seqlen",
    "layers.rotary.apply_rotary_emb": "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None",
    "layers.rotary.apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
    "layers.rotary.apply_rotary_emb_qkv_": "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None",
    "layers.rotary.apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    "layers.rotary.rotate_half": "x, interleaved=False",
    "layers.rotary.RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
    "layers.rotary.RotaryEmbedding.forward": "self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
    "ops.triton.rotary.apply_rotary": (
        "x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False, conjugate=False"
    ),
}
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
MASK = "window_size=(-1, -1), attention_chunk=0, softcap=0.0"
KERNELS = "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
THREE = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALES}, {MASK}, {KERNELS}",
    "flash_attn_qkvpacked_func": (
        f"qkv, softmax_scale=None, causal=False, {DESCALES}, {MASK}, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attn_varlen_func": (
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, "
        f"qv=None, {DESCALES}, {MASK}, {KERNELS}"
    ),
    "flash_attn_with_kvcache": (
        "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
        "cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
        f"{DESCALES}, softmax_scale=None, causal=False, {MASK}, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
        "pack_gqa=None, sm_margin=0, return_softmax_lse=False"
    ),
    "get_scheduler_metadata": (
        "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0"
    ),
}


@pytest.mark.parametrize("name", [*BESIDE, *THREE])
def test_signature(name):
    found = three if name in THREE else flash_attn
    for part in name.split("."):
        found = getattr(found, part)
    expected = eval(f"lambda {THREE.get(name) or BESIDE[name]}: None", {"torch": torch})
    have, want = (inspect.signature(f).parameters.values() for f in (found, expected))
    assert [(p.name, p.default) for p in have] == [(p.name, p.default) for p in want]


@pytest.mark.parametrize("device", DEVICES)
def test_padding(device):
    torch.manual_seed(1)
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], device=device)
    unused = torch.tensor([[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 0, 0, 0]], device=device)
    x = torch.randn(3, 5, 2, 8, device=device, requires_grad=True)
    flat, indices, starts, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 4, 5, 6] and longest == 4
    assert starts.dtype == used.dtype == torch.int32 and starts.tolist() == [0, 4, 6, 6] and used.tolist() == [3, 1, 0]
    assert torch.equal(flat, x.flatten(0, 1)[indices])
    back = bert_padding.pad_input(flat, indices, 3, 5)
    taken = (mask + unused).bool()
    assert torch.equal(back, torch.where(taken[:, :, None, None], x, 0.0))
    back.sum().backward()
    assert torch.equal(x.grad, taken[:, :, None, None].expand(x.shape).float())  # gradients go through
    same = bert_padding.unpad_input(x, mask.bool(), unused.bool())
    assert torch.equal(same[1], indices) and torch.equal(same[2], starts) and torch.equal(same[4], used)
    picked, rest = bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(picked, flat) and not rest.requires_grad


@pytest.mark.parametrize("device", DEVICES)
def test_padding_of_concatenated_requests(device):
    lens = torch.tensor([[2, 3, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=device)
    x = torch.arange(18, device=device).view(3, 6, 1).float()
    flat, indices, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lens)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, *range(12, 18)] and flat.flatten().tolist() == indices.tolist()
    assert starts.dtype == torch.int32 and starts.tolist() == [0, 2, 5, 6, 12] and longest == 6


def turned(x, cos, sin, positions, interleaved):
    """x [n, h, d] as complex numbers times e^(i angle), which rotation is."""
    half, x = cos.shape[1], x.double()
    a, b = (x[..., : 2 * half][..., 0::2], x[..., : 2 * half][..., 1::2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    z = torch.complex(a, b) * torch.complex(cos, sin).to(torch.complex128)[torch.tensor(positions, device=x.device)][:, None]
    parts = torch.stack((z.real, z.imag), -1).flatten(-2) if interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((parts, x[..., 2 * half :]), -1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary(device, interleaved, dtype):
    torch.manual_seed(2)
    x = torch.randn(2, 5, 3, 32, device=device).to(dtype)
    angles = torch.rand(12, 10, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    for offsets in (0, 7, torch.tensor([2, 7], device=device)):
        first = offsets.tolist() if torch.is_tensor(offsets) else [offsets] * 2
        want = torch.stack([turned(x[r], cos, sin, [n + i for i in range(5)], interleaved) for r, n in enumerate(first)])
        before = x.clone()
        out = rotary.apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=offsets)
        near(out, want)
        assert torch.equal(x, before)
        flat = x.flatten(0, 1)[: 5 + 3]  # a request of 5 tokens and one of 3
        starts = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
        varlen = rotary.apply_rotary_emb(flat, cos, sin, interleaved, seqlen_offsets=offsets, cu_seqlens=starts, max_seqlen=5)
        assert torch.equal(varlen, out.flatten(0, 1)[:8])
        back = flash_attn.ops.triton.rotary.apply_rotary(out, cos, sin, offsets, interleaved=interleaved, conjugate=True)
        near(back, x.double(), 5e-2 if dtype == torch.bfloat16 else None)
        copy = x.clone()
        assert rotary.apply_rotary_emb(copy, cos, sin, interleaved, inplace=True, seqlen_offsets=offsets) is copy and torch.equal(copy, out)
    near(
        rotary.apply_rotary_emb_torch(x.float(), cos[:5], sin[:5], interleaved), torch.stack([turned(y, cos, sin, range(5), interleaved) for y in x])
    )
    with pytest.raises(ValueError, match="cos and sin: expected 13 positions, got 12"):
        rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=8)
    with pytest.raises(ValueError, match="x: expected"):
        rotary.apply_rotary_emb(x[0], cos, sin)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", ["qkv", "heads", "q and kv"])
@pytest.mark.parametrize("scale_base", [None, 512.0])
def test_rotary_module(device, packed, scale_base):
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 5, h, 32, device=device) for h in ((4, 4, 4) if packed == "qkv" else (4, 2, 2)))
    module = rotary.RotaryEmbedding(16, scale_base=scale_base, device=device)
    inverse = 10000.0 ** (-torch.arange(0, 16, 2, device=device).double() / 16)
    angles = torch.outer(torch.arange(8, device=device).double(), inverse)
    grow = torch.ones_like(angles)
    if scale_base:
        grow = ((torch.arange(0, 16, 2, device=device) + 6.4) / 22.4).double() ** ((torch.arange(8, device=device) - 4) / scale_base)[:, None]
    want_q, want_k = (
        torch.stack([turned(x[r], angles.cos() * g, angles.sin() * g, range(3, 8), False) for r in range(2)]) for x, g in ((q, grow), (k, 1 / grow))
    )
    if packed == "qkv":
        out = module(torch.stack((q, k, v), 2), seqlen_offset=3).unbind(2)
    elif packed == "heads":
        out = module(torch.cat((q, k, v), 2), seqlen_offset=3, num_heads_q=4).split((4, 2, 2), 2)
    else:
        offset = torch.tensor([3, 3], device=device)
        with pytest.raises(ValueError, match="max_seqlen: expected a number"):
            module(q.clone(), torch.stack((k, v), 2), seqlen_offset=offset)
        first, both = module(q.clone(), torch.stack((k, v), 2), seqlen_offset=offset, max_seqlen=8)
        out = first, *both.unbind(2)
    near(out[0], want_q, 1e-4)
    near(out[1], want_k, 1e-4)
    assert torch.equal(out[2], v) and not module.state_dict()


@pytest.mark.parametrize("device", DEVICES)
def test_three(device):
    torch.manual_seed(4)
    q, k, v = (x.transpose(1, 2) for x in arrays(device, torch.float16, 2, 4, 2, 5, 9, 64))
    expected, expected_lse = reference(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, window=(3, 0), scale=0.2)
    options = dict(softmax_scale=0.2, causal=True, window_size=(3, 0))
    out, lse = three.flash_attn_func(q, k, v, return_attn_probs=True, num_splits=3, pack_gqa=True, **options)
    near(out.transpose(1, 2), expected)
    near(lse, expected_lse)
    assert torch.equal(three.flash_attn_func(q, k, v, **options), out)
    starts, kv_starts = (torch.arange(3, dtype=torch.int32, device=device) * n for n in (5, 9))
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    ragged, ragged_lse = three.flash_attn_varlen_func(*flat, starts, kv_starts, 5, 9, return_attn_probs=True, **options)
    near(ragged.view(out.shape).transpose(1, 2), expected)
    near(ragged_lse.view(4, 2, 5).transpose(0, 1), expected_lse)

    cache, table = paged(torch.cat((k, v), 2), 4)
    pages = [x.contiguous() for x in cache.chunk(2, 2)]
    lens = torch.tensor([9, 9], dtype=torch.int32, device=device)
    metadata = three.get_scheduler_metadata(2, 5, 9, 4, 2, 64, lens, causal=True)
    more = dict(cache_seqlens=lens, page_table=table, scheduler_metadata=metadata, return_softmax_lse=True, **options)
    over_pages, pages_lse, *_ = three.flash_attn_with_kvcache(q, *pages, **more)
    near(over_pages.transpose(1, 2), expected)
    near(pages_lse, expected_lse)
    flat_pages, flat_lse, *_ = three.flash_attn_with_kvcache(flat[0], *pages, cu_seqlens_q=starts, max_seqlen_q=5, cu_seqlens_k_new=kv_starts, **more)
    near(flat_pages.view(out.shape).transpose(1, 2), expected)
    near(flat_lse.view(4, 2, 5).transpose(0, 1), expected_lse)

    expected, _ = reference(*(x.transpose(1, 2) for x in (q, k[:, :5].repeat_interleave(2, 2), v[:, :5].repeat_interleave(2, 2))), causal=True)
    together = torch.cat((q, k[:, :5], v[:, :5]), 2)
    near(three.flash_attn_qkvpacked_func(together, causal=True, num_heads_q=4).transpose(1, 2), expected)
    five = torch.stack((q, *(x[:, :5].repeat_interleave(2, 2) for x in (k, v))), 2)
    near(three.flash_attn_qkvpacked_func(five, causal=True).transpose(1, 2), expected)


def test_what_three_has_not_is_refused_by_name():
    q, k, one = torch.randn(2, 3, 4, 32), torch.randn(2, 8, 2, 32), torch.ones(2, 2)
    starts, kv_starts = (torch.arange(3, dtype=torch.int32) * n for n in (3, 8))
    calls = {
        three.flash_attn_func: (q, k, k),
        three.flash_attn_varlen_func: (q.flatten(0, 1), *[k.flatten(0, 1)] * 2, starts, kv_starts, 3, 8),
        three.flash_attn_with_kvcache: (q, k, k),
    }
    for function, args in calls.items():
        for options in (dict(qv=q), dict(q_descale=one), dict(k_descale=one), dict(v_descale=one), dict(attention_chunk=4)):
            with pytest.raises(NotImplementedError, match=f"{next(iter(options))}= is not there: .+"):
                function(*args, **options)
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(NotImplementedError, match=f"{name}= is not there"):
            three.flash_attn_varlen_func(*calls[three.flash_attn_varlen_func], **{name: starts[1:]})
    for name in ("cu_seqlens_k_new", "cu_seqlens_q"):
        with pytest.raises(NotImplementedError, match=f"{name}= is not there"):
            three.flash_attn_with_kvcache(q, k, k, k[:, :3], k[:, :3], cache_seqlens=2, **{name: starts})
    with pytest.raises(NotImplementedError, match="rotary_seqlens= is not there"):
        three.flash_attn_with_kvcache(q, k, k, rotary_seqlens=starts[1:])
    with pytest.raises(NotImplementedError, match="flash_attn_combine is not there: imbrex.merge_states"):
        three.flash_attn_combine(one, one)
    with pytest.raises(NotImplementedError, match="backward"):
        three.flash_attn_func(q.clone().requires_grad_(), k, k)
    with pytest.raises(ValueError, match="expected page_table or cache_batch_idx, got both"):
        three.flash_attn_with_kvcache(q, k, k, cache_batch_idx=starts[1:], page_table=starts[1:, None])
