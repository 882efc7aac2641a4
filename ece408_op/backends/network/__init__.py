"""Whole MXNet networks on GPUs; intermediate results stay in GPU memory.

The input is MXNet's JSON graph. For each input size the graph is lowered to steps, most of them one
launch (`builder.py`, `operators/`). A planner assigns memory to their arrays (`memory_planner.py`).
The launches are recorded once and replayed for each chunk of a batch (`resident.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from ... import op_log, settings
from ...errors import InvalidProblem, UnsupportedProblem
from ...op_log import GpuTime
from ...problem import ConvProblem
from ..cuda.runtime import gpu_threads
from ..cuda.work import done
from .batch_partition import Partitions, whole
from .chunk_pipeline import Pass, Timings, Watched
from .graph import Entry, Graph, Node
from .host_arrays import Array
from .inputs import Call, Calls
from .machine import Machine
from .operators import Typed, refused, why_not
from .real_gpu import real_gpu
from .resident import Part, Resident
from .weights import WeightsNeeded

__all__ = [
    "Array",
    "Network",
    "StepTime",
    "Typed",
    "Watched",
    "WeightsNeeded",
    "why_not",
    "why_not_of",
]

_T = TypeVar("_T")


def machines() -> list[Machine]:
    """Return the GPUs that the settings name, or the emulator. Raises `NoUsableGpu` and
    `InvalidSetting`."""
    if settings.backend() == "emulator":
        # Imported only if used.
        from .emulated import emulated

        return [emulated()]
    return [real_gpu(index) for index in settings.devices()]


@dataclass(frozen=True)
class StepTime:
    """What computed a node, or some that are done in one step and of which this is one: the kernel,
    the convolution if it is one, and how long it took."""

    node: str
    kernel: str
    problem: ConvProblem | None
    seconds: float


def why_not_of(
    op: str, attributes: Mapping[str, str], given: Sequence[Typed], results: Sequence[Typed]
) -> str | None:
    """Why a node of MXNet's operator `op` is not computed on arrays of these shapes and types, for
    results that are used of these, or `None` if it is. A type that is `None`, or a result's empty
    shape, is not known."""
    node = Node(op, op, dict(attributes), tuple(Entry(n) for n in range(len(given))))
    return refused(node, tuple(given), tuple(results))


class Network:
    """A graph of MXNet's in its JSON, whose variables have these names; `parameters` are those that
    are the same for all images, such as weights and moving averages. By the `clock`'s seconds
    GPUs get their shares.

    Raises `UnsupportedProblem` for a graph with operators that are not computed here.
    """

    def __init__(
        self,
        symbol_json: str,
        names: Sequence[str],
        parameters: Collection[str],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
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
        self._partitions = Partitions()
        self._clock = clock

    def compute(
        self, inputs: Sequence[Array], outputs: Sequence[Array], are_held: bool = True
    ) -> None:
        """Compute the outputs from the inputs, in the order of the names; returns when they are
        complete. Several GPUs share the images by their measured speed, or the first one computes
        all where that is faster; last bits may differ then, as with any other size of chunks.

        Parameters are read where a GPU does not have them yet. If they are not held, which is to
        say that others may move them in memory meanwhile, that raises `WeightsNeeded` instead.

        May be called by several threads at once. Raises `UnsupportedProblem` and `InvalidProblem`
        for arrays that do not fit the graph, `NoUsableGpu`, `NotEnoughMemory`, `GpuFailed`, and
        what compiling raises.
        """
        call = self._call(inputs, outputs, are_held)
        found = [self._resident(machine) for machine in machines()]
        how = Pass.timed if op_log.collecting() else Pass.all
        if len(found) == 1:
            _compute(found[0], call, whole(call.inputs.images), how, self._clock)
            return
        partition = self._partitions.of(call, found)
        assigned = partition.balancer.assign()
        start = self._clock()
        took = gpu_threads.run_all(
            [
                (each.machine, partial(_compute, each, call, part, how, self._clock))
                for each, part in zip(found, partition.parts(assigned))
            ]
        )
        # Steps that are timed run one by one, which takes longer.
        if how is Pass.all:
            seconds = self._clock() - start
            partition.balancer.record(assigned, [each.seconds for each in took], seconds)

    def measure(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[StepTime]:
        """As `compute`, on the first GPU, each step by itself: what ran, and how long it took by
        the GPU's clock, in all chunks together."""
        timings = self._on_first(inputs, outputs, Pass.timed)
        return [
            StepTime(step.node, step.plan.kernel.name, step.problem, seconds)
            for step, seconds in zip(timings.program.steps.for_images, timings.seconds)
        ]

    def watch(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Watched:
        """As `compute`, on the first GPU; where the time went."""
        return self._on_first(inputs, outputs, Pass.watched)

    def close(self) -> None:
        """Give back all memory of GPUs; what is computed later takes it again."""
        with self._lock:
            residents, self._residents = self._residents, {}
        for each in residents.values():
            with each.machine.lock, each.machine.active():
                each.close()

    def _on_first(
        self, inputs: Sequence[Array], outputs: Sequence[Array], how: Callable[[Pass], _T]
    ) -> _T:
        """Compute all images on the first GPU."""
        call = self._call(inputs, outputs, are_held=True)
        resident = self._resident(machines()[0])
        return _compute(resident, call, whole(call.inputs.images), how, self._clock).result

    def _call(self, inputs: Sequence[Array], outputs: Sequence[Array], are_held: bool) -> Call:
        counts = (len(inputs), len(outputs))
        if counts != (len(self._names), len(self._graph.heads)):
            raise InvalidProblem(
                f"the network takes {len(self._names)} arrays and gives {len(self._graph.heads)}, "
                f"not {counts[0]} and {counts[1]}"
            )
        return self._calls.call(inputs, outputs, are_held)

    def _resident(self, machine: Machine) -> Resident:
        with self._lock:
            if machine.key not in self._residents:
                made = Resident(machine, self._graph, self._calls.weights)
                self._residents[machine.key] = made
            return self._residents[machine.key]


@dataclass(frozen=True)
class _Took(Generic[_T]):
    """What a part gave, and its seconds without waiting for other calls."""

    result: _T
    seconds: float


def _compute(
    resident: Resident,
    call: Call,
    part: Part,
    how: Callable[[Pass], _T],
    clock: Callable[[], float],
) -> _Took[_T]:
    """Compute a part of the images on one GPU; the log of op times hears of what has been timed."""
    machine = resident.machine
    with machine.lock, machine.active():
        start = clock()
        result = resident.compute(call, part, how)
        seconds = clock() - start
    if isinstance(result, Timings):
        _publish(result, machine)
    return _Took(result, seconds)


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
