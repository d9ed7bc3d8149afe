"""Drafts of layers with a state in vLLM, against its stand-in: what was kept is what a request has, whatever else a step had computed."""

import pytest

torch = pytest.importorskip("torch")
from test_vllm_states import CASES, runner_of  # noqa: E402

DRAFTS = 3


def drafting(case, *args, **options):
    import vllm.config

    return runner_of(case, *args, speculative=vllm.config.SpeculativeConfig(num_speculative_tokens=DRAFTS), **options)


@pytest.mark.parametrize("case", [case for case in CASES if case != "mamba1"])
@pytest.mark.parametrize("mode", ["none", "align"])
def test_steps(states, device, case, mode):
    runner = drafting(case, device=device, mode=mode)
    a, b, c = (runner.request(n) for n in (60, 100, 40))
    runner.step([(a, 16), (b, 7)])
    runner.step([(a, 4, 2), (b, 9), (c, 16)], pad=2)  # drafts beside prompts
    runner.step([(b, 4, 3), (a, 4, 0), (c, 4, 1)])  # as many of each, in another order
    runner.step([(a, 4, 3), (c, 2, 0), (b, 3, 2)])
    runner.step([(a, 1, 0), (c, 1, 0), (b, 4, 1)], pad=3)  # two without drafts, whose states are behind a draft
    runner.release(b)
    runner.step([(b, 3), (c, 4, 3), (a, 4, 1)])  # few tokens of a prompt, of one that is new
    runner.step([(a, 4, 1), (b, 4)])
    runner.step([(b, 9)])
    for kept in (0, 3, 1, 2, 3):
        runner.step([(c, 4, kept), (b, 4, 3 - kept), (a, 1 + kept, kept)])
    runner.step([(a, 1, 0)])


def test_rounded_states(states, device):
    runner = drafting("gdn", dict(state_dtype=torch.bfloat16), device=device, dtype=torch.bfloat16)
    a = runner.request(80)
    runner.step([(a, 64)], tolerance=0.05)
    for kept in (1, 3, 0, 2):
        runner.step([(a, 4, kept)], tolerance=0.05)


def test_a_graph_has_views_of_all_requests(states):
    from vllm.v1.attention.backend import AttentionCGSupport

    runner = drafting("gdn")
    support = type(runner.builder).get_cudagraph_support
    assert support(runner.config, None) is AttentionCGSupport.UNIFORM_BATCH
    assert support(runner_of("gdn").config, None) is AttentionCGSupport.ALWAYS
    blocks = [[1, 2, 3, 4], [5, 6, 7, 8]]
    metadata = runner.builder.build_for_cudagraph_capture(runner.common([4, 4], [9, 9], blocks, 8))
    passes = metadata.plans_of(runner.layers[0].kind).recurrence._passes
    assert [tokens for _, tokens in passes] == [slice(0, 5, 4), slice(1, 6, 4), slice(2, 7, 4), slice(3, 8, 4)]
    prompts = runner.builder.build(0, runner.common([4, 4], [4, 9], blocks, 8), num_decode_draft_tokens_cpu=torch.tensor([-1, 3]))
    assert prompts.plans_of(runner.layers[0].kind).recurrence._passes == passes


def test_the_log_says_how_many(states, caplog):
    caplog.set_level("INFO")
    drafting("mamba2")
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("imbrex")]
    assert "bias drafts3 plain silu" in line and "runs recurrent q2 v4 k16 v32" in line


def test_mamba1_has_no_room_for_drafts(states):
    with pytest.raises(NotImplementedError, match="layers.0: expected 6 rows of a convolution's state with 3 drafts, got 3"):
        drafting("mamba1")
