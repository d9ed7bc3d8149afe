"""The one-call functions in several threads at once: each call has the result that it has alone."""
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import imbrex

KINDS = ["varlen", "paged"]


def int32(*values):
    return np.array(values, np.int32)


def call_of(kind, framework, seed):
    """A call, and how often threads make it."""
    rng = np.random.default_rng(seed)
    convert = (lambda x: x) if framework == "numpy" else pytest.importorskip("torch").from_numpy
    if kind == "varlen":
        num_q, num_k = 33 + seed, 70 + 7 * seed
        q, k, v = (convert(rng.standard_normal((n, h, 64), np.float32)) for n, h in ((num_q, 8), (num_k, 2), (num_k, 2)))
        starts = convert(int32(0, num_q)), convert(int32(0, num_k))
        return lambda: imbrex.attention_varlen(q, k, v, *starts, causal=True)
    q = convert(rng.standard_normal((4, 8, 64), np.float32))
    k, v = (convert(rng.standard_normal((64, 16, 2, 64), np.float32)) for _ in range(2))
    lens = convert(rng.integers(100, 250, 4).astype(np.int32))
    table = convert(rng.permutation(64).astype(np.int32).reshape(4, 16))
    return lambda: imbrex.attention_paged(q, k, v, convert(int32(0, 1, 2, 3, 4)), lens, table)


def wrong_calls(kind, framework, num_threads, calls):
    wrong = []

    def work(seed):
        call = call_of(kind, framework, seed)
        expected = alone[seed]
        for _ in range(calls):
            wrong.extend([seed] * (not np.array_equal(np.asarray(call()), expected)))

    alone = [np.array(call_of(kind, framework, seed)()) for seed in range(num_threads)]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "framework, num_threads, cores",
    [("numpy", 2, "1"), ("numpy", 2, "2"), ("numpy", 3, "1"), ("numpy", 3, "2"), ("torch", 2, "2"), ("torch", 3, "1")],
)
def test_threads_do_not_disturb_each_other(kind, framework, num_threads, cores):
    """In a process of its own: what goes wrong here goes as far as the heap. `cores` are those of the pool that all plans share."""
    if framework == "torch":
        pytest.importorskip("torch")
    code = f"import test_threads; print(test_threads.wrong_calls({kind!r}, {framework!r}, {num_threads}, 300))"
    paths = [os.path.dirname(__file__), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "IMBREX_NUM_THREADS": cores}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.split() == ["0"]


def test_plans_go_with_their_threads():
    """Many short threads leave no plan behind."""

    def resident():
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((1, 32, 128), np.float32), rng.standard_normal((1 << 14, 8, 128), np.float32)

    def work():
        imbrex.attention_varlen(q, k, k, int32(0, 1), int32(0, len(k)))  # many pieces: megabytes of scratch

    def threads(count):
        for _ in range(count):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    threads(20)
    before = resident()
    threads(100)
    assert resident() - before < 4 << 20


def in_process_with_torch(body, **environment):
    """What a process prints that has PyTorch, and no IMBREX_NUM_THREADS unless it is given."""
    pytest.importorskip("torch")
    around = {name: value for name, value in os.environ.items() if name != "IMBREX_NUM_THREADS"}
    paths = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    code = "import torch, imbrex, test_threads, threading, os\n" + body
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**around, **environment, "PYTHONPATH": paths}, timeout=120
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.split()


# The names that the system has for a process's threads: one for each that is there.
COUNT = """
call = test_threads.call_of("paged", "torch", 1)
threads = lambda: len(os.listdir("/proc/self/task"))
call()
torch.set_num_threads(3)
torch.ones(1 << 20).add_(1)  # PyTorch's threads are there
before = threads()
expected = call().clone()
print(threads() - before)
"""


def has_openmp():
    torch = pytest.importorskip("torch")
    return "backend: OpenMP" in torch.__config__.parallel_info()


def test_the_threads_of_pytorch_are_used():
    if not has_openmp():
        pytest.skip("this PyTorch has no OpenMP")
    assert in_process_with_torch(COUNT) == ["0"]


def test_threads_of_its_own_are_used_where_they_are_asked_for():
    assert in_process_with_torch(COUNT.replace("call()\ntorch.set", "torch.set"), IMBREX_NUM_THREADS="3") == ["2"]


def test_results_do_not_depend_on_the_threads_of_pytorch():
    """Not on how many there are, in a forked child, where they are not, nor in threads that PyTorch did not start."""
    body = (
        COUNT
        + """
same = lambda: torch.equal(call(), expected)
for count in (1, 2, 5, 3):
    torch.set_num_threads(count)
    assert same()
child = os.fork()
if child == 0:
    os._exit(0 if all(same() for _ in range(3)) else 1)
print(os.waitpid(child, 0)[1])
wrong = []
def work():
    other = test_threads.call_of("paged", "torch", 1)
    for _ in range(50):
        if not torch.equal(other(), expected):
            wrong.append(1)
many = [threading.Thread(target=work) for _ in range(3)]
[t.start() for t in many]; [t.join() for t in many]
print(len(wrong), torch.equal(call(), expected))
"""
    )
    assert in_process_with_torch(body)[1:] == ["0", "0", "True"]
