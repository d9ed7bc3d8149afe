"""The cache of plans behind the functions that take none, with a stand-in for the captures of CUDA."""
import gc
import threading
import weakref

import pytest

from imbrex import _plan_cache
from imbrex._plan_cache import Limits, PlanCache


class Plan:
    """A plan that only remembers which captures keep it."""

    def __init__(self, limits):
        self.limits, self.kept_by = limits, []

    def keep_for_capture(self, stream):
        self.kept_by.append(stream)


class Driver:
    """Captures by stream."""

    def __init__(self):
        self.captures, self.released = {}, 0

    def capture_of(self, stream):
        return self.captures.get(stream, 0)

    def release_captured(self):
        self.released += 1


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(_plan_cache, "_core", made)
    monkeypatch.setattr(_plan_cache, "_made", type(_plan_cache._made)())
    return made


def plans_of(cache):
    return [kept.plan for kept in cache.kept()]


def test_limits_grow_by_powers_of_two():
    assert Limits(1, 1, 1).grown(Limits(3, 17, 1000)) == Limits(4, 32, 1024)
    assert Limits(8, 64, 1024).grown(Limits(3, 65, 1, 1)) == Limits(8, 128, 1024, 1)
    assert Limits(1, 1, 1).grown(Limits(0, 0, 2**31 - 1)) == Limits(1, 1, 2**31 - 1)
    assert Limits(4, 4, 4).hold(Limits(4, 4, 4, 1)) and not Limits(4, 4, 4, 1).hold(Limits(4, 4, 4))
    assert Limits(0, 0, 0, 1).arguments() == dict(max_num_reqs=1, max_num_tokens=1, max_seq_len=1, max_query_len=1)


def test_a_plan_serves_what_it_holds(driver):
    cache = PlanCache()
    large = cache.find("a", Limits(4, 100, 1000), Plan)
    assert large.limits == Limits(4, 128, 1024)
    assert cache.find("a", Limits(1, 1, 1), Plan) is large
    long = cache.find("a", Limits(1, 1, 5000), Plan)  # beside it: both limits at once would take far more memory
    assert long.limits == Limits(1, 1, 8192) and cache.find("a", Limits(2, 9, 900), Plan) is large
    all_of_it = cache.find("a", Limits(4, 128, 8192), Plan)
    assert plans_of(cache) == [all_of_it.plan]  # what it can stand for is gone
    assert cache.find("b", Limits(1, 1, 1), Plan) is not all_of_it


def test_the_one_used_longest_ago_goes(driver):
    cache = PlanCache(most=3)
    plans = {name: cache.find(name, Limits(1, 1, 1), Plan) for name in "abc"}
    assert cache.find("a", Limits(1, 1, 1), Plan) is plans["a"]
    cache.find("d", Limits(1, 1, 1), Plan)
    assert plans["b"].plan not in plans_of(cache) and plans["a"].plan in plans_of(cache) and len(plans_of(cache)) == 3
    for size in range(9):  # none of them can stand for another
        cache.find("e", Limits(1 << size, 1, 1 << (9 - size)), Plan)
        assert len(plans_of(cache)) <= 3
    assert cache._count == len(plans_of(cache))


def test_threads_have_plans_of_their_own(driver):
    cache, seen, alive = PlanCache(), [], []

    def work():
        kept = cache.find("a", Limits(1, 1, 1), Plan)
        assert cache.find("a", Limits(1, 1, 1), Plan) is kept
        seen.append(id(kept.plan))
        alive.append(weakref.ref(kept.plan))

    mine = cache.find("a", Limits(1, 1, 1), Plan)
    for _ in range(50):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    gc.collect()
    assert id(mine.plan) not in seen and all(plan() is None for plan in alive)
    assert plans_of(cache) == [mine.plan]


def test_a_captured_plan_leaves_the_cache(driver):
    cache = PlanCache()
    eager = cache.find("a", Limits(2, 2, 100), Plan, 7)
    eager.batch = "what it was updated with"
    driver.captures[7] = 1
    captured = cache.find("a", Limits(2, 2, 100), Plan, 7)
    assert captured is eager and captured.plan.kept_by == [7] and captured.batch is None
    assert cache.find("a", Limits(2, 2, 90), Plan, 7) is captured and captured.plan.kept_by == [7]  # the layers of a graph share it
    del driver.captures[7]
    later = cache.find("a", Limits(2, 2, 100), Plan, 7)
    assert later is not captured and plans_of(cache) == [later.plan]
    released = weakref.ref(captured.plan)
    del captured, eager
    gc.collect()
    assert released() is None, "the graph alone keeps it"
    assert driver.released == 2


def test_graphs_do_not_share_plans(driver):
    cache = PlanCache()
    cache.find("a", Limits(2, 2, 100), Plan, 7)
    found = []
    for capture in (1, 2, 3):  # the second and third make a plan while the stream is captured
        driver.captures[7] = capture
        found.append(cache.find("a", Limits(2, 2, 100), Plan, 7))
    assert len({id(kept.plan) for kept in found}) == 3 and all(kept.plan.kept_by == [7] for kept in found)
    assert plans_of(cache) == []


def test_branches_of_a_graph_do_not_share_plans(driver):
    cache = PlanCache()
    cache.find("a", Limits(1, 1, 1), Plan, 7)
    driver.captures.update({7: 1, 8: 1})
    main, branch = (cache.find("a", Limits(1, 1, 1), Plan, stream) for stream in (7, 8))
    assert main is not branch and cache.find("a", Limits(1, 1, 1), Plan, 7) is main and cache.find("a", Limits(1, 1, 1), Plan, 8) is branch


def test_a_graph_has_the_limits_of_its_batch(driver):
    cache = PlanCache()
    large = cache.find("a", Limits(64, 64, 9000), Plan, 7)
    driver.captures[7] = 1
    small = cache.find("a", Limits(2, 2, 100), Plan, 7)
    assert small.limits == Limits(2, 2, 128) and plans_of(cache) == [large.plan]
    larger = cache.find("a", Limits(2, 2, 200), Plan, 7)
    assert larger.limits == Limits(2, 2, 256) and small.plan.kept_by == larger.plan.kept_by == [7]


def test_kernels_are_compiled_before_a_capture(driver):
    cache = PlanCache()
    driver.captures[7] = 1
    with pytest.raises(RuntimeError, match="once like this before a CUDA graph"):
        cache.find("a", Limits(1, 1, 1), Plan, 7)
    del driver.captures[7]
    thread = threading.Thread(target=cache.find, args=("a", Limits(1, 1, 1), Plan, 9))  # by any thread, for any stream and size
    thread.start()
    thread.join()
    driver.captures[7] = 1
    assert cache.find("a", Limits(5, 5, 5), Plan, 7).limits == Limits(8, 8, 8)


def test_a_plan_that_cannot_be_made_leaves_nothing(driver):
    cache = PlanCache()

    def fails(limits):
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError):
            cache.find("a", Limits(1, 1, 1), fails)
    assert plans_of(cache) == [] and not _plan_cache._made


def test_recipes_go_with_the_plans(driver):
    cache = PlanCache()
    cache.find("a", Limits(1, 1, 1), Plan)
    cache.remember("call", "recipe")
    assert cache.recall("call") == "recipe" and cache.recall("other") is None
    cache.find("a", Limits(1, 1, 1), Plan)
    cache.leave_captures(7)
    assert cache.recall("call") == "recipe" and driver.released == 1
    cache.find("b", Limits(1, 1, 1), Plan)  # a new plan may push others out
    assert cache.recall("call") is None
    cache.remember("call", "recipe")
    driver.captures[7] = 1
    cache.find("a", Limits(1, 1, 1), Plan, 7)  # leaves with the graph
    driver.captures.clear()
    cache.leave_captures(7)
    assert cache.recall("call") is None
    for n in range(1000):
        cache.remember(n, n)
    assert cache.recall(999) == 999 and cache.recall(0) is None
