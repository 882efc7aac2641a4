"""Tuning on several GPUs of one kind: on each a process takes one problem after the other."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from ..backends.cuda import work
from ..backends.cuda.kernels.tuned import Result
from ..backends.cuda.runtime import device
from ..errors import Ece408Error, GpuFailed, InvalidSetting
from ..problem import ConvProblem
from .tuner import Candidate, tune

# A process that has used the GPU cannot be forked.
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Task:
    """What `tuner.tune` is to be given: a problem, precisions, and a kernel's name or file, if it
    is to be that one only."""

    problem: ConvProblem
    precisions: Sequence[str]
    kernel: str | None

    def run(
        self, gpu: int, on_each: Callable[[], object] = lambda: None
    ) -> tuple[list[Candidate], list[Result]]:
        """What `tuner.tune` returns, for the GPU of this number. Raises what it raises."""
        only = None if self.kernel is None else work.forward_kernel(self.kernel)
        return tune(device.get(gpu), self.problem, self.precisions, on_each, only)


Found = tuple[Task, list[Candidate], list[Result]]


def check_alike(gpus: Sequence[int]) -> None:
    """Raise `InvalidSetting` unless results of one of the GPUs hold for all."""
    first, *others = [device.get(number) for number in gpus]
    for number, gpu in zip(gpus[1:], others):
        if (gpu.name, gpu.capability) != (first.name, first.capability):
            raise InvalidSetting(
                f"GPU {gpus[0]} is {first.name} and GPU {number} {gpu.name}: what is measured on "
                "one does not hold for the other; tune for them one by one (--gpu)"
            )


def tune_all(gpus: Sequence[int], tasks: Iterable[Task]) -> Iterator[Found]:
    """What comes of the tasks, as it comes, each run by the GPU that is free first.

    Raises what `tuner.tune` raises, and `GpuFailed` when a process dies. However this ends, so do
    the processes.
    """
    left = iter(tasks)
    with contextlib.ExitStack() as stack:
        busy: dict[Connection, Task] = {}
        places: dict[Connection, int] = {}
        for gpu, task in zip(gpus, left):
            ours, theirs = _CONTEXT.Pipe()
            stack.callback(_start(gpu, theirs))
            ours.send(task)
            busy[ours], places[ours] = task, gpu
        while busy:
            for each in connection.wait(list(busy)):
                assert isinstance(each, Connection)
                task = busy.pop(each)
                try:
                    answer = each.recv()
                except EOFError:
                    raise GpuFailed(
                        f"the process of GPU {places[each]} ended while it tuned {task.problem}; "
                        f"see what happens with --gpu {places[each]} alone"
                    ) from None
                if isinstance(answer, Ece408Error):
                    raise answer
                # It goes on while the results are looked at.
                following = next(left, None)
                if following is not None:
                    each.send(following)
                    busy[each] = following
                yield (task, *answer)


def _start(gpu: int, theirs: Connection) -> Callable[[], object]:
    """Start the process of a GPU; returns what ends it."""
    process = _CONTEXT.Process(target=_serve_alone, args=(gpu, theirs), daemon=True)
    process.start()
    theirs.close()

    def end() -> None:
        process.terminate()
        process.join()

    return end


def _serve_alone(gpu: int, theirs: Connection) -> None:
    # Whoever started this process ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        serve(gpu, theirs)


def serve(gpu: int, tasks: Any) -> None:
    """Answer tasks with what comes of them, or with the error, for ever."""
    while True:
        task = tasks.recv()
        try:
            tasks.send(task.run(gpu))
        except Ece408Error as error:
            tasks.send(error)
