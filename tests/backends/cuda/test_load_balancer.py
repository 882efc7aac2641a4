"""Load balancer: chunks of a call are assigned to GPUs by their speed in earlier calls."""

import pytest

from ece408_op.backends.cuda.load_balancer import LoadBalancer, gpu_counts, ranges


class Played:
    """GPUs with given seconds per chunk, which compute immediately; if there are several, each
    takes `start` seconds to begin."""

    def __init__(self, costs, chunks, start=0.0):
        self.costs, self.start = costs, start
        self.balancer = LoadBalancer(dict.fromkeys(gpu_counts(len(costs)), chunks))

    def call(self, **stalls):
        """Make one call, in which a GPU may be delayed; return each GPU's chunks."""
        assigned = self.balancer.assign()
        parts = [n * cost for n, cost in zip(assigned, self.costs)]
        for gpu, seconds in stalls.items():
            number = int(gpu[3:])
            if number < len(parts):
                parts[number] += seconds
        seconds = max(parts) + (self.start if len(assigned) > 1 else 0.0)
        self.balancer.record(assigned, parts, seconds)
        return assigned

    def calls(self, count):
        return [self.call() for _ in range(count)]


def test_a_gpu_that_is_twice_as_slow_gets_a_third():
    played = Played([1.0, 2.0], chunks=30)
    first, *_, last = played.calls(8)
    assert first == [15, 15]
    assert last == [20, 10]


def test_one_that_is_held_up_once_keeps_its_share_and_one_that_slows_down_loses_it():
    played = Played([1.0, 1.0], chunks=20)
    played.calls(10)
    assert played.call(gpu1=1000.0) == [10, 10]
    assert played.calls(5) == [[10, 10]] * 5
    played.costs = [1.0, 3.0]
    assert played.calls(5)[-1] == [15, 5]
    played.costs = [1.0, 1.0]
    assert played.calls(5)[-1] == [10, 10]


@pytest.mark.parametrize("slow", [1, 2])
def test_the_first_calls_may_be_slow(slow):
    played = Played([1.0, 1.0], chunks=20)
    for _ in range(slow):
        played.call(gpu0=1000.0, gpu1=500.0)
    assert played.calls(10)[-1] == [10, 10]


def test_what_one_gpu_does_faster_stays_there():
    played = Played([1.0, 1.0], chunks=4, start=3.0)
    trials = played.calls(6)
    assert sorted(trials) == [[2, 2]] * 3 + [[4]] * 3
    calls = played.calls(90)
    assert calls[:10] == calls[-10:] == [[4]] * 10
    assert calls.count([2, 2]) <= 3


@pytest.mark.parametrize(("start", "kept"), [(1.7, [4]), (1.5, [2, 2])])
def test_several_compute_where_that_is_worth_it(start, kept):
    played = Played([1.0, 1.0], chunks=4, start=start)
    assert played.calls(20)[-1] == kept


def test_one_that_becomes_slower_is_noticed_though_not_every_call_counts():
    played = Played([1.0, 1.0], chunks=4, start=3.0)
    played.calls(20)
    played.costs = [5.0, 1.0]
    assert played.calls(100)[-5:].count([1, 3]) >= 4


def test_the_slower_way_is_tried_again_soon_and_then_seldom():
    played = Played([1.0, 1.0], chunks=4, start=3.0)
    played.calls(6)
    assert [played.calls(200).count([2, 2]) for _ in range(3)] == [3, 2, 1]
    played.start = 0.0
    assert played.calls(500)[-40:] == [[2, 2]] * 40


def test_of_many_gpus_as_many_compute_as_is_best():
    assert [gpu_counts(most) for most in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]
    played = Played([1.0, 1.0, 8.0, 8.0], chunks=8)
    assert played.calls(30)[-1] == [4, 4]


@pytest.mark.parametrize("costs", [[1.0, 1.0, 1.0], [1.0, 100.0, 1e-9], [5.0, 3.0, 2.0]])
@pytest.mark.parametrize("chunks", [3, 4, 17])
def test_every_chunk_is_assigned_once_and_every_gpu_has_one(costs, chunks):
    played = Played(costs, chunks)
    for assigned in played.calls(20):
        assert sum(assigned) == chunks
        assert min(assigned) >= 1
        assert [chunk for part in ranges(assigned) for chunk in part] == list(range(chunks))
