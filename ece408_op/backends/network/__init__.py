"""Whole networks of MXNet's operators on GPUs: images go in, answers come out, and what lies
between stays there.

A network is taken as MXNet's JSON of it. For each size of its inputs it becomes steps, most of them
one launch (`builder.py`, `operators/`), whose arrays are laid out in memory (`memory.py`); they are
recorded once and repeated for each chunk of a batch (`resident.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ... import op_log
from ...errors import InvalidProblem, UnsupportedProblem
from ...op_log import GpuTime
from ...problem import ConvProblem
from ..cuda.work import done
from .arrays import Array
from .chunks import Pass, Timings, Watched
from .graph import Graph
from .inputs import Call, Calls
from .machine import Machine, machines
from .operators import why_not
from .resident import Resident

__all__ = ["Array", "Network", "StepTime", "Watched", "why_not"]

_T = TypeVar("_T")


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
        for _, node in self._graph.computed():
            reason = why_not(node.op, node.attributes)
            if reason is not None:
                raise UnsupportedProblem(f"{node.op} {node.name}: {reason}")
        self._calls = Calls(names, frozenset(parameters))
        self._lock = threading.Lock()
        self._residents: dict[tuple[object, ...], Resident] = {}

    def compute(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute the outputs from the inputs, in the order of the names; returns when they are
        complete. Where there are several GPUs each takes a part of the images.

        May be called by several threads at once. Raises `UnsupportedProblem` and `InvalidProblem`
        for arrays that do not fit the graph, `NoUsableGpu`, `NotEnoughMemory`, `GpuFailed`, and
        what compiling raises.
        """
        call = self._call(inputs, outputs)
        found = [self._resident(machine) for machine in machines()]
        how = Pass.timed if op_log.collecting() else Pass.all
        parts = _parts(call.inputs.images, len(found))
        if len(parts) > 1 and _is_divisible(found[0], call, parts[0][1]):
            with ThreadPoolExecutor(len(parts)) as pool:
                tasks = [
                    pool.submit(_compute, resident, call, first, images, how)
                    for resident, (first, images) in zip(found, parts)
                ]
            for task in tasks:
                task.result()
        else:
            _compute(found[0], call, 0, call.inputs.images, how)

    def measure(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[StepTime]:
        """As `compute`, on the first GPU, each step by itself: what ran, and how long it took by
        the GPU's clock, in all chunks together."""
        call = self._call(inputs, outputs)
        timings = _compute(self._resident(machines()[0]), call, 0, call.inputs.images, Pass.timed)
        return [
            StepTime(step.node, step.plan.kernel.name, step.problem, seconds)
            for step, seconds in zip(timings.program.steps.for_images, timings.seconds)
        ]

    def watch(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Watched:
        """As `compute`, on the first GPU; where the time went."""
        call = self._call(inputs, outputs)
        return _compute(self._resident(machines()[0]), call, 0, call.inputs.images, Pass.watched)

    def close(self) -> None:
        """Give back all memory of GPUs; what is computed later takes it again."""
        with self._lock:
            residents, self._residents = self._residents, {}
        for each in residents.values():
            with each.machine.lock, each.machine.active():
                each.close()

    def _call(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Call:
        counts = (len(inputs), len(outputs))
        if counts != (len(self._names), len(self._graph.heads)):
            raise InvalidProblem(
                f"the network takes {len(self._names)} arrays and gives {len(self._graph.heads)}, "
                f"not {counts[0]} and {counts[1]}"
            )
        return self._calls.call(inputs, outputs)

    def _resident(self, machine: Machine) -> Resident:
        with self._lock:
            if machine.key not in self._residents:
                made = Resident(machine, self._graph, self._calls.weights)
                self._residents[machine.key] = made
            return self._residents[machine.key]


def _is_divisible(resident: Resident, call: Call, images: int) -> bool:
    """Whether so many images of the call can be computed without the others."""
    whole = call.inputs.images
    if any(array.shape[:1] != (whole,) for array in call.outputs):
        return False
    with resident.machine.lock, resident.machine.active():
        try:
            return resident.ready(call, images, images).program.steps.divisible
        except (UnsupportedProblem, InvalidProblem):
            return False


def _parts(images: int, most: int) -> list[tuple[int, int]]:
    """First image and number of images of each part, all of one size: the last may begin before the
    one before it ends."""
    if images == 0:
        return [(0, 0)]
    size = -(-images // most)
    return [(min(first, images - size), size) for first in range(0, images, size)]


def _compute(
    resident: Resident, call: Call, first: int, images: int, how: Callable[[Pass], _T]
) -> _T:
    """Compute a part of the images on one GPU; the log of op times hears of what has been timed."""
    machine = resident.machine
    with machine.lock, machine.active():
        result = resident.compute(call, first, images, how)
    if isinstance(result, Timings):
        _publish(result, machine)
    return result


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
