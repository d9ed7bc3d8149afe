"""Parts of an attention put together: merges by LSE in base 2, and the wrappers of imbrex.flashinfer that share keys among requests."""
import pytest

torch = pytest.importorskip("torch")

import imbrex.flashinfer as flashinfer  # noqa: E402
from flashinfer_cases import Batch, attention, check, devices  # noqa: E402


def workspace(device):
    return torch.empty(0, device=device)


def parts_of(device, dtype, cuts=(0, 7, 8, 30), empty=False):
    batch = Batch(5, [6], [30], device=device)
    q, k, v = batch.q, batch.k[0], batch.v[0]
    whole = attention(q, k, v)
    parts = [attention(q, k[a:b], v[a:b]) for a, b in zip(cuts, cuts[1:])]
    vs, ss = [x.to(device, dtype) for x, _ in parts], [s.to(device, torch.float32) for _, s in parts]
    if empty:
        vs.insert(1, torch.full_like(vs[0], float("nan")))
        ss.insert(1, torch.full_like(ss[0], float("-inf")))
    return vs, ss, whole


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("empty", [False, True])
def test_merges(device, dtype, empty):
    vs, ss, whole = parts_of(device, dtype, empty=empty)
    v, s = flashinfer.merge_states(torch.stack(vs, 1), torch.stack(ss, 1))
    assert v.dtype == dtype
    check((v, s), whole, dtype)
    v, s = vs[0], ss[0]
    for other, lse in zip(vs[1:], ss[1:]):
        v, s = flashinfer.merge_state(v, s, other, lse)
    check((v, s), whole, dtype, tolerance=2e-5 if dtype == torch.float32 else 3e-2)
    v, s = vs[0].clone(), ss[0].clone()
    for other, lse in zip(vs[1:], ss[1:]):
        assert flashinfer.merge_state_in_place(v, s, other, lse) is None
    check((v, s), whole, dtype, tolerance=2e-5 if dtype == torch.float32 else 3e-2)


@devices
def test_merge_in_place_of_some_tokens(device):
    vs, ss, _ = parts_of(device, torch.float32, cuts=(0, 10, 30))
    mask = torch.tensor([True, False, True, True, False, False], device=device)
    both = flashinfer.merge_state(vs[0], ss[0], vs[1], ss[1])
    v, s = vs[0].clone(), ss[0].half()
    flashinfer.merge_state_in_place(v, s, vs[1], ss[1], mask)
    torch.testing.assert_close(v, torch.where(mask[:, None, None], both[0], vs[0]), atol=5e-3, rtol=0)
    torch.testing.assert_close(s.float(), torch.where(mask[:, None], both[1], ss[0]), atol=1e-2, rtol=0)  # whatever the type of s
    assert torch.equal(v[~mask], vs[0][~mask])


@devices
def test_merge_of_nothing(device):
    v, s = torch.full((2, 3, 8), float("nan"), device=device), torch.full((2, 3), float("-inf"), device=device)
    for v_merged, s_merged in (flashinfer.merge_state(v, s, v, s), flashinfer.merge_states(v[:, None], s[:, None])):
        assert (v_merged == 0).all() and (s_merged == float("-inf")).all()
    with pytest.raises(ValueError, match="num_heads, head_dim"):
        flashinfer.merge_state(v, s[:1], v, s)


class Shared:
    """Requests with keys in common: a prefix of all, one of each half, and each request's own, in one cache."""

    def __init__(self, device, q_lens=(1, 1, 3, 2), dtype=torch.bfloat16):
        self.device, self.q_lens = device, list(q_lens)
        kv_lens = [13, 6, 9, 5, 8, 4, 7]  # of all; of the halves; of each
        self.all = Batch(6, [0] * 7, kv_lens, device=device, dtype=dtype)
        self.q = self.all.normal(sum(q_lens), 4, 64).to(dtype).to(device)
        starts = Batch.starts(self.q_lens)
        self.qo_indptr = [starts[[0, -1]], starts[[0, 2, -1]], starts]
        self.levels = [(0, 1), (1, 3), (3, 7)]

    def arrays(self, level):
        a, b = self.levels[level]
        indptr = self.all.indptr[a : b + 1] - self.all.indptr[a]
        indices = self.all.indices[self.all.indptr[a] : self.all.indptr[b]]
        return indptr, indices, self.all.last[a:b]

    def expected(self, causal=False, levels=(0, 1, 2)):
        outs, at = [], 0
        for r, n in enumerate(self.q_lens):
            members = [m for level, m in enumerate((0, 1 + r // 2, 3 + r)) if level in levels]
            k, v = (torch.cat([x[m] for m in members]) for x in (self.all.k, self.all.v))
            outs.append(attention(self.q[at : at + n], k, v, causal=causal)[0])
            at += n
        return torch.cat(outs), None

    def plan(self, wrapper, **options):
        lists = [list(x) for x in zip(*(self.arrays(level) for level in range(3)))]
        wrapper.plan(self.qo_indptr, *lists, 4, 2, 64, 4, q_data_type=torch.bfloat16, **options)


@devices
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_cascade(device, causal, layout):
    shared = Shared(device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, workspace(device), layout)
    shared.plan(wrapper, causal=causal)
    check(wrapper.run(shared.q, shared.all.cache(layout)), shared.expected(causal), tolerance=3e-2)
    assert not wrapper.is_cuda_graph_enabled
    with pytest.raises(ValueError, match="3 arrays"):
        wrapper.plan([], [], [], [], 4, 2, 64, 4)


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_deprecated_shared_prefix(device, dtype):
    tolerance = 3e-2
    shared = Shared(device, (1, 1, 1, 1), dtype)
    prefix = shared.all.k[0].to(device), shared.all.v[0].to(device)
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(device))
    decode.begin_forward(*shared.arrays(2), 4, 2, 64, 4, data_type=dtype)
    check(decode.forward(shared.q, *prefix, shared.all.cache()), shared.expected(levels=(0, 2)), tolerance=tolerance)
    decode.end_forward()
    shared = Shared(device, dtype=dtype)
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(device), "HND")
    with pytest.raises(RuntimeError, match="before begin_forward"):
        prefill.forward(shared.q, *prefix, shared.all.cache("HND"))
    prefill.begin_forward(shared.qo_indptr[2], *shared.arrays(2), 4, 2, 64, 4)
    prefix = [x.transpose(0, 1) for x in prefix]
    for causal in (False, True):
        out = prefill.forward(shared.q, *prefix, shared.all.cache("HND"), causal=causal)
        check(out, shared.expected(causal, levels=(0, 2)), tolerance=tolerance)
