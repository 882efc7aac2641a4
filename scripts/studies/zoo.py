"""The networks of MXNet's model zoo before and after `swap`: agreement and times.

Whole networks take turns with their swapped twins. Their convolutions are also timed one by one:
ours by the log of op times, MXNet's own bound alone, without a bias both, since within a network
MXNet's operators cannot be timed without slowing it down.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from ece408_op import errors
from ece408_op.bench import cpu_timer
from ece408_op.bench.summary import summary
from ece408_op.bench.tune_targets import ZOO
from ece408_op.files import markdown
from ece408_op.op_log import OpTimes, op_times
from ece408_op.operator.loading import load_mxnet
from ece408_op.operator.swapping import SwapReport, swap, swap_symbol
from ece408_op.problem import ConvProblem

# The side of the square images that each network takes.
NETWORKS = ZOO


def build(name: str, batch: int = 1, seed: int = 408) -> tuple[Any, Any]:
    """A network of the zoo with random weights, and an input for it, (batch, 3, side, side).

    The last layer is scaled so that the largest output has magnitude 1.
    """
    mx = load_mxnet()
    mx.random.seed(seed)
    net = mx.gluon.model_zoo.vision.get_model(name, prefix=f"{name.replace('.', '_')}_")
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    side = NETWORKS.get(name, 224)
    x = mx.nd.random.uniform(-1, 1, shape=(batch, 3, side, side))
    largest = float(net(x).abs().max().asscalar())
    weights = [p for key, p in net.collect_params().items() if key.endswith("weight")]
    weights[-1].set_data(weights[-1].data() / largest)
    return net, x


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """max |found - expected| / max |expected|; infinite where `found` is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def layer_errors(symbol: Any, swapped: Any, layers: list[str], params: dict, x: Any) -> dict:
    """For each swapped layer by name, and for the network's "output", the `error` of swapping.

    Both networks run as a whole, so errors add up from layer to layer.
    """
    expected = _outputs(symbol, layers, params, x)
    with errors.surfaced():
        found = _outputs(swapped, layers, params, x)
    return {name: error(found[name], expected[name]) for name in expected}


def _outputs(symbol: Any, layers: list[str], params: dict, x: Any) -> dict[str, np.ndarray]:
    mx = load_mxnet()
    internals = symbol.get_internals()
    group = mx.sym.Group([*(internals[f"{name}_output"] for name in layers), symbol])
    arguments, states = group.list_arguments(), group.list_auxiliary_states()
    # MXNet's fusion of layers gives wrong values for an inner output that is asked for as well.
    with _environment(mx, "MXNET_SUBGRAPH_BACKEND", "NONE"):
        executor = group.bind(
            mx.cpu(),
            {name: x if name == "data" else params[name] for name in arguments},
            aux_states={name: params[name] for name in states},
        )
    executor.forward(is_train=False)
    return {name: y.asnumpy() for name, y in zip([*layers, "output"], executor.outputs)}


@contextlib.contextmanager
def _environment(mx: Any, variable: str, value: str) -> Iterator[None]:
    """An environment variable for the length of a `with` block; no operator runs as it changes,
    since operators read the environment."""
    mx.nd.waitall()
    with mock.patch.dict(os.environ, {variable: value}):
        yield
        mx.nd.waitall()


# Keeps a core busy until the process that started it ends; that one handles Ctrl-C for both.
_BUSY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(flush=True)
while os.getppid() == int(sys.argv[1]):
    for _ in range(1000000):
        pass
"""


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` other processes that compute all the time, for the length of a `with` block."""
    command = [sys.executable, "-c", _BUSY, str(os.getpid())]
    with contextlib.ExitStack() as started:
        for _ in range(count):
            process = subprocess.Popen(command, stdout=subprocess.PIPE)
            started.enter_context(process)
            started.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        yield


@dataclass(frozen=True)
class Comparison:
    """One network before and after `swap`, hybridized; times are samples in milliseconds.

    They were taken beside `busy` other processes that compute all the time. `errors` is per mode
    (imperative, hybridized) at the network's output, `layer_errors` at
    each swapped layer; `log` holds the op times of one warm forward pass, and `alone` for each
    of its problems the samples of MXNet's and of our convolution by itself.
    """

    name: str
    batch: int
    busy: int
    report: SwapReport
    errors: dict[str, float]
    layer_errors: dict[str, float]
    native_ms: list[float]
    ours_ms: list[float]
    log: OpTimes
    alone: dict[str, dict[str, list[float]]]

    def convolutions_ms(self, whose: str) -> float:
        """Medians of the network's convolutions by themselves, "mxnet" or "ours", added up."""
        return sum(statistics.median(self.alone[str(t.problem)][whose]) for t in self.log)


def compare(name: str, batch: int = 1, repeat: int = 5, busy: int = 0) -> Comparison:
    """Swap one network of the zoo and measure, beside `busy` processes that compute."""
    mx = load_mxnet()
    net, x = build(name, batch)
    symbol = net(mx.sym.Variable("data"))
    params = {p.name: p.data() for p in net.collect_params().values()}
    swapped, report = swap_symbol(symbol)
    at_layers = layer_errors(symbol, swapped, report.swapped, params, x)
    expected = net(x).asnumpy()
    net.hybridize()
    ours, _ = build(name, batch)
    swap(ours)
    found = {}
    for mode, active in (("imperative", False), ("hybridized", True)):
        ours.hybridize(active)
        with errors.surfaced():
            found[mode] = error(ours(x).asnumpy(), expected)
    with busy_processes(busy):
        native_ms, ours_ms = _in_turns([net, ours], x, repeat)
        with op_times() as log:
            ours(x).wait_to_read()
        alone = {str(p): _alone(p, repeat) for p in dict.fromkeys(t.problem for t in log)}
    return Comparison(name, batch, busy, report, found, at_layers, native_ms, ours_ms, log, alone)


def _in_turns(nets: list[Any], x: Any, repeat: int) -> list[list[float]]:
    """Wall times of `repeat` forward passes of each net, after one that warms up."""
    samples: list[list[float]] = [[] for _ in nets]
    for turn in range(repeat + 1):
        for net, times in zip(nets, samples):
            start = time.perf_counter()
            net(x).wait_to_read()
            if turn > 0:
                times.append(1e3 * (time.perf_counter() - start))
    return samples


def _alone(problem: ConvProblem, repeat: int) -> dict[str, list[float]]:
    """Times of one convolution, MXNet's bound alone and ours by its op time, in turns."""
    problem = dataclasses.replace(problem, bias=False)
    x, w = cpu_timer.inputs(problem)
    native, ours = (cpu_timer.bind(problem, x, w, ours=own) for own in (False, True))
    times: dict[str, list[float]] = {"mxnet": [], "ours": []}
    for turn in range(repeat + 1):
        elapsed = native.forward()
        with op_times() as log:
            ours.forward()
        if turn > 0:
            times["mxnet"].append(elapsed)
            times["ours"].append(log[0].milliseconds)
    return times


def table(comparisons: list[Comparison]) -> str:
    """The comparisons as a Markdown table, then a table of every swapped layer."""
    head = ["network", "batch", "busy processes beside", "layers swapped", "left"]
    head += ["worst layer error", "output error"]
    for part in ("convolutions", "network"):
        head += [f"{part}: MXNet ms", "ours ms", "times MXNet's speed"]
    runs = len(comparisons[0].native_ms)
    parts = [markdown.table(head, map(_row, comparisons))]
    parts += [f'Medians of {runs} runs; of layers, "ms" is of a single pass of the network.']
    head = ["layer", "problem", "kernel", "ms", "alone, ms", "MXNet's alone, ms"]
    for each in comparisons:
        parts += [f"## {each.name}, batch {each.batch}", markdown.table(head, _layer_rows(each))]
    return "\n\n".join(parts)


def _row(each: Comparison) -> list[object]:
    alone = [each.convolutions_ms(whose) for whose in ("mxnet", "ours")]
    whole = [statistics.median(samples) for samples in (each.native_ms, each.ours_ms)]
    errors = (max(each.layer_errors.values()), max(each.errors.values()))
    return [
        *(each.name, each.batch, each.busy, len(each.report.swapped), len(each.report.left)),
        *(f"{error:.1e}" for error in errors),
        *(cell for a, b in (alone, whole) for cell in (f"{a:.1f}", f"{b:.1f}", f"{a / b:.2f}")),
    ]


def _layer_rows(each: Comparison) -> Iterator[list[object]]:
    for entry in each.log:
        times = each.alone[str(entry.problem)]
        milliseconds = [statistics.median(times[whose]) for whose in ("ours", "mxnet")]
        yield [
            *(entry.layer, f"`{entry.problem}`", entry.kernel),
            *(f"{ms:.3f}" for ms in (entry.milliseconds, *milliseconds)),
        ]


def records(comparisons: list[Comparison]) -> list[dict[str, Any]]:
    """The comparisons as strings, numbers, lists and dicts."""
    return [
        {
            "name": each.name,
            "batch": each.batch,
            "busy": each.busy,
            "left": each.report.left,
            "errors": {**each.errors, "executor": each.layer_errors["output"]},
            "native_ms": summary(each.native_ms),
            "ours_ms": summary(each.ours_ms),
            "alone_ms": {
                problem: {whose: summary(samples) for whose, samples in times.items()}
                for problem, times in each.alone.items()
            },
            "layers": [
                {
                    "layer": t.layer,
                    "problem": str(t.problem),
                    "kernel": t.kernel,
                    "ms": t.milliseconds,
                    "error": each.layer_errors[t.layer],
                }
                for t in each.log
            ],
        }
        for each in comparisons
    ]
