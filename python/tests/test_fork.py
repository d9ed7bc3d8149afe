"""Forked children: os.fork, children of children, multiprocessing's fork, and forks while another thread computes."""
import multiprocessing
import os
import signal
import threading
import time

import numpy as np

import imbrex


SPEC = imbrex.AttentionSpec(8, 2, 64, q_dtype="f32", kv_dtype="f32", block_size=0)


def attend(seed=0):
    """By the threads that all plans share; as by one thread."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((192, heads, 64)).astype(np.float32) for heads in (8, 2, 2))
    starts = np.array([0, 100, 192], np.int32)
    outs = []
    for num_threads in (0, 1):
        plan = imbrex.Plan(SPEC, max_seq_len=128, num_threads=num_threads)
        plan.update(starts, starts[1:] - starts[:-1], kv_start_loc=starts)
        outs.append(plan.run(q, imbrex.KvLayer(k, v)))
    np.testing.assert_array_equal(outs[0], outs[1])
    return outs[0]


def in_child(body):
    """The exit code of a forked child that calls body(): 0, 1 for an exception; -9 when it hangs."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    for _ in range(3000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_computes():
    expected = attend()
    assert in_child(lambda: np.testing.assert_array_equal(attend(), expected)) == 0
    np.testing.assert_array_equal(attend(), expected)


def test_a_child_of_a_child_computes():
    attend()

    def child():
        attend()
        assert in_child(attend) == 0
        attend()

    assert in_child(child) == 0
    assert in_child(lambda: os._exit(in_child(attend))) == 0


def test_a_plan_with_threads_of_its_own_runs_in_a_child_and_is_freed_there():
    spec = imbrex.AttentionSpec(8, 2, 64, q_dtype="f32")
    plan = [imbrex.Plan(spec, num_threads=3, max_seq_len=64)]
    rows = np.ones((32, 8, 64), np.float32)
    cache = imbrex.KvCache(spec, num_layers=1, num_blocks=2)
    lengths = np.array([0, 32], np.int32)

    def step():
        plan[0].update(lengths, lengths[1:], block_table=np.array([[1, 0]], np.int32), slot_mapping=np.arange(32, dtype=np.int64))
        plan[0].write_kv(cache.layer(0), rows[:, :2], rows[:, :2])
        np.testing.assert_allclose(plan[0].run(rows, cache.layer(0)), rows)

    step()
    assert in_child(lambda: (step(), plan.clear())) == 0
    step()


def test_multiprocessing_forks():
    expected = attend(3)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for out in pool.map_async(attend, [3] * 6).get(60):
            np.testing.assert_array_equal(out, expected)


def test_forks_while_another_thread_computes():
    attend()
    stop = threading.Event()
    count = [0]

    def compute():
        while not stop.is_set():
            attend()
            count[0] += 1

    other = threading.Thread(target=compute)
    other.start()
    try:
        for _ in range(6):
            assert in_child(attend) == 0
    finally:
        stop.set()
        other.join()
    assert count[0] > 0
