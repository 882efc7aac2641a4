"""Whole networks of MXNet's operators on GPUs: images go in, answers come out, and what lies
between stays there.

A network is taken as MXNet's JSON of it. For each size of its inputs it becomes steps, most of them
one launch (`builder.py`, `operators/`), whose arrays are laid out in memory (`memory.py`); they are
recorded once and repeated for each chunk of a batch (`resident.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ... import op_log
from ...errors import InvalidProblem, UnsupportedProblem
from ...op_log import GpuTime
from ...problem import ConvProblem
from ..cuda.work import done
from . import arrays
from .arrays import Array
from .graph import Graph
from .machine import Machine, machines
from .operators import why_not
from .program import Inputs
from .resident import Resident, Timings

__all__ = ["Array", "Network", "StepTime", "why_not"]


@dataclass(frozen=True)
class StepTime:
    """What computed a node, or some that are done in one step and of which this is one: the kernel,
    the convolution if it is one, and how long it took."""

    node: str
    kernel: str
    problem: ConvProblem | None
    seconds: float


class Network:
    """A graph of MXNet's in its JSON, whose variables have these names; `parameters` are those that
    are the same for all images, such as weights and moving averages.

    Raises `UnsupportedProblem` for a graph with operators that are not computed here.
    """

    def __init__(self, symbol_json: str, names: Sequence[str], parameters: Collection[str]) -> None:
        self._graph = Graph.parse(symbol_json)
        self._graph.check_inputs(names)
        self._names = tuple(names)
        self._parameters = frozenset(parameters)
        for _, node in self._graph.computed():
            reason = why_not(node.op, node.attributes)
            if reason is not None:
                raise UnsupportedProblem(f"{node.op} {node.name}: {reason}")
        self._lock = threading.Lock()
        self._residents: dict[tuple[object, ...], Resident] = {}

    def compute(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute the outputs from the inputs, in the order of the names; returns when they are
        complete. Where there are several GPUs each takes a part of the images.

        May be called by several threads at once. Raises `UnsupportedProblem` and `InvalidProblem`
        for arrays that do not fit the graph, `NoUsableGpu`, `NotEnoughMemory`, `GpuFailed`, and
        what compiling raises.
        """
        self._check(inputs, outputs)
        found = [self._resident(machine) for machine in machines()]
        sizes = Inputs.of(self._names, inputs, self._parameters)
        timed = op_log.collecting()
        parts = _parts(sizes.images(), len(found))
        if len(parts) > 1 and self._is_divisible(found[0], sizes, parts, outputs):
            with ThreadPoolExecutor(len(parts)) as pool:
                list(
                    pool.map(
                        lambda each: _compute(each[0], sizes, inputs, outputs, each[1], timed),
                        zip(found, parts),
                    )
                )
        else:
            _compute(found[0], sizes, inputs, outputs, (0, sizes.images()), timed)

    def measure(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[StepTime]:
        """As `compute`, on the first GPU, each step by itself: what ran, and how long it took by
        the GPU's clock, in all chunks together."""
        self._check(inputs, outputs)
        resident = self._resident(machines()[0])
        sizes = Inputs.of(self._names, inputs, self._parameters)
        timings = _compute(resident, sizes, inputs, outputs, (0, sizes.images()), True)
        assert timings is not None
        return [
            StepTime(step.node, step.plan.kernel.name, step.problem, seconds)
            for step, seconds in zip(timings.program.steps.for_images, timings.seconds)
        ]

    def close(self) -> None:
        """Give back all memory of GPUs; what is computed later takes it again."""
        with self._lock:
            residents, self._residents = self._residents, {}
        for each in residents.values():
            with each.machine.lock, each.machine.active():
                each.close()

    def _check(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        counts = (len(inputs), len(outputs))
        if counts != (len(self._names), len(self._graph.heads)):
            raise InvalidProblem(
                f"the network takes {len(self._names)} arrays and gives {len(self._graph.heads)}, "
                f"not {counts[0]} and {counts[1]}"
            )
        for name, array in zip(self._names, inputs):
            arrays.check(array, name)

    def _resident(self, machine: Machine) -> Resident:
        with self._lock:
            if machine.key not in self._residents:
                self._residents[machine.key] = Resident(machine, self._graph)
            return self._residents[machine.key]

    def _is_divisible(
        self,
        resident: Resident,
        sizes: Inputs,
        parts: Sequence[tuple[int, int]],
        outputs: Sequence[Array],
    ) -> bool:
        """Whether the network can be computed in these parts."""
        if any(array.shape[:1] != (sizes.images(),) for array in outputs):
            return False
        part = [_shortened(array, parts[0][1]) for array in outputs]
        with resident.machine.lock, resident.machine.active():
            try:
                ready = resident.ready(sizes.of_images(parts[0][1]), part)
            except (UnsupportedProblem, InvalidProblem):
                return False
            return ready.program.steps.divisible


def _parts(images: int, most: int) -> list[tuple[int, int]]:
    """First image and number of images of each part, all of one size: the last may begin before the
    one before it ends."""
    if images == 0:
        return [(0, 0)]
    size = -(-images // most)
    return [(min(first, images - size), size) for first in range(0, images, size)]


def _shortened(array: Array, images: int) -> Array:
    return Array(array.address, (images, *array.shape[1:]), array.dtype, array.version)


def _compute(
    resident: Resident,
    sizes: Inputs,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    part: tuple[int, int],
    timed: bool,
) -> Timings | None:
    """Compute a part of the images on one GPU; how long its steps took if that is asked for."""
    first, images = part
    whole = images == sizes.images()
    mine = sizes if whole else sizes.of_images(images)
    asked = outputs if whole else [_shortened(array, images) for array in outputs]
    machine = resident.machine
    with machine.lock, machine.active():
        ready = resident.ready(mine, asked)
        timings = resident.compute(ready, inputs, outputs, first, timed)
    if timings is not None:
        _publish(timings, machine)
    return timings


def _publish(timings: Timings, machine: Machine) -> None:
    """Tell the log of op times about the convolutions."""
    for step, seconds in zip(timings.program.steps.for_images, timings.seconds):
        if step.problem is not None:
            time = GpuTime(seconds) if machine.backend == "cuda" else None
            did = done(time, [step.plan])
            op_log.publish(
                op_log.OpTime(
                    *(step.node, step.problem, "forward", machine.backend),
                    *(did.kernel, seconds, did.gpu, did.precision),
                )
            )
