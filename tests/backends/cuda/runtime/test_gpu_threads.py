"""Threads of GPUs: each GPU's work runs in a separate thread, on nearby cores."""

import os
import threading
import time
from dataclasses import dataclass

import pytest

from ece408_op.backends.cuda.runtime import gpu_threads


@dataclass(frozen=True)
class Place:
    name: str
    cores: frozenset[int]


ALL = frozenset(os.sched_getaffinity(0))
ONE = frozenset([min(ALL)])
NONE = frozenset([max(ALL) + 1000])


def _where():
    return threading.get_ident(), os.sched_getaffinity(0)


def test_threads_stay_and_keep_to_their_cores():
    tasks = [(Place("a", ALL), _where), (Place("b", ONE), _where), (Place("c", NONE), _where)]
    first, again = gpu_threads.run_all(tasks), gpu_threads.run_all(tasks)
    assert first == again
    assert [cores for _, cores in first] == [ALL, ONE, ALL]
    assert len({thread for thread, _ in first} | {threading.get_ident()}) == 4
    assert os.sched_getaffinity(0) == ALL


def test_a_single_part_is_the_callers():
    assert gpu_threads.run_all([(Place("b", ONE), _where)]) == [(threading.get_ident(), ALL)]


def test_what_one_raises_is_raised_when_all_have_ended():
    ended = []

    def slow():
        time.sleep(0.3)
        ended.append(1)

    def failing():
        raise ZeroDivisionError("of this part")

    with pytest.raises(ZeroDivisionError, match="of this part"):
        gpu_threads.run_all([(Place("a", ALL), failing), (Place("b", ONE), slow)])
    assert ended == [1]
