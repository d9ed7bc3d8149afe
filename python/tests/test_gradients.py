"""No surface drops a gradient: what wants one is refused, and runs where none is wanted."""
import pytest

torch = pytest.importorskip("torch")

import imbrex  # noqa: E402
import imbrex.torch  # noqa: E402

STARTS = torch.tensor([0, 4], dtype=torch.int32, device="cpu")
LENS = torch.tensor([4], dtype=torch.int32, device="cpu")
TABLE = torch.tensor([[1]], dtype=torch.int32, device="cpu")


def rows(wants=False):
    return torch.randn(4, 2, 64).requires_grad_(wants)


def pages(wants=False):
    return torch.randn(3, 16, 2, 64).requires_grad_(wants)


def ragged_plan():
    plan = imbrex.Plan(imbrex.AttentionSpec(2, 2, 64, q_dtype="f32", block_size=0), max_seq_len=8, max_num_tokens=8)
    plan.update(STARTS, LENS, kv_start_loc=STARTS)
    return plan


def paged_plan():
    plan = imbrex.Plan(imbrex.AttentionSpec(2, 2, 64, q_dtype="f32"), max_seq_len=16, max_num_tokens=8)
    plan.update(STARTS, LENS, block_table=TABLE, slot_mapping=torch.arange(16, 20))
    return plan


REFUSED = {
    "attention_varlen q": lambda w: imbrex.attention_varlen(rows(w), rows(), rows(), STARTS, STARTS),
    "attention_varlen k": lambda w: imbrex.attention_varlen(rows(), rows(w), rows(), STARTS, STARTS),
    "attention_varlen v": lambda w: imbrex.attention_varlen(rows(), rows(), rows(w), STARTS, STARTS),
    "attention_varlen sinks": lambda w: imbrex.attention_varlen(rows(), rows(), rows(), STARTS, STARTS, sinks=torch.zeros(2, requires_grad=w)),
    "attention_paged q": lambda w: imbrex.attention_paged(rows(w), pages(), pages(), STARTS, LENS, TABLE),
    "attention_paged v": lambda w: imbrex.attention_paged(rows(), pages(), pages(w), STARTS, LENS, TABLE),
    "Plan.run": lambda w: ragged_plan().run(rows(w), (rows(), rows())),
    "Plan.run layer": lambda w: ragged_plan().run(rows(), (rows(), rows(w))),
    "Plan.run out": lambda w: ragged_plan().run(rows(), (rows(), rows()), rows(w)),
    "Plan.write_kv": lambda w: paged_plan().write_kv((pages(), pages()), rows(w), rows()),
    "merge_states outs": lambda w: imbrex.merge_states([rows(w), rows()], [torch.zeros(4, 2)] * 2),
    "merge_states lses": lambda w: imbrex.merge_states([rows()], [torch.zeros(4, 2, requires_grad=w)]),
    "torch.write_kv": lambda w: imbrex.torch.write_kv(pages(), pages(), rows(w), rows(), torch.arange(4)),
}

BACKWARD = {
    "attention": lambda w: imbrex.torch.attention(*(rows(w).transpose(0, 1)[None] for _ in range(3)), causal=True),
    "attention lse": lambda w: imbrex.torch.attention(*(rows(w).transpose(0, 1)[None] for _ in range(3)), return_lse=True)[1],
    "varlen_attention": lambda w: imbrex.torch.varlen_attention(rows(), rows(w), rows(), STARTS, STARTS, 4, 4),
    "paged_attention": lambda w: imbrex.torch.paged_attention(rows(w), pages(), pages(), STARTS, LENS, TABLE, 4, 4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_once(name):
    with pytest.raises(NotImplementedError, match="torch.no_grad"):
        REFUSED[name](True)


@pytest.mark.parametrize("name", BACKWARD)
def test_refused_in_backward(name):
    out = BACKWARD[name](True)
    assert out.requires_grad
    with pytest.raises(NotImplementedError, match="torch.no_grad"):
        out.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*REFUSED, *BACKWARD])
def test_runs_where_no_gradient_is_wanted(name, mode):
    with mode():
        {**REFUSED, **BACKWARD}[name](True)


@pytest.mark.parametrize("name", [*REFUSED, *BACKWARD])
def test_runs_on_plain_tensors(name):
    {**REFUSED, **BACKWARD}[name](False)
