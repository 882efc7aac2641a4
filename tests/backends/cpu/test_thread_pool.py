"""The thread pool of the CPU kernels."""

import ctypes
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cases import every
from harness import forward, inputs

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.problem import ConvProblem

CHUNKS = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)


def parallel_for(threads, count, chunks):
    """Call `ece408_parallel_for` with chunks(begin, end, thread)."""
    call = CHUNKS(lambda _, begin, end, thread: chunks(begin, end, thread))
    native.library().ece408_parallel_for(threads, ctypes.c_int64(count), call, None)


@every(count=[0, 1, 2, 3, 50, 1000, 200001], threads=[1, 2, 3, 7, 40])
def test_every_chunk_is_done_once_and_no_two_are_the_same_thread(threads, count):
    done = np.zeros(count, int)
    at_work, wrong = set(), []

    def chunks(begin, end, thread):
        if thread in at_work or not 0 <= thread < threads:
            wrong.append(thread)
        at_work.add(thread)
        done[begin:end] += 1
        at_work.discard(thread)

    parallel_for(threads, count, chunks)
    assert (done == 1).all()
    assert not wrong


@pytest.mark.parametrize("expected", [0, 1, 2, 5])
def test_a_worker_helps(expected):
    """Each of two chunks waits for the other to begin."""
    native.library().ece408_use_workers(expected)
    together = threading.Barrier(2)
    parallel_for(2, 2, lambda begin, end, thread: together.wait(timeout=60))
    native.library().ece408_use_workers(0)
    assert not together.broken


def test_the_caller_does_the_first_chunks_and_workers_the_last():
    chunks = []
    for _ in range(20):
        parallel_for(2, 500, lambda begin, end, thread: chunks.append((thread, begin, end)))
        callers = [end for thread, _, end in chunks if thread == 0]
        workers = [begin for thread, begin, _ in chunks if thread != 0]
        assert max(callers, default=0) <= min(workers, default=500)
        chunks.clear()


def test_a_held_up_worker_holds_up_its_own_caller_only():
    """All chunks of one call, even those on workers, wait until other calls have ended."""
    others_ended = threading.Event()
    ended = []
    held = threading.Thread(target=parallel_for, args=(3, 3, lambda *_: others_ended.wait(60)))
    held.start()
    for count in (1, 10, 1000):
        parallel_for(3, count, lambda begin, end, thread: ended.extend(range(begin, end)))
    others_ended.set()
    held.join()
    assert len(ended) == 1011


def test_work_within_work():
    ended = []
    parallel_for(
        3, 4, lambda *_: parallel_for(3, 5, lambda begin, end, thread: ended.append(end - begin))
    )
    assert sum(ended) == 20


def test_more_callers_than_can_have_help(rng):
    problems = [
        ConvProblem.parse(text)
        for text in ("b1,c16,h20,w20,m64,k3,p1x1", "b2,c8,h16,w40,m16,k5", "b9,c32,h9,w9,m32,k3")
    ]
    cases = [(problem, *inputs(problem, rng)[:2]) for problem in problems]
    expected = [forward(ReferenceBackend(), *case) for case in cases]

    def call(number):
        i = number % len(cases)
        return np.array_equal(forward(CpuBackend(), *cases[i]), expected[i])

    with settings.override(threads=3), ThreadPoolExecutor(24) as pool:
        assert all(pool.map(call, range(600)))


COMPUTES = """
import os, sys, time
import numpy as np
from ece408_op import settings
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.problem import ConvProblem
settings.configure(threads=3)
problem = ConvProblem.parse("b4,c8,h40,w40,m32,k3")
x, w = (np.ones(shape, np.float32) for shape in (problem.x_shape, problem.w_shape))

def compute():
    y = np.empty(problem.y_shape, np.float32)
    CpuBackend().forward(problem, x.ctypes.data, w.ctypes.data, None, y.ctypes.data, False)
    assert (y == 72).all()

compute()
"""
# If MXNet has loaded OpenMP, its threads may help in place of workers.
OPENMP = "import ctypes; ctypes.CDLL('libgomp.so.1')\n"
ENDS = {
    "asleep": "time.sleep(0.05)",
    "at_work": """
import threading
def for_ever():
    while True: compute()
threading.Thread(target=for_ever, daemon=True).start()
time.sleep(0.05)
""",
    "forked": """
for _ in range(3):
    child = os.fork()
    if child == 0:
        compute(); compute()
        os._exit(0)
    compute()
    assert os.waitpid(child, 0)[1] == 0
""",
}


@pytest.mark.parametrize("openmp", ["", OPENMP], ids=["alone", "openmp"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_a_process_forks_and_ends_with_workers(run_python, openmp, end):
    result = run_python(openmp + COMPUTES + end + "\nprint('ok')")
    assert (result.stdout, result.returncode) == ("ok\n", 0), result.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_after_a_pause_openmp_wakes_its_threads_on_other_cores(run_python):
    """The caller tries until they arrive; a thread pinned to a core stays on it."""
    watch = """
import ctypes, os, threading, time
from ece408_op.backends.cpu import native
CHUNKS = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int)
usual = os.sched_getaffinity(0)

def cores_of_helper(bound_to=None):
    \"\"\"Two chunks that each wait for the other one to begin.\"\"\"
    together, found = threading.Barrier(2), []
    def chunk(_, begin, end, thread):
        together.wait(timeout=60)
        if thread:
            found.append(os.sched_getaffinity(0))
            if bound_to is not None:
                os.sched_setaffinity(0, {bound_to})
    call = CHUNKS(chunk)
    native.library().ece408_parallel_for(2, ctypes.c_int64(2), call, None)
    return found[0]

# So few regions do not make the machine busy.
assert cores_of_helper() == usual
time.sleep(0.02)
cores = cores_of_helper()
assert cores < usual and len(cores) == len(usual) - 1, (cores, usual)
assert cores_of_helper(bound_to=min(usual)) == usual
time.sleep(0.02)
assert cores_of_helper() == {min(usual)}
assert os.sched_getaffinity(0) == usual
print("ok")
"""
    result = run_python(OPENMP + watch)
    assert (result.stdout, result.returncode) == ("ok\n", 0), result.stderr
