"""Staged forward passes on one GPU and on several, in turns, and whether results are the same."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ece408_op import settings
from ece408_op.backends.cuda.backend import StagedBackend
from ece408_op.bench import cpu_timer, shapes
from ece408_op.bench.summary import summary
from ece408_op.files import markdown
from ece408_op.problem import ConvProblem

SHAPES = ("fa19_1", "fa19_2")
BATCHES = (1, 10, 100, 1000, 10000)
_LEARNING = 12


@dataclass(frozen=True)
class Calls:
    """A layer's milliseconds on the first GPU, on the first two and so on, onto outputs used before
    and onto fresh ones, and whether all gave the same to the bit."""

    name: str
    batch: int
    ms: dict[int, list[float]]
    fresh: dict[int, list[float]]
    are_equal: bool

    def gain(self, gpus: int) -> float:
        """How much faster so many GPUs are than one, onto outputs used before."""
        return statistics.median(self.ms[1]) / statistics.median(self.ms[gpus])


def measure(
    gpus: Sequence[int], repeat: int, tick: Callable[[], object], batches: Sequence[int] = BATCHES
) -> list[Calls]:
    """Measure each shape at each batch; `tick` is called after each round. Raises `NoUsableGpu`,
    and what a staged call raises."""
    return [
        _calls(name, shapes.find(name, batch), gpus, repeat, tick)
        for name, batch in itertools.product(SHAPES, batches)
    ]


def _calls(
    name: str, problem: ConvProblem, gpus: Sequence[int], repeat: int, tick: Callable[[], object]
) -> Calls:
    rng = np.random.default_rng(408)
    x = rng.standard_normal(problem.x_shape, np.float32)
    w = rng.standard_normal(problem.w_shape, np.float32)
    outputs = {n: np.ones(problem.y_shape, np.float32) for n in range(1, len(gpus) + 1)}
    backend = StagedBackend()

    def sample(count: int, is_fresh: bool) -> float:
        y = np.empty(problem.y_shape, np.float32) if is_fresh else outputs[count]
        addresses = (x.ctypes.data, w.ctypes.data, None, y.ctypes.data)
        with settings.override(devices=",".join(map(str, gpus[:count]))):
            return cpu_timer.elapsed_ms(lambda: backend.forward(problem, *addresses, False))

    for count in outputs:
        # In the first calls different numbers of GPUs are tried.
        for _ in range(_LEARNING):
            sample(count, False)
    contenders = {
        f"{count} {is_fresh}": functools.partial(sample, count, is_fresh)
        for is_fresh in (False, True)
        for count in outputs
    }
    found = cpu_timer.interleaved(contenders, repeat, tick)
    used, fresh = ({n: found[f"{n} {is_fresh}"] for n in outputs} for is_fresh in (False, True))
    are_equal = all(np.array_equal(outputs[1], each) for each in outputs.values())
    return Calls(name, problem.batch, used, fresh, are_equal)


def table(calls: Sequence[Calls]) -> str:
    """Medians as Markdown."""
    counts = list(calls[0].ms)
    head = ["layer", "batch", *(f"{n} GPU{'s' * (n > 1)}, ms" for n in counts)]
    head += [*(f"gain of {n}" for n in counts[1:])]
    head += [*(f"{n}, fresh output, ms" for n in counts), "equal to the bit"]
    rows = [
        [
            *(each.name, str(each.batch)),
            *(f"{statistics.median(each.ms[n]):.2f}" for n in counts),
            *(f"{each.gain(n):.2f}x" for n in counts[1:]),
            *(f"{statistics.median(each.fresh[n]):.2f}" for n in counts),
            "yes" if each.are_equal else "NO",
        ]
        for each in calls
    ]
    note = (
        "Staged forward passes, in turns; medians. Outputs were used before, but for those that "
        "are fresh. Several GPUs are as many as are given: fewer compute where that is faster."
    )
    return f"{note}\n\n{markdown.table(head, rows)}"


def document(calls: Sequence[Calls]) -> dict[str, Any]:
    """The same for JSON."""
    rows = [
        {
            **{"layer": each.name, "batch": each.batch, "equal": each.are_equal},
            "ms": {str(n): summary(times) for n, times in each.ms.items()},
            "fresh": {str(n): summary(times) for n, times in each.fresh.items()},
        }
        for each in calls
    ]
    return {"calls": rows}
