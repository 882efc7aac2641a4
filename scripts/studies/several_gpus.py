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
from ece408_op.backends import HostMemory, as_array
from ece408_op.backends.cuda.backend import StagedBackend
from ece408_op.backends.cuda.runtime import device, page_locked
from ece408_op.bench import cpu_timer, shapes
from ece408_op.bench.summary import summary
from ece408_op.files import markdown
from ece408_op.problem import ConvProblem

SHAPES = ("fa19_1", "fa19_2")
BATCHES = (1, 10, 100, 1000, 10000)
# In the first calls different numbers of GPUs are tried.
_LEARNING = 12
# Calls of up to so many images are timed so many times as often: a few milliseconds vary more.
_SHORT, _OFTENER = 1000, 5

# What x and y are: in page-locked memory (for large arrays only), or ordinary arrays; y's pages
# were made before, or not.
_KINDS = ("both page-locked", "y page-locked", "y used before", "y fresh")
Times = dict[int, list[float]]


@dataclass(frozen=True)
class Calls:
    """A layer's milliseconds on the first GPU, on the first two and so on, by what its arrays are,
    and whether all results were the same to the bit."""

    name: str
    batch: int
    ms: dict[str, Times]
    are_equal: bool

    def gain(self, kind: str, gpus: int) -> float:
        """How much faster so many GPUs are than one."""
        times = self.ms[kind]
        return statistics.median(times[1]) / statistics.median(times[gpus])


def measure(
    gpus: Sequence[int], repeat: int, tick: Callable[[], object], batches: Sequence[int] = BATCHES
) -> list[Calls]:
    """Measure each shape at each batch, small ones more often; `tick` is called after each round,
    of which `rounds` has the number. Raises `NoUsableGpu`, and what a staged call raises."""
    return [
        _calls(name, shapes.find(name, batch), gpus, repeat, tick)
        for name, batch in itertools.product(SHAPES, batches)
    ]


def rounds(repeat: int, batches: Sequence[int] = BATCHES) -> int:
    """How many rounds `measure` takes."""
    return len(SHAPES) * sum(cpu_timer.WARM_UP + _rounds(repeat, each) for each in batches)


def _rounds(repeat: int, batch: int) -> int:
    return repeat * (_OFTENER if batch <= _SHORT else 1)


def _calls(
    name: str, problem: ConvProblem, gpus: Sequence[int], repeat: int, tick: Callable[[], object]
) -> Calls:
    rng = np.random.default_rng(408)
    x = rng.standard_normal(problem.x_shape, np.float32)
    w = rng.standard_normal(problem.w_shape, np.float32)
    counts = range(1, len(gpus) + 1)
    backend = StagedBackend()
    lent = [_lent(backend, problem) for _ in counts]
    locked = [as_array(memory.address, problem.y_shape) for memory in lent if memory]
    used = [np.ones(problem.y_shape, np.float32) for _ in counts]
    held = [_copy_in_page_locked(x, gpus[0])] if locked else []
    kinds = _KINDS if locked else _KINDS[2:]

    def sample(kind: str, count: int) -> float:
        outputs = used if kind == "y used before" else locked
        y = np.empty(problem.y_shape, np.float32) if kind == "y fresh" else outputs[count - 1]
        data = held[0].address if kind == "both page-locked" else x.ctypes.data
        addresses = (data, w.ctypes.data, None, y.ctypes.data)
        with settings.override(devices=",".join(map(str, gpus[:count]))):
            return cpu_timer.elapsed_ms(lambda: backend.forward(problem, *addresses, False))

    contenders = {}
    for kind, count in itertools.product(kinds, counts):
        for _ in range(_LEARNING):
            sample(kind, count)
        contenders[f"{kind} {count}"] = functools.partial(sample, kind, count)
    found = cpu_timer.interleaved(contenders, _rounds(repeat, problem.batch), tick)
    ms = {kind: {n: found[f"{kind} {n}"] for n in counts} for kind in kinds}
    are_equal = all(np.array_equal(used[0], each) for each in [*used, *locked])
    for memory in filter(None, [*lent, *held]):
        memory.busy.value = 0
    return Calls(name, problem.batch, ms, are_equal)


def _lent(backend: StagedBackend, problem: ConvProblem) -> HostMemory | None:
    """Memory for y, which the backend lends from the second time on that it is asked."""
    return backend.result_memory(problem) or backend.result_memory(problem)


def _copy_in_page_locked(array: np.ndarray, gpu: int) -> HostMemory:
    memory = page_locked.pool.take(array.nbytes, device.get(gpu), settings.threads())
    as_array(memory.address, array.shape)[:] = array
    return memory


def table(calls: Sequence[Calls]) -> str:
    """Medians as Markdown."""
    counts = list(calls[0].ms["y fresh"])
    head = ["layer", "batch", "arrays", *(f"{n} GPU{'s' * (n > 1)}, ms" for n in counts)]
    head += [*(f"gain of {n}" for n in counts[1:]), "equal to the bit"]
    rows = [
        [
            *(each.name, str(each.batch), kind),
            *(f"{statistics.median(times[n]):.2f}" for n in counts),
            *(f"{each.gain(kind, n):.2f}x" for n in counts[1:]),
            "yes" if each.are_equal else "NO",
        ]
        for each in calls
        for kind, times in each.ms.items()
    ]
    note = (
        "Staged forward passes, in turns; medians, by where x and y lie: in page-locked memory, or "
        "in ordinary arrays, of which y was used before or is fresh. Several GPUs are as many as "
        "are given: fewer compute where that is faster."
    )
    return f"{note}\n\n{markdown.table(head, rows)}"


def document(calls: Sequence[Calls]) -> dict[str, Any]:
    """The same for JSON."""
    rows = [
        {
            **{"layer": each.name, "batch": each.batch, "equal": each.are_equal},
            "ms": {
                kind: {str(n): summary(found) for n, found in times.items()}
                for kind, times in each.ms.items()
            },
        }
        for each in calls
    ]
    return {"calls": rows}
