"""Calls of imbrex.torch that differ from an earlier one in their numbers alone are not looked at again, and are as right as that one."""

import threading

import pytest

torch = pytest.importorskip("torch")
import imbrex.torch  # noqa: E402
from imbrex import _torch_attention  # noqa: E402
from torch_reference import reference, tensors  # noqa: E402


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def looked_at(monkeypatch):
    """How many calls had their shapes looked at."""
    calls = []
    check = _torch_attention._check_dense
    monkeypatch.setattr(_torch_attention, "_check_dense", lambda *a: calls.append(1) or check(*a))
    monkeypatch.setattr(_torch_attention, "_plans", _torch_attention.PlanCache())
    return calls


def close(out, q, k, v):
    return torch.allclose(out.double(), reference(q, k, v)[0], atol=1e-4 if out.device.type == "cpu" else 2e-3)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("sizes", [dict(), dict(b=1), dict(sq=1), dict(b=1, sq=1), dict(h=2), dict(h=2, sq=1)])
def test_a_call_is_repeated(device, looked_at, sizes, by_token):
    first = None
    for seed in range(3):
        x = tensors(device, seed=seed, by_token=by_token, **sizes)
        out = imbrex.torch.attention(*x)
        assert close(out, *x)
        first = first or (out.shape, out.stride())
        assert (out.shape, out.stride()) == first
    assert len(looked_at) == 1


def test_what_differs_is_looked_at(device, looked_at):
    x = tensors(device)
    answers = [imbrex.torch.attention(*x)]
    for n, (y, options) in enumerate(
        [
            (x, dict(causal=True, scale=0.5)),
            (x, dict(scale=0.25)),
            (x, dict(window=(3, -1))),
            (x, dict(soft_cap=5.0)),
            (tensors(device, by_token=True), {}),
            (tensors(device, sk=10), {}),
            ([t.bfloat16() for t in x], {}),
            ([x[0][:1], x[1][:1], x[2][:1]], {}),
        ]
    ):
        answers.append(imbrex.torch.attention(*y, **options))
        assert len(looked_at) == n + 2
    for out, cap in ((answers[4], 5.0), (imbrex.torch.attention(*x, soft_cap=5.0), 5.0)):
        assert not close(out, *x) and cap
    assert close(imbrex.torch.attention(*x), *x)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("sizes", [dict(sq=1), dict(b=1, sq=1), dict(b=1), dict(h=2, sq=1), dict(by_token=True, b=1)])
def test_a_cache_that_grows_is_looked_at_once(device, looked_at, sizes, static):
    """Keys and values that were put together anew, or those of a cache with room; shorter ones again at the end."""
    for seed, sk in enumerate([9, 10, 11, 15, 16, 8]):
        q, k, v = tensors(device, seed=seed, **sizes, sk=20 if static else sk)
        k, v = k[:, :, :sk], v[:, :, :sk]
        for _ in range(2):
            assert close(imbrex.torch.attention(q, k, v), q, k, v)
    assert len(looked_at) == 1
    longer = tensors(device, **sizes, sk=17)  # beyond the plan's limits
    assert close(imbrex.torch.attention(*longer), *longer)
    assert len(looked_at) == 2


def test_keys_and_values_of_other_lengths_are_refused_again(device, looked_at):
    q, k, v = tensors(device, b=1, sk=9)
    imbrex.torch.attention(q, k, v)
    for other in ((k[:, :, :8], v), (k, v[:, :, :8]), (k[:, :, :0], v)):
        with pytest.raises(ValueError):
            imbrex.torch.attention(q, *other)
    assert close(imbrex.torch.attention(q, k, v), q, k, v)


def test_another_batch_of_the_same_plan_is_planned_again(device, looked_at):
    """Both lengths have one plan; the step it was last updated with is not that of the other."""
    long, short = tensors(device, sk=16), tensors(device, sk=15)
    for _ in range(3):
        assert close(imbrex.torch.attention(*long), *long)
        assert close(imbrex.torch.attention(*short), *short)
    assert len(looked_at) == 1


def test_copies_are_made_each_time(device, looked_at):
    """Elements of a row that are not neighbours are copied: nothing stands where the tensors are."""
    for seed in range(2):
        x = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in tensors(device, seed=seed, sq=3)]
        assert close(imbrex.torch.attention(*x), *x)
    assert len(looked_at) == 2


def test_gradients_are_refused_again(device, looked_at):
    q, k, v = tensors(device)
    imbrex.torch.attention(q, k, v)
    with pytest.raises(NotImplementedError, match="backward"):
        imbrex.torch.attention(q.requires_grad_(), k, v).sum().backward()
    with pytest.raises(NotImplementedError, match="backward"):
        _torch_attention.dense(q, k, v, _torch_attention.Score())


def test_plans_that_go_are_not_kept(device, looked_at):
    for d in range(8, 8 * 70, 8):
        x = tensors(device, d=d)
        imbrex.torch.attention(*x)
    plans = {id(kept) for kept in _torch_attention._plans.kept()}
    assert {id(recipe.kept) for recipe in _torch_attention._plans._recipes.values()} <= plans
    for n in range(600):
        imbrex.torch.attention(*tensors(device, sk=n + 1))
    assert 0 < len(_torch_attention._plans._recipes) <= 256


def test_threads_have_calls_of_their_own(device, looked_at):
    wrong = []

    def work(seed):
        for n in range(40):
            x = tensors(device, seed=seed * 100 + n, sk=9 + n % 3)
            for _ in range(2):
                if not close(imbrex.torch.attention(*x), *x):
                    wrong.append((seed, n))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
