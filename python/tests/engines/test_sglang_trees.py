"""Trees of drafts that imbrex.sglang verifies, against a stand-in of SGLang: SGLang's links between their tokens become the tree of a plan."""

import pytest

torch = pytest.importorskip("torch")
import imbrex  # noqa: E402
from sglang_runner import Runner, VerifyInput, depths_of, links_of, masks_of, prefilled, random_trees  # noqa: E402
from test_sglang import MODELS, on  # noqa: E402

pytestmark = pytest.mark.usefixtures("sglang")

WINDOW = {"sliding_window_size": 3}


def verify(runner, requests, width, seed=3, as_mask=False, **more):
    """A step whose requests have trees; the plan is given these, and no mask, unless as_mask."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    trees = random_trees(len(requests), width, seed)
    masks, flat = masks_of(requests, width, runner.device, trees=trees)
    info = VerifyInput(width, flat) if as_mask else VerifyInput(width, trees=trees, device=runner.device)
    scheduled = [(r, width) for r in requests]
    runner.step(scheduled, mode=ForwardMode.TARGET_VERIFY, masks=masks, depths=depths_of(trees), spec_info=info, **more)


def specs(runner):
    backend = runner.attn_backend
    return [kept.plan.spec for kept in [*backend._eager.kept(), *backend._captured.values()]]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["plain", "soft cap", "sinks", "windows", "all together", "narrow windows"])
def test_links(device, name, page_size):
    model = {**MODELS, "narrow windows": [WINDOW, {}, {"sliding_window_size": 1}]}[name]
    runner = Runner(device, on(device, model), page_size=page_size)
    requests = prefilled(runner)
    for width, seed in ((5, 3), (8, 4), (1, 5)):
        verify(runner, requests, width, seed)
    runner.step([(r, 1) for r in requests])
    assert any(spec.tree for spec in specs(runner)) and not any(spec.custom_mask for spec in specs(runner))


def test_a_tree_of_as_many_tokens_as_may_be(device):
    runner = Runner(device, [WINDOW, {}])
    requests = [runner.request("a", 200), runner.request("b", 200)]
    runner.step([(r, 10) for r in requests])
    verify(runner, requests, 64)
    runner.model_config.context_len = 200
    with pytest.raises(NotImplementedError, match="a tree of at most 64 draft tokens, and the links between them, with a sliding window"):
        verify(runner, requests, 65)


def test_larger_trees_are_masks(device):
    runner = Runner(device, [{}])
    requests = [runner.request("a", 200)]
    runner.step([(requests[0], 10)])
    verify(runner, requests, 70, as_mask=True)
    assert any(spec.custom_mask for spec in specs(runner))


@pytest.mark.parametrize("seed", range(6))
def test_random_trees(sglang, seed):
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    model = [{"sliding_window_size": number(1, 30)}, {"sliding_window_size": number(1, 6), "logit_cap": 4.0}, {}]
    runner = Runner("cpu", model, page_size=[1, 4, 16][number(0, 2)], dtype=torch.float32)
    requests = prefilled(runner, [number(1, 90) for _ in range(3)])
    for _ in range(2):
        verify(runner, requests, number(1, 9), seed=number(0, 99))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("captured_without_links", [True, False])
def test_in_graphs(device, page_size, captured_without_links):
    """A worker captures with an input whose links are None; requests of padding have none either."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner(device, [WINDOW, {}], page_size=page_size, speculative=True)
    requests = prefilled(runner)
    dummy = VerifyInput(5, trees=random_trees(4, 5), device=device)
    if captured_without_links:
        dummy.retrieve_next_token = dummy.retrieve_next_sibling = None
        dummy.custom_mask = torch.ones(4 * 5 * (320 + 5), dtype=torch.bool, device=device)
    runner.capture(4, ForwardMode.TARGET_VERIFY, 5, dummy)
    for seed in (6, 7):
        verify(runner, requests, 5, seed)
    assert all(spec.tree for spec in specs(runner)[-2:])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_lengths_of_the_gpu(sglang):
    runner = Runner("cuda", [WINDOW, {}], speculative=True)
    requests = prefilled(runner)
    for known in (None, 200):
        verify(runner, requests, 5, seq_lens_cpu=None, seq_lens_sum=None, max_seq_len_host=known)


def test_masks_over_draft_tokens_alone(sglang):
    """Where links are missing: a token's parent is the last one in front of it that it sees."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    runner = Runner("cpu", [WINDOW, {}])
    requests, trees = prefilled(runner), random_trees(3, 6)
    masks, _ = masks_of(requests, 6, "cpu", trees=trees)
    flat = torch.cat([torch.tensor(m[:, -6:]).reshape(-1) for m in masks])
    for given in (flat, flat.to(torch.uint8)):
        info = VerifyInput(6, given)
        runner.step([(r, 6) for r in requests], mode=ForwardMode.TARGET_VERIFY, masks=masks, depths=depths_of(trees), spec_info=info)
        masks, _ = masks_of(requests, 6, "cpu", trees=trees)
    assert not any(spec.custom_mask for spec in specs(runner))


def test_what_workers_are_asked_for(sglang, monkeypatch):
    """No rows over all keys, which on GPUs are as long as the longest context."""
    from sglang.srt import runtime_context

    backend = Runner("cpu", [{}]).attn_backend
    assert backend.verify_mask is None  # no drafts
    monkeypatch.setattr(runtime_context._spec, "speculative_num_draft_tokens", 64)
    asked = backend.verify_mask
    assert asked.mode.name == "QLEN_ONLY" and not asked.is_read and not asked.fits(1) and backend.max_context_len == 256
    monkeypatch.setattr(runtime_context._spec, "speculative_num_draft_tokens", 65)
    assert backend.verify_mask is None
    backend.update_verify_buffers_to_fill_after_draft(None, None)


def test_padding_is_chains(sglang):
    from imbrex.sglang.verify import drafts_of

    trees = [[0, 0, 0, 1], [0, 0, 1, 1]]
    info = VerifyInput(4, trees=trees)
    drafts = drafts_of(info, 3, None, 1, True, torch.device("cpu"))
    assert drafts.tree and drafts.mask is None
    assert drafts.parents.tolist() == [-1, 0, 0, 1, -1, 0, 1, 1, -1, 0, 1, 2] and drafts.parents.dtype == torch.int32
    assert drafts_of(VerifyInput(4, topk=1, trees=trees), 3, None, 1, True, torch.device("cpu")) == (False, None, None)
    child, sibling = links_of(trees, "cpu")
    assert child.tolist() == [[1, 3, -1, -1], [1, 2, -1, -1]] and sibling.tolist() == [[-1, 2, -1, -1], [-1, -1, 3, -1]]


def test_a_parent_behind_its_token_is_an_error(sglang):
    runner = Runner("cpu", [{}])
    requests = prefilled(runner)
    info = VerifyInput(3, trees=[[0, 0, 0]] * 3)
    info.retrieve_next_token = torch.tensor([[2, -1, 1]] * 3)
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    with pytest.raises(imbrex.Error, match="expected a parent of -1 to 0 for token 1 of request 0, got 2"):
        runner.step([(r, 3) for r in requests], mode=ForwardMode.TARGET_VERIFY, spec_info=info)
