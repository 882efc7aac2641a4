"""Random networks with our operator, in every way that MXNet runs them, beside MXNet's own."""

import os

import pytest
import random_graphs
from gluon_nets import operators

from ece408_op import settings

# The least number of each feature in a hundred networks for a meaningful run.
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


def _check(capsys, first: int, count: int, jobs: int) -> None:
    with capsys.disabled():
        wrong, coverage = random_graphs.run(first, count, jobs, print)
        print(random_graphs.table(coverage))
    assert wrong == []
    assert coverage["graphs"] == count
    for feature, least in LEAST.items():
        assert coverage[feature] >= least * count // 100, feature
    assert coverage["(MXNet's own fails as well)"] <= count // 20


def test_some_random_graphs(capsys):
    _check(capsys, 20, 20, 1)


@pytest.mark.slow
def test_ten_thousand_random_graphs(capsys):
    _check(capsys, 0, 10_000, os.cpu_count() or 1)


def _wrong_on_gpu(mx, seed):
    """Return a line for each difference of a random network with parts on the GPU, and the number
    of parts."""
    program = random_graphs.Generator(seed).make()
    expected = random_graphs.Expected(mx, program, random_graphs.Values(program))
    values, native = expected.values, random_graphs._native
    symbol = program.symbol(mx, native)
    arrays = random_graphs._arrays(
        mx, {"data": values.data[0], **values.parameters, **values.averages}
    )
    with settings.override(backend="emulator"):
        arguments = {name: arrays[name] for name in symbol.list_arguments()}
        states = {name: arrays[name] for name in symbol.list_auxiliary_states()}
        optimized = symbol.optimize_for("ece408", arguments, states)

        def executors(graph):
            simple = bool(seed % 2)
            return lambda _: random_graphs.executors(mx, program, values, graph, simple, ())

        def blocks(options):
            def run(convolution):
                return random_graphs.blocks(mx, program, values, convolution, options, seed % 3)[0]

            return run

        wrong = []
        for run, own in (
            (executors(optimized), executors(symbol)),
            (blocks({"backend": "ece408"}), blocks({})),
        ):
            lines = expected.failures(run, native)
            # MXNet's own recurrent layers and control flow are wrong in some graphs.
            known = expected.failures(own, native) if lines else []
            wrong += [f"graph {seed}: {line}" for line in lines if line not in known]
    return wrong, sum(each.startswith("part") for each in operators(optimized))


def _check_on_gpu(mx, seeds, least):
    found = [_wrong_on_gpu(mx, seed) for seed in seeds]
    assert [line for lines, _ in found for line in lines] == []
    counts = [count for _, count in found]
    assert sum(count > 0 for count in counts) >= least
    assert sum(count > 1 for count in counts) >= 1


def test_random_graphs_with_parts_on_the_gpu(mx, emulated):
    _check_on_gpu(mx, (2, 6), 2)


@pytest.mark.slow
def test_a_hundred_random_graphs_with_parts_on_the_gpu(mx, emulated):
    _check_on_gpu(mx, range(100), 60)


def test_a_wrong_convolution_is_found(mx):
    """One that flips the weight differs in every way of running a network."""

    def wrong(F):
        def convolution(data, weight, *rest, **keywords):
            return F.Convolution(data, F.flip(weight, axis=2), *rest, **keywords)

        return convolution

    found = [line for seed in range(6) for line in random_graphs.check(mx, seed, wrong)[0]]
    for way in ("calls on NDArrays", "executors", "hybridized"):
        assert any(line.startswith(way) for line in found), way
