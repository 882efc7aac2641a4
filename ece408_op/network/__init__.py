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
from typing import Generic, TypeVar, Union

from .. import op_log
from ..backends.cuda.runtime import gpu_threads
from ..errors import InvalidProblem, UnsupportedProblem
from ..problem import ConvProblem
from . import machines, network_program
from .batch_partition import Partitions, whole
from .chunk_pipeline import Pass, Timings, Watched
from .cpu_resident import CpuResident
from .gpu_weights import WeightsNeeded
from .gradients import why_not_trained
from .graph import Entry, Graph, Node
from .host_arrays import Array
from .inputs import Call, Calls
from .machines.cpu import CpuCode, KeptCode
from .machines.machine import GpuMachine, Machine
from .operators import Typed, refused, why_not
from .resident import Part, Resident
from .values import Step, Steps

__all__ = [
    "Array",
    "KeptCode",
    "Network",
    "StepTime",
    "Steps",
    "Typed",
    "Watched",
    "WeightsNeeded",
    "publish",
    "why_not",
    "why_not_of",
    "why_not_trained",
]

_T = TypeVar("_T")
_Resident = Union[Resident, CpuResident]


@dataclass(frozen=True)
class StepTime:
    """One computed step: its node (one of several if the step fuses them), kernel, convolution if
    any, and seconds."""

    node: str
    kernel: str
    problem: ConvProblem | None
    seconds: float


def why_not_of(
    op: str, attributes: Mapping[str, str], given: Sequence[Typed], results: Sequence[Typed]
) -> str | None:
    """Return why MXNet's operator `op` cannot be computed for arguments of these shapes and types,
    or `None` if it can. `results` are those that the graph uses. A type of `None` or an empty
    result shape means unknown."""
    node = Node(op, op, dict(attributes), tuple(Entry(n) for n in range(len(given))))
    return refused(node, tuple(given), tuple(results))


class Network:
    """A network given as MXNet's JSON graph. `names` are its variables in order; `parameters` are
    those that are the same for all images, such as weights and moving averages. It runs `on` the
    "cpu", the "emulator" or the "gpu": those that the settings name, or the emulator. Times for
    load balancing come from `clock`.

    Raises `UnsupportedProblem` for a graph with operators that are not computed here.
    """

    def __init__(
        self,
        symbol_json: str,
        names: Sequence[str],
        parameters: Collection[str],
        clock: Callable[[], float] = time.perf_counter,
        on: str = "gpu",
    ) -> None:
        self._graph = Graph.parse(symbol_json).pooled_first()
        self._graph.check_inputs(names)
        self._names = tuple(names)
        for _, node in self._graph.computed:
            reason = why_not(node.op, node.attributes)
            if reason is not None:
                raise UnsupportedProblem(f"{node.op} {node.name}: {reason}")
        self._calls = Calls(names, frozenset(parameters))
        self._lock = threading.Lock()
        self._residents: dict[tuple[object, ...], _Resident] = {}
        self._partitions = Partitions()
        self._clock = clock
        self._on = on

    def compute(
        self, inputs: Sequence[Array], outputs: Sequence[Array], are_held: bool = True
    ) -> None:
        """Compute the outputs from the inputs, in the order of `names`; return when they are
        complete. Several GPUs split the batch, or the first computes all of it if that is faster;
        the last bits may differ, as they do for any change of chunk size.

        Parameters are copied to GPUs that do not hold them yet. If `are_held` is false, other
        threads may move them during the call; then `WeightsNeeded` is raised instead.

        Thread-safe. Raises `UnsupportedProblem` and `InvalidProblem` for arrays that do not fit the
        graph, `NoUsableGpu`, `NotEnoughMemory`, `GpuFailed`, and compiler errors.
        """
        call = self._call(inputs, outputs, are_held)
        found = [self._resident(machine) for machine in machines.chosen(self._on)]
        how = Pass.timed if op_log.collecting() else Pass.all
        if len(found) == 1:
            _compute(found[0], call, whole(call.inputs.images), how, self._clock)
            return
        gpus = [each for each in found if isinstance(each, Resident)]
        partition = self._partitions.of(call, gpus)
        assigned = partition.balancer.assign()
        start = self._clock()
        took = gpu_threads.run_all(
            [
                (each.machine, partial(_compute, each, call, part, how, self._clock))
                for each, part in zip(gpus, partition.parts(assigned))
            ]
        )
        # Timed steps run one by one, so their times would mislead the load balancer.
        if how is Pass.all:
            seconds = self._clock() - start
            partition.balancer.record(assigned, [each.seconds for each in took], seconds)

    def measure(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> list[StepTime]:
        """Compute on the first GPU, timing each step separately by the GPU's clock; return the
        steps with their seconds, summed over chunks."""
        timings = self._on_first(inputs, outputs, Pass.timed)
        return [
            StepTime(step.node, step.plan.name, step.problem, seconds)
            for step, seconds in zip(timings.steps, timings.seconds)
        ]

    def watch(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Watched:
        """Compute on the first GPU and return where the time went."""
        return self._on_first(inputs, outputs, Pass.watched)

    def output_shapes(self, inputs: Sequence[Array]) -> list[tuple[int, ...]]:
        """Return the shapes of the outputs for inputs of these shapes and types. Raises
        `UnsupportedProblem` and `InvalidProblem`."""
        unknown = Array(0, (), "float32", 0)
        call = self._call(inputs, [unknown] * len(self._graph.heads), True)
        cpu = machines.chosen("cpu")[0]
        if self._on == "cpu":
            resident = self._resident(cpu)
            assert isinstance(resident, CpuResident)
            return resident.output_shapes(call)
        # They are those of any machine, and the CPU's kernels are chosen in the shortest time.
        steps, _ = network_program.build(self._graph, call.inputs, cpu)
        return [value.shape for value in steps.outputs]

    def code(
        self,
        inputs: Sequence[Array],
        results: Sequence[str],
        kept: Sequence[KeptCode],
    ) -> CpuCode:
        """Return the CPU's code for inputs of these shapes and types, and results of these types.
        It may use what is `kept` for other code. Raises `UnsupportedProblem` and
        `InvalidProblem`."""
        outputs = [Array(0, (), dtype, 0) for dtype in results]
        call = self._call(inputs, outputs, True)
        machine = machines.chosen("cpu")[0]
        lasting = {what: arrays for each in kept for what, arrays in each.made.items()}
        steps, values = network_program.build(self._graph, call.inputs, machine, lasting=lasting)
        return CpuCode(steps, values, kept)

    def close(self) -> None:
        """Free all memory that it has on its machines; the next call allocates it again."""
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
        resident = self._resident(machines.chosen(self._on)[0])
        return _compute(resident, call, whole(call.inputs.images), how, self._clock).result

    def _call(self, inputs: Sequence[Array], outputs: Sequence[Array], are_held: bool) -> Call:
        counts = (len(inputs), len(outputs))
        if counts != (len(self._names), len(self._graph.heads)):
            raise InvalidProblem(
                f"the network takes {len(self._names)} arrays and gives {len(self._graph.heads)}, "
                f"not {counts[0]} and {counts[1]}"
            )
        return self._calls.call(inputs, outputs, are_held)

    def _resident(self, machine: Machine) -> _Resident:
        with self._lock:
            if machine.key not in self._residents:
                if isinstance(machine, GpuMachine):
                    made = Resident(machine, self._graph, self._calls.weights)
                    self._residents[machine.key] = made
                else:
                    self._residents[machine.key] = CpuResident(machine, self._graph)
            return self._residents[machine.key]


@dataclass(frozen=True)
class _Took(Generic[_T]):
    """The result of one GPU's part, and its seconds without waiting for other calls."""

    result: _T
    seconds: float


def _compute(
    resident: _Resident,
    call: Call,
    part: Part,
    how: Callable[[Pass], _T],
    clock: Callable[[], float],
) -> _Took[_T]:
    """Compute a part of the images on one GPU; publish timed steps to the log of op times."""
    machine = resident.machine
    with machine.lock, machine.active():
        start = clock()
        result = resident.compute(call, part, how)
        seconds = clock() - start
    if isinstance(result, Timings):
        _publish(result, machine)
    return _Took(result, seconds)


def publish(steps: Sequence[Step], seconds: Sequence[float], on: str = "cpu") -> None:
    """Publish the convolutions' times of steps `on` a machine to the log of op times."""
    _publish(Timings(list(steps), list(seconds)), machines.chosen(on)[0])


def _publish(timings: Timings, machine: Machine) -> None:
    for step, seconds in zip(timings.steps, timings.seconds):
        if step.problem is not None:
            did = machine.done(step.plan, seconds)
            op_log.publish(
                op_log.OpTime(
                    *(step.node, step.problem, step.direction, machine.backend),
                    *(did.kernel, seconds, did.gpu, did.precision),
                )
            )
