"""Calls of a network whose images several GPUs share: the emulator in the place of each."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from gpu_networks import Case, array, small

from ece408_op.backends import network
from ece408_op.backends.cuda import sharing
from ece408_op.backends.network import pieces
from ece408_op.backends.network.emulated import EmulatedMachine
from ece408_op.backends.network.program import Program
from ece408_op.op_log import op_times

pytestmark = pytest.mark.usefixtures("emulated")


class Machine(EmulatedMachine):
    """One of several, each of whose launches of a whole network takes `pause` seconds more. `_lock`
    of the emulator is held while it works, not while it pauses."""

    def __init__(self, number, pause=0.0):
        super().__init__("fast")
        self.key = ("emulator", number)
        self._turn, self.lock = self.lock, contextlib.nullcontext()
        self.pause, self.chunks = pause, 0

    @contextlib.contextmanager
    def active(self):
        with self._turn, super().active():
            yield

    def record(self, lane, runs):
        machine, recorded = self, super().record(lane, runs)

        class Paused:
            def launch(self):
                machine.chunks += 1
                recorded.launch()
                # Another one works meanwhile.
                machine._turn.release()
                time.sleep(machine.pause)
                machine._turn.acquire()

            def close(self):
                recorded.close()

        return Paused()


@pytest.fixture
def several(monkeypatch):
    """Have machines with these pauses compute."""

    def use(*pauses):
        made = [Machine(number, pause) for number, pause in enumerate(pauses)]
        monkeypatch.setattr(network, "machines", lambda: made)
        return made

    return use


def _chunks(machines):
    """How many each computed since the last look."""
    found = [each.chunks for each in machines]
    for each in machines:
        each.chunks = 0
    return found


def _batch(mx, images):
    """A network on so many images, and what it gives."""
    case = small(mx, "lenet", whole=True)
    shape = (images, *case.arrays["data"].shape[1:])
    case.arrays["data"] = case.rng.integers(-3, 4, shape).astype(np.float32)
    case.output_shapes = [(images, 10)]
    return case, case.expected()[0]


@pytest.mark.parametrize("gpus", [2, 3])
def test_every_batch_is_computed_whole(mx, several, gpus):
    machines = several(*[0.0] * gpus)
    net = None
    for images in (1, 2, 3, 5, 7):
        case, expected = _batch(mx, images)
        net = net or case.network()
        case.version = images
        for call in range(8):
            assert (case.run(net)[0] == expected).all(), (images, call)
            # What is made of weights is a launch, too.
            assert sum(n > 0 for n in _chunks(machines)) <= min(gpus, images)


def test_chunks_are_shared_out_by_speed_also_where_the_last_one_overlaps(mx, several, monkeypatch):
    monkeypatch.setattr("ece408_op.backends.network.resident._CHUNK_BYTES", 2 * 16 * 14 * 4)
    machines = several(0.02, 0.04)
    case, expected = _batch(mx, 23)
    net = case.network()
    dealt = []
    for _ in range(14):
        assert (case.run(net)[0] == expected).all()
        dealt.append(_chunks(machines))
    # 12 chunks, and in the first call what is made of weights.
    assert abs(dealt[0][0] - dealt[0][1]) <= 1
    assert dealt[1][0] + dealt[1][1] == 12
    fast, slow = dealt[-1]
    assert 1.5 < fast / max(1, slow) <= 3


def test_each_gpu_begins_its_part_while_images_arrive(mx, several, monkeypatch):
    machines = several(0.0, 0.0)
    case, expected = _batch(mx, 13)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 2 * case.arrays["data"][0].nbytes)
    begun = {each: [] for each in machines}

    def launch_early(self, lane, weights, first):
        begun[self._machine].append(first)
        given(self, lane, weights, first)

    given = Program.launch_early
    monkeypatch.setattr(Program, "launch_early", launch_early)
    assert (case.run(case.network())[0] == expected).all()
    # Chunks of seven images: the second one begins with the last image of the first one.
    assert list(begun.values()) == [[0, 2, 4, 5]] * 2
    # Two chunks of four images for each GPU, or three and four of two.
    image_bytes = case.arrays["data"][0].nbytes
    monkeypatch.setattr(pieces, "PIECE_BYTES", image_bytes)
    for images, first in ((4, [0, 1, 2, 3]), (2, [])):
        chunk_bytes = images * image_bytes
        monkeypatch.setattr("ece408_op.backends.network.resident._CHUNK_BYTES", chunk_bytes)
        begun.update((each, []) for each in machines)
        assert (case.run(case.network())[0] == expected).all()
        assert list(begun.values()) == [first] * 2


def test_calls_that_are_timed_or_watched_are_whole_and_change_no_shares(mx, several):
    machines = several(0.0, 0.0)
    case, expected = _batch(mx, 5)
    net = case.network()
    with op_times() as log:
        for _ in range(3 * sharing._TRIALS):
            assert (case.run(net)[0] == expected).all()
    # Two convolutions on each.
    assert len(log) == 3 * sharing._TRIALS * 2 * 2
    assert _chunks(machines) != [0, 0]
    y = np.full(expected.shape, np.nan, np.float32)
    net.watch([array(each) for each in case.arrays.values()], [array(y)])
    assert (y == expected).all()
    assert _chunks(machines)[1] == 0


def test_what_one_gpu_does_faster_stays_there(mx, several):
    machines = several(0.0, 0.5)
    case, expected = _batch(mx, 4)
    net = case.network()
    for _ in range(2 * sharing._TRIALS):
        assert (case.run(net)[0] == expected).all()
    assert min(_chunks(machines)) > 0
    for _ in range(4):
        assert (case.run(net)[0] == expected).all()
    assert _chunks(machines)[1] == 0


def test_images_that_depend_on_each_other_stay_on_one(mx, several):
    machines = several(0.0, 0.0)
    x = mx.sym.Variable("data")
    case = Case(
        mx.sym.broadcast_sub(x, mx.sym.sum(x, axis=0, keepdims=True)), whole=True, data=(6, 5)
    )
    (expected,) = case.expected()
    net = case.network()
    for _ in range(3):
        assert (case.run(net)[0] == expected).all()
    assert _chunks(machines)[1] == 0
