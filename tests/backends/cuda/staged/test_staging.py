"""Staging with a fake GPU: chunks, lanes, sums and bounds."""

import dataclasses
import threading
import time

import numpy as np
import pytest
from cases import every
from clocks import Clock
from fake_gpu import FakeGpu, FakeLoaded

from ece408_op import settings
from ece408_op.backends import as_array
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.kernels import tuned
from ece408_op.backends.cuda.staged import ring, staging
from ece408_op.backends.cuda.staged.chunk_layout import divide
from ece408_op.backends.cuda.staged.staging import Staging, covered
from ece408_op.errors import NotEnoughMemory
from ece408_op.problem import ConvProblem

FA19_1 = ConvProblem.parse("b10000,c1,h70,w70,m12,k5")
SMALL = ConvProblem.parse("b37,c4,h9,w8,m6,k3x2,s2x1,p1,g2,bias")


@pytest.fixture
def plans(monkeypatch):
    """Collect the catalog's plans, which the fake kernels compute."""
    known = {}
    real = work.plan

    def plan(problem, direction, capability, accumulate, kernel, layout=None):
        made = real(problem, direction, capability, accumulate, kernel, layout)
        kernel = dataclasses.replace(made.kernel, name=f"{made.kernel.name}#{len(known)}")
        made = dataclasses.replace(made, kernel=kernel)
        known[made] = (problem, direction, accumulate)
        return made

    monkeypatch.setattr(work, "plan", plan)
    return known


@pytest.fixture
def splitting(monkeypatch):
    """Make GPUs divide even small calls."""
    monkeypatch.setattr(staging, "_SPLIT_FROM_BYTES", 0)


def _staging(plans, budget=1 << 30, threads=4, clock=time.perf_counter):
    return Staging(budget, threads, lambda gpu, plan: FakeLoaded(plan, *plans[plan]), clock)


def _arrays(problem, rng):
    shapes = (problem.x_shape, problem.w_shape, problem.bias_shape, problem.y_shape)
    return [rng.integers(-3, 4, shape).astype(problem.dtype) for shape in shapes]


def _addresses(arrays):
    return [array.ctypes.data for array in arrays]


class Call:
    """A forward call, its output, and what that should be."""

    def __init__(self, problem, rng):
        x, w, bias, self.y = _arrays(problem, rng)
        self.arrays = (x, w, bias)
        addresses = [*_addresses((x, w)), bias.ctypes.data if problem.bias else None]
        self.asked = work.forward(problem, *addresses, self.y.ctypes.data, False, None)
        self.expected = self.y.copy()
        CpuBackend().forward(problem, *addresses, self.expected.ctypes.data, False)

    def check(self, gpus, how):
        self.y[:] = np.nan
        staging.compute(self.asked, gpus, how)
        np.testing.assert_array_equal(self.y, self.expected)


@every(accumulate=[False, True], gpus=[1, 2, 3], dtype=["float32", "float64", "float16"])
def test_every_direction_in_small_chunks_equals_the_cpu(
    plans, splitting, rng, dtype, gpus, accumulate
):
    problem = dataclasses.replace(SMALL, dtype=dtype)
    x, w, bias, dy = _arrays(problem, rng)
    found = [a.copy() for a in (dy, x, w, bias)]
    expected = [a.copy() for a in found]
    y, dx, dw, dbias = _addresses(found)
    px, pw, pbias, pdy = _addresses((x, w, bias, dy))
    fakes = [FakeGpu() for _ in range(gpus)]
    how = _staging(plans, budget=20_000)
    for each in (
        work.forward(problem, px, pw, pbias, y, accumulate, None),
        work.backward_data(problem, pw, pdy, dx, accumulate),
        work.backward_weight(problem, px, pdy, dw, dbias, accumulate, accumulate),
    ):
        staging.compute(each, fakes, how)
    y, dx, dw, dbias = _addresses(expected)
    cpu = CpuBackend()
    cpu.forward(problem, px, pw, pbias, y, accumulate)
    cpu.backward_data(problem, pw, pdy, dx, accumulate)
    cpu.backward_weight(problem, px, pdy, dw, dbias, accumulate, accumulate)
    np.testing.assert_equal(found, expected)
    # The first call of a shape uses all GPUs.
    assert all(len(gpu.requests) == 3 for gpu in fakes)
    assert all(count * size <= 20_000 for gpu in fakes for count, size in gpu.requests)


@every(way=[(False, 1), (True, 2)])
def test_lent_memory_is_written_and_read_in_place(plans, splitting, pool, rng, way):
    accumulate, gpus = way
    problem = ConvProblem.parse("b180,c8,h40,w40,m8,k3,p1")
    x, w, _, dy = _arrays(problem, rng)
    expected = [dy.copy(), x.copy()]
    lent = [_lent(pool, array) for array in (dy, x)]
    fakes = [FakeGpu() for _ in range(gpus)]
    how = _staging(plans, budget=6 << 20)
    py, px = _addresses(lent)
    pw = w.ctypes.data
    cpu = CpuBackend()
    cpu.forward(problem, x.ctypes.data, pw, None, expected[0].ctypes.data, accumulate)
    cpu.backward_data(problem, pw, expected[0].ctypes.data, expected[1].ctypes.data, accumulate)
    staging.compute(work.forward(problem, px, pw, None, py, accumulate, None), fakes, how)
    np.testing.assert_array_equal(lent[0], expected[0])
    np.testing.assert_array_equal(lent[1], x)
    staging.compute(work.backward_data(problem, pw, py, px, accumulate), fakes, how)
    np.testing.assert_array_equal(lent[1], expected[1])
    moved = 2 * (x.nbytes + dy.nbytes)
    assert sum(gpu.reached for gpu in fakes) == moved * (3 if accumulate else 2) // 2


def _lent(pool, array):
    """Return a copy of an array in memory of the pool."""
    memory = pool.take(array.nbytes, FakeGpu(), 2)
    copy = as_array(memory.address, array.shape, array.dtype.name)
    copy[:] = array
    return copy


def test_ordinary_memory_is_not_reached(plans, pool, rng):
    gpu = FakeGpu()
    Call(SMALL, rng).check([gpu], _staging(plans, budget=20_000))
    assert gpu.reached == 0


def test_shares_are_learnt_apart_for_memory_that_is_reached(plans, pool, rng):
    """With such memory, two GPUs may be faster although one is otherwise."""
    problem = ConvProblem.parse("b180,c8,h40,w40,m8,k3,p1")
    x, w, _, y = _arrays(problem, rng)
    gpus, how = [FakeGpu(), FakeGpu()], _staging(plans, budget=6 << 20)
    cuts = {
        id(how.partition(work.forward(problem, *_addresses((x, w)), None, to, False, None), gpus))
        for to in [y.ctypes.data, _lent(pool, y).ctypes.data] * 2
    }
    assert len(cuts) == 2


def _launches(gpus):
    """Return how many launches each GPU made since the previous call."""
    found = [gpu.launches for gpu in gpus]
    for gpu in gpus:
        gpu.launches = 0
    return found


def test_a_gpu_that_is_twice_as_slow_gets_a_third(plans, splitting, rng):
    call, clock = Call(ConvProblem.parse("b48,c1,h9,w8,m2,k3"), rng), Clock()
    gpus = [FakeGpu(spend=clock.spending(seconds)) for seconds in (1, 2)]
    how = _staging(plans, budget=16_000, clock=clock)
    dealt = []
    for _ in range(14):
        call.check(gpus, how)
        dealt.append(_launches(gpus))
    # On both, on one, and then on the faster choice.
    alone, shared = [16, 0], [11, 5]
    assert dealt == [[8, 8], shared, shared, alone, alone, alone, *8 * [shared]]


def test_small_batches_stay_on_the_gpu_that_is_faster_alone(plans, splitting, rng):
    call, clock = Call(ConvProblem.parse("b8,c1,h9,w8,m2,k3"), rng), Clock()
    gpus = [FakeGpu(spend=clock.spending(seconds)) for seconds in (1, 50)]
    how = _staging(plans, budget=4_000, clock=clock)
    for _ in range(6):
        call.check(gpus, how)
    assert min(_launches(gpus)) > 0
    for _ in range(5):
        call.check(gpus, how)
    assert _launches(gpus)[1] == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_over_the_batch_do_not_depend_on_shares(plans, rng, dtype):
    problem = dataclasses.replace(SMALL, dtype=dtype)
    x, dy = (rng.standard_normal(s).astype(dtype) for s in (problem.x_shape, problem.y_shape))
    dw, dbias = (np.empty(s, dtype) for s in (problem.w_shape, problem.bias_shape))
    asked = work.backward_weight(problem, *_addresses((x, dy, dw, dbias)), False, False)
    clock = Clock()
    gpus = [FakeGpu(spend=clock.spending(seconds)) for seconds in (2, 6, 1)]
    how = _staging(plans, budget=20_000, clock=clock)
    found = set()
    for _ in range(12):
        staging.compute(asked, gpus, how)
        found.add((dw.tobytes(), dbias.tobytes()))
    assert len(found) == 1
    if dtype == "float32":
        staging.compute(asked, gpus[:1], how)
        assert (dw.tobytes(), dbias.tobytes()) in found


def test_a_call_that_copies_little_is_one_gpus(plans, rng):
    call, gpus = Call(SMALL, rng), [FakeGpu(), FakeGpu()]
    staging.prepare(call.asked, gpus, _staging(plans))
    call.check(gpus, _staging(plans))
    assert [len(gpu.requests) for gpu in gpus] == [2, 0]


def test_each_gpus_threads_make_the_memory_of_its_own_results(plans, splitting, rng, monkeypatch):
    call, made = Call(SMALL, rng), []
    y = call.y

    def populate(address, nbytes, threads):
        made.append((threading.get_ident(), address - y.ctypes.data, nbytes, threads))

    monkeypatch.setattr(ring, "populate", populate)
    monkeypatch.setattr(ring, "_MADE_AHEAD", 4000)
    call.check([FakeGpu(), FakeGpu()], _staging(plans, budget=20_000, threads=6))
    spans = sorted((at, at + nbytes) for _, at, nbytes, _ in made)
    assert [begin for begin, _ in spans] == [0] + [end for _, end in spans[:-1]]
    assert spans[-1][1] == y.nbytes
    assert {threads for *_, threads in made} == {3}
    by_thread = {}
    for thread, at, *_ in sorted(made, key=lambda each: each[1]):
        by_thread.setdefault(thread, []).append(at)
    first, second = by_thread.values()
    assert max(first) < min(second)
    assert len(second) > 1


def test_the_log_names_what_chunks_of_this_size_ran(plans, rng, tmp_path):
    problem = ConvProblem.parse("b37,c1,h9,w8,m6,k3")
    x, w, _, y = _arrays(problem, rng)
    asked = work.forward(problem, *_addresses((x, w)), None, y.ctypes.data, False, None)
    measured = (("1_naive", 5), ("5_implicit_gemm", problem.batch))
    with settings.override(cache=tmp_path):
        tuned.save(
            [
                tuned.Result(dataclasses.replace(problem, batch=n), "float32", kernel, (), 1.0, 2)
                for kernel, n in measured
            ],
            FakeGpu(),
        )
        done = staging.compute(asked, [FakeGpu()], _staging(plans, budget=32_000))
    names = done.kernel.split("+")
    assert {name.partition("#")[0] for name in names} == {"1_naive"}
    ran = [problem for plan, (problem, *_) in plans.items() if plan.kernel.name in names]
    assert len(ran) == len(names)
    assert all(problem.batch < 10 for problem in ran)


def test_a_gradient_alone(plans, rng):
    problem = SMALL
    x, w, bias, dy = _arrays(problem, rng)
    found, expected = (w.copy(), bias.copy()), (w.copy(), bias.copy())
    for wanted in ((0,), (1,)):
        pair = [found[n].ctypes.data if n in wanted else None for n in (0, 1)]
        arrays = (x.ctypes.data, dy.ctypes.data)
        asked = work.backward_weight(problem, *arrays, *pair, True, False)
        staging.compute(asked, [FakeGpu()], _staging(plans, budget=20_000))
    CpuBackend().backward_weight(problem, *arrays, *_addresses(expected), True, False)
    np.testing.assert_equal(found, expected)


def test_less_memory_than_budgeted_makes_chunks_smaller(plans, rng):
    gpu = FakeGpu(memory=9_000)
    Call(SMALL, rng).check([gpu], _staging(plans))
    sizes = [count * size for count, size in gpu.requests]
    assert len(sizes) > 1
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 9_000


def test_the_next_call_asks_for_no_memory(plans, rng, monkeypatch):
    """Nor does it query free memory, which takes long."""
    gpu, how = FakeGpu(), _staging(plans, budget=None)
    free = [1 << 30]
    monkeypatch.setattr(FakeGpu, "free_bytes", lambda gpu: free.pop(), raising=False)
    monkeypatch.setattr(FakeGpu, "reserved_bytes", lambda gpu: 0, raising=False)
    for _ in range(2):
        Call(SMALL, rng).check([gpu], how)
    assert not free


def test_not_enough_for_one_image(plans, rng):
    call = Call(SMALL, rng)
    message = r"one image of b37,c4,.* takes \d+ bytes on the GPU, and 100 may be used; .*GPU_MEM"
    with pytest.raises(NotEnoughMemory, match=message):
        staging.compute(call.asked, [FakeGpu()], _staging(plans, budget=100))
    with pytest.raises(NotEnoughMemory, match=r"fake GPU is full|one image of"):
        staging.compute(call.asked, [FakeGpu(memory=100)], _staging(plans))


def test_a_failing_kernel_ends_the_call(plans, rng):
    class Failing(FakeLoaded):
        def launch(self, pointers, stream):
            if gpu.waits == 0 and gpu.launches == 3:
                raise ZeroDivisionError("in a kernel")

    call = Call(SMALL, rng)
    how = Staging(20_000, 4, lambda gpu, plan: Failing(plan, *plans[plan]))
    gpu = FakeGpu()
    with pytest.raises(ZeroDivisionError, match="in a kernel"):
        staging.compute(call.asked, [gpu], how)
    assert not gpu.staging.locked()
    # Pending work may write to the caller's arrays.
    assert gpu.waits == gpu.requests[-1][0] > 1


def _work(problem):
    return work.forward(problem, 0, 0, 0 if problem.bias else None, 0, False, None)


@every(lanes=[3, 8], budget=[64 << 20, 1 << 30, 1 << 36])
def test_a_division_covers_the_batch_within_the_budget(budget, lanes):
    division = divide(_work(FA19_1), FakeGpu(), budget, lanes)
    assert division.device_bytes <= budget
    assert division.lanes == lanes
    firsts, sizes = zip(*division.chunks(range(FA19_1.batch)))
    assert sum(sizes) == FA19_1.batch
    assert list(firsts) == [sum(sizes[:n]) for n in range(len(sizes))]
    assert sizes[0] == max(sizes)
    one = 4 * (70 * 70 + 12 * 66 * 66)
    assert (1 << 20) <= sizes[0] * one <= (32 << 20)


def test_a_batch_of_one_takes_one_lane():
    division = divide(_work(dataclasses.replace(FA19_1, batch=1)), FakeGpu(), 1 << 30, 8)
    assert (division.lanes, division.chunks(range(1))) == (1, [(0, 1)])


def test_covered_counts_what_overlaps_once():
    assert covered([]) == 0
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == 4
