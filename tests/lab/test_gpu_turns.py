"""Turns on the GPU, with a fake GPU and fake processes."""

import contextlib
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from kernel_files import CUDA_FORMS
from places import ROOT

from ece408_op.backends import kernel_file
from ece408_op.errors import KernelFailed
from ece408_op.lab import gpu_turns, timing
from ece408_op.problem import ConvProblem

STARTERS = ROOT / "kernels" / "files" / "starters"
LAYERS = [
    (text, ConvProblem.parse(text)) for text in ("b100,c1,h20,w20,m3,k5", "b1000,c1,h70,w70,m12,k5")
]
# Seconds of an empty kernel, and of one call of the kernel.
EMPTY, KERNEL = 1e-5, 5e-5


class PlayedGpu:
    index = 0
    active = contextlib.nullcontext

    def free_bytes(self):
        return 64 << 30


class Idle:
    """Its other methods do nothing."""

    def __getattr__(self, name):
        return lambda *given: None


class PlayedBlock(Idle):
    def __init__(self, gpu):
        self.sets = []

    def place(self, problem, sets):
        self.sets = [(3 * n + 1, 0, 3 * n + 2) for n in range(sets)]
        return {"memory": "", "sets": self.sets}

    def strays(self):
        return []


class PlayedJudge(Idle):
    """`play.wrong` is the number of wrong elements of an output."""

    bound = 1.0

    def __init__(self, play):
        self._play = play

    def wrong(self, address):
        return self._play.wrong(self._play.running)

    def changed(self, role, address):
        return False

    def read(self, role, out):
        out.fill(1)


class PlayedArrays(Idle):
    def place(self, problem):
        self._problem = problem
        return {"places": []}

    def array(self, role):
        return np.zeros((self._problem.x_shape, self._problem.w_shape)[role], np.float32)

    def output(self):
        return np.ones(self._problem.y_shape, np.float32)


class PlayedSession(Idle):
    """One for each of the fake processes; `play.running` is the last that has computed."""

    def __init__(self, play, kernel):
        self._play, self._kernel = play, kernel
        self.kernel, self._fails = kernel, False
        self.form = getattr(kernel, "form", "declared")
        self.by_method = self.form == "course_2020"
        self.has_prolog = self.by_method and kernel.name != "one-method.cu"
        self.is_ours = isinstance(kernel, str)
        self.late, self.idle = 0, 0.0
        self.host_arrays = PlayedArrays()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def prepare(self, problem, told):
        self._calls = len(told.get("sets", ()))

    def go(self):
        self._play.running = self._kernel
        name = getattr(self._kernel, "name", "")
        if name == self._play.crashes:
            self._fails = True
            raise KernelFailed("an illegal memory access was encountered")
        self._play.gone.append((name, self._calls))
        return self._calls * (
            EMPTY + KERNEL * self._play.slowness_of.get(name, self._play.slowness)
        )

    def go_idle(self):
        self._play.gone.append(("nothing", self._calls))
        return self._calls * EMPTY

    def method(self, name):
        assert not self._fails, "it has crashed, and takes another process"
        return 0.25


@pytest.fixture
def play(monkeypatch):
    """Simulates the GPU and all processes on it."""
    play = SimpleNamespace(running=None, gone=[], crashes=None, slowness=1)
    play.slowness_of = {"empty.cuh": 0, "empty_2020.cu": 0}
    play.wrong = lambda running: 0

    @contextlib.contextmanager
    def judge(gpu, problem, largest_error):
        yield PlayedJudge(play)

    gpu = PlayedGpu()
    for module in (gpu_turns, timing):
        monkeypatch.setattr(module, "device", SimpleNamespace(get=lambda index: gpu))
        monkeypatch.setattr(module, "Session", lambda kernel, *_: PlayedSession(play, kernel))
    monkeypatch.setattr(gpu_turns, "Block", PlayedBlock)
    monkeypatch.setattr(gpu_turns, "judge", judge)
    return play


def _files(*names):
    return [kernel_file.find(str(STARTERS / name)) for name in names]


@pytest.mark.slow
def test_the_time_of_launching_is_subtracted(play):
    files = [*_files("start.cu", "new-forward.cu", "new-forward.cuh"), "6_register_tiles"]
    found = timing.measure(files, LAYERS, 2)
    assert [each.name for each in found[:5]] == [
        *(timing.OURS, "start.cu", "new-forward.cu", "new-forward.cuh", "6_register_tiles")
    ]
    for each in found:
        assert not each.failure
        assert each.seconds == pytest.approx([KERNEL] * 4)
        assert each.around == ([0.5, 0.5] if each.name == "new-forward.cu" else [])
    assert {"nothing", "empty.cuh", "empty_2020.cu"} < {name for name, _ in play.gone}


@pytest.mark.parametrize(("slowness", "calls"), [(1, 64), (20, 16), (1000, 4)])
def test_windows_have_as_many_calls_as_it_takes(play, slowness, calls):
    play.slowness = slowness
    _, found = timing.measure(_files("new-forward.cuh"), LAYERS[:1], 2)
    assert found.seconds == pytest.approx([slowness * KERNEL] * 4)
    windows = [n for name, n in play.gone if name == "new-forward.cuh"]
    for turn in zip(*[iter(windows)] * 4):
        # The first process of each turn estimates a call's time, and any number of others may
        # follow.
        assert 1 <= turn[0] <= 4
        assert min(turn[1:]) >= 1
        assert max(turn[1:]) <= calls
        assert sorted(turn[1:])[1] >= 0.75 * calls
    assert len(windows) == 12


def test_files_of_one_name_are_called_by_their_paths(play, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("ann", "bob"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "start.cu").write_text((STARTERS / "start.cu").read_text())
    files = [kernel_file.find(f"{folder}/start.cu") for folder in ("ann", "bob")]
    found = timing.measure([*files, *_files("new-forward.cuh")], LAYERS[:1], 1)
    names = [timing.OURS, "ann/start.cu", "bob/start.cu", "new-forward.cuh"]
    assert [each.name for each in found] == names


def test_a_wrong_output_ends_a_file_and_no_other(play):
    play.wrong = lambda running: int(getattr(running, "name", "") == "new-forward.cuh")
    ours, wrong, right = timing.measure(_files("new-forward.cuh", "start.cu"), LAYERS[:1], 2)
    assert "elements are wrong" in wrong.failure
    assert not wrong.seconds
    assert not ours.failure
    assert len(right.seconds) == 4


@pytest.mark.parametrize("how", ["wrong", "crashes", "one-method"])
def test_a_file_that_needs_its_prolog_counts_as_a_whole(play, written, how):
    files, note = _files("new-forward.cu"), "prolog and epilog count"
    if how == "wrong":
        play.wrong = lambda running: int(getattr(running, "name", "") == "new-forward.cu")
    elif how == "crashes":
        play.crashes = "new-forward.cu"
    else:
        path = written("one-method.cu", CUDA_FORMS["one-method.cu"])
        files = [kernel_file.find(str(path))]
        note = "copies count: conv_forward_gpu takes arrays on the host"
    _, found = timing.measure(files, LAYERS[:1], 2)
    assert not found.failure
    assert found.seconds == [0.75, 0.75]
    assert note in found.note


def test_a_crash_is_told(play):
    play.crashes = "new-forward.cuh"
    _, found = timing.measure(_files("new-forward.cuh"), LAYERS[:1], 2)
    assert "illegal memory access" in found.failure


def test_nobody_is_faster_than_the_machine(play, monkeypatch):
    monkeypatch.setattr(timing, "floor_seconds", lambda kind, problem: KERNEL)
    play.slowness_of["new-forward.cuh"] = 0.1
    _, found = timing.measure(_files("new-forward.cuh"), LAYERS[:1], 2)
    assert found.failure == (
        "a call took 0.005 ms; no kernel takes less than 0.00625 ms on this machine"
    )
    assert found.seconds == []


def test_work_that_comes_later_is_found(play, monkeypatch):
    ticks = itertools.count()
    # Reading an output takes a hundred times as long after the file's calls.
    monkeypatch.setattr(
        gpu_turns.time,
        "perf_counter",
        lambda: next(ticks) * (1e-1 if getattr(play.running, "form", "") else 1e-3),
    )
    _, found = timing.measure(_files("new-forward.cuh"), LAYERS[:1], 4)
    assert "its call is not over when it returns" in found.failure
