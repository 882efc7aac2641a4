"""Random chains of operators on the GPU, in the emulator, compared with MXNet on the CPU."""

import os

import operator_draws
import operator_fuzz
import pytest

from ece408_op import settings
from ece408_op.network import operators


@pytest.fixture(autouse=True)
def _kept(kept):
    with settings.override(cache=kept):
        yield


def test_every_operator_is_drawn():
    assert set(operator_draws.NODES) == set(operators.OPERATORS)


def _expect_none_wrong(outcome):
    assert outcome.wrong == []
    assert outcome.refused < outcome.cases / 20
    never = [kind for kind in operator_draws.NODES if outcome.counts[kind].gpu == 0]
    assert never == []


def test_chains_of_operators(mx):
    _expect_none_wrong(operator_fuzz.run(17, range(92)))


@pytest.mark.slow
def test_chains_of_operators_touch_only_their_own_memory(mx):
    outcome = operator_fuzz.run(2, range(0, 92, 3), "checked")
    assert outcome.wrong == []


@pytest.mark.parametrize(
    ("seed", "number"), [(5, 3673), (4, 12498), (80, 3949), (91, 13644), (94, 6248)]
)
def test_what_one_image_does_not_allow_is_computed_for_the_batch(mx, seed, number):
    """`squeeze` of all axes, and then one that names as many axes as the batch has, or a
    concatenation along one of them, or UpSampling; a slice of later images; a
    parameter with an element for each image."""
    assert operator_fuzz.run(seed, [number]).wrong == []


def test_a_mean_over_axes_apart_is_divided_once(mx):
    """Else the square root of the mean of whole numbers whose sum is 0 may be NaN."""
    assert operator_fuzz.run(91, [5958]).wrong == []


@pytest.mark.slow
def test_many_chains_of_operators():
    cores = len(os.sched_getaffinity(0))
    _expect_none_wrong(operator_fuzz.run_beside(3, 20000, cores, "fast", lambda *found: None))


def test_a_fault_is_found(mx, monkeypatch):
    monkeypatch.setitem(operators.OPERATORS, "tanh", operators.OPERATORS["relu"])
    number = sorted(operator_draws.NODES).index("tanh")
    assert operator_fuzz.run(1, [number]).wrong != []
