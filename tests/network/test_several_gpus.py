"""Calls of a network whose images are divided among several GPUs, each emulated."""

import contextlib

import numpy as np
import pytest
from clocks import Clock
from gpu_networks import Case, array, small

from ece408_op import network
from ece408_op.backends.cuda import load_balancer
from ece408_op.network import microbatches
from ece408_op.network.machines.emulated import EmulatedMachine
from ece408_op.network.network_program import Program
from ece408_op.op_log import op_times

pytestmark = pytest.mark.usefixtures("emulated")


class Machine(EmulatedMachine):
    """One of several; each of its launches of a whole network calls `spend`. It holds the
    emulator's `_lock` while it works."""

    def __init__(self, number, spend):
        super().__init__("fast")
        self.key = ("emulator", number)
        self._turn, self.lock = self.lock, contextlib.nullcontext()
        self.spend, self.chunks = spend, 0

    @contextlib.contextmanager
    def active(self):
        with self._turn, super().active():
            yield

    def record(self, lane, runs):
        machine, recorded = self, super().record(lane, runs)

        class Counted:
            def launch(self):
                machine.chunks += 1
                recorded.launch()
                machine.spend()

            def close(self):
                recorded.close()

        return Counted()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def several(monkeypatch, clock):
    """Return a function that replaces the machines, given each one's seconds per launch."""

    def use(*seconds):
        made = [Machine(number, clock.spending(each)) for number, each in enumerate(seconds)]
        monkeypatch.setattr(network.machines, "chosen", lambda on: made)
        return made

    return use


def _chunks(machines):
    """Return how many chunks each computed since the previous call."""
    found = [each.chunks for each in machines]
    for each in machines:
        each.chunks = 0
    return found


def _batch(mx, images):
    """Return a network for a batch of images, and its outputs."""
    case = small(mx, "lenet", whole=True)
    shape = (images, *case.arrays["data"].shape[1:])
    case.arrays["data"] = case.rng.integers(-3, 4, shape).astype(np.float32)
    case.output_shapes = [(images, 10)]
    return case, case.expected()[0]


@pytest.mark.parametrize("gpus", [2, 3])
def test_every_batch_is_computed_whole(mx, several, gpus):
    machines = several(*[0] * gpus)
    net = None
    for images in (1, 2, 3, 5, 7):
        case, expected = _batch(mx, images)
        net = net or case.network()
        case.version = images
        for call in range(8):
            assert (case.run(net)[0] == expected).all(), (images, call)
            # Constants derived from weights need a launch, too.
            assert sum(n > 0 for n in _chunks(machines)) <= min(gpus, images)


def test_chunks_are_shared_out_by_speed_also_where_the_last_one_overlaps(
    mx, several, clock, monkeypatch
):
    monkeypatch.setattr("ece408_op.network.resident._CHUNK_BYTES", 2 * 16 * 14 * 4)
    machines = several(1, 2)
    case, expected = _batch(mx, 23)
    net = case.network(clock)
    dealt = []
    for _ in range(14):
        assert (case.run(net)[0] == expected).all()
        dealt.append(_chunks(machines))
    # 12 chunks; on both, on one, and then the faster way. Both also derive constants from weights.
    alone, shared = [12, 0], [8, 4]
    assert dealt == [[7, 7], shared, shared, [13, 0], alone, alone, *8 * [shared]]


def test_each_gpu_begins_its_part_while_images_arrive(mx, several, monkeypatch):
    machines = several(0, 0)
    case, expected = _batch(mx, 13)
    monkeypatch.setattr(microbatches, "MICROBATCH_BYTES", 2 * case.arrays["data"][0].nbytes)
    begun = {each: [] for each in machines}

    def launch_early(self, lane, weights, first):
        begun[self.machine].append(first)
        given(self, lane, weights, first)

    given = Program.launch_early
    monkeypatch.setattr(Program, "launch_early", launch_early)
    assert (case.run(case.network())[0] == expected).all()
    # Chunks of seven images: the second one begins with the last image of the first one.
    assert list(begun.values()) == [[0, 2, 4, 5]] * 2
    # Two chunks of four images for each GPU, or three and four of two.
    image_bytes = case.arrays["data"][0].nbytes
    monkeypatch.setattr(microbatches, "MICROBATCH_BYTES", image_bytes)
    for images, first in ((4, [0, 1, 2, 3]), (2, [])):
        chunk_bytes = images * image_bytes
        monkeypatch.setattr("ece408_op.network.resident._CHUNK_BYTES", chunk_bytes)
        begun.update((each, []) for each in machines)
        assert (case.run(case.network())[0] == expected).all()
        assert list(begun.values()) == [first] * 2


def test_calls_that_are_timed_or_watched_are_whole_and_change_no_shares(mx, several):
    machines = several(0, 0)
    case, expected = _batch(mx, 5)
    net = case.network()
    with op_times() as log:
        for _ in range(3 * load_balancer._TRIALS):
            assert (case.run(net)[0] == expected).all()
    # Two convolutions on each.
    assert len(log) == 3 * load_balancer._TRIALS * 2 * 2
    assert _chunks(machines) != [0, 0]
    y = np.full(expected.shape, np.nan, np.float32)
    net.watch([array(each) for each in case.arrays.values()], [array(y)])
    assert (y == expected).all()
    assert _chunks(machines)[1] == 0


def test_what_one_gpu_does_faster_stays_there(mx, several, clock):
    machines = several(1, 50)
    case, expected = _batch(mx, 4)
    net = case.network(clock)
    for _ in range(2 * load_balancer._TRIALS):
        assert (case.run(net)[0] == expected).all()
    assert min(_chunks(machines)) > 0
    for _ in range(4):
        assert (case.run(net)[0] == expected).all()
    assert _chunks(machines)[1] == 0


def test_images_that_depend_on_each_other_stay_on_one(mx, several):
    machines = several(0, 0)
    x = mx.sym.Variable("data")
    case = Case(
        mx.sym.broadcast_sub(x, mx.sym.sum(x, axis=0, keepdims=True)), whole=True, data=(6, 5)
    )
    (expected,) = case.expected()
    net = case.network()
    for _ in range(3):
        assert (case.run(net)[0] == expected).all()
    assert _chunks(machines)[1] == 0
