"""Random networks with our operator, in every way that MXNet runs them, beside MXNet's own."""

from __future__ import annotations

import os

import pytest
import random_graphs

# What a run must have had enough of to mean something: networks in a hundred.
LEAST = {
    "convolutions": 90,
    "operators with several outputs": 50,
    "weights that are output k of an operator": 10,
    "biases that are output k of an operator": 8,
    "shared weights": 8,
    "several heads": 80,
    "nested blocks": 40,
    "control flow": 8,
    "convolutions inside control flow": 5,
    "names that clash": 5,
    "shapes known from outputs": 8,
    "exported": 15,
    "gradients that are added": 20,
    "executors, groups of contexts": 2,
}


def _check(capsys, count: int, jobs: int) -> None:
    with capsys.disabled():
        wrong, coverage = random_graphs.run(0, count, jobs, print)
        print(random_graphs.table(coverage))
    assert wrong == []
    assert coverage["graphs"] == count
    for feature, least in LEAST.items():
        assert coverage[feature] >= least * count // 100, feature
    assert coverage["(MXNet's own fails as well)"] <= count // 20


def test_three_hundred_random_graphs(capsys):
    _check(capsys, 300, 2)


@pytest.mark.slow
def test_ten_thousand_random_graphs(capsys):
    _check(capsys, 10_000, os.cpu_count() or 1)


def test_a_wrong_convolution_is_found(mx):
    """One that takes the weight the wrong way round differs in every way of running a network."""

    def wrong(F):
        def convolution(data, weight, *rest, **keywords):
            return F.Convolution(data, F.flip(weight, axis=2), *rest, **keywords)

        return convolution

    found = [line for seed in range(6) for line in random_graphs.check(mx, seed, wrong)[0]]
    for way in ("calls on NDArrays", "executors", "hybridized"):
        assert any(line.startswith(way) for line in found), way
