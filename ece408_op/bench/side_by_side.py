"""Parallel tuning on several GPUs of one kind: a process for each GPU takes the next task."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any, Union

from ..backends.cuda.kernels.tuned import Result
from ..backends.cuda.runtime import device
from ..errors import Ece408Error, GpuFailed, InvalidSetting
from .tuner import Candidate, Task, tune

# A process that has used the GPU cannot be forked.
_CONTEXT = multiprocessing.get_context("spawn")


Job = tuple[Task, Sequence[str]]
Answer = Union[tuple[list[Candidate], list[Result]], Ece408Error]


def check_alike(gpus: Sequence[int]) -> None:
    """Raise `InvalidSetting` unless results of one of the GPUs hold for all."""
    first, *others = [device.get(number) for number in gpus]
    for number, gpu in zip(gpus[1:], others):
        if (gpu.name, gpu.capability) != (first.name, first.capability):
            raise InvalidSetting(
                f"GPU {gpus[0]} is {first.name} and GPU {number} {gpu.name}: what is measured on "
                "one does not hold for the other; tune for them one by one (--gpu)"
            )


def tune_all(gpus: Sequence[int], jobs: Iterable[Job]) -> Iterator[tuple[Task, Answer]]:
    """Run each task on the first free GPU; yield its result, of `tuner.tune`, or its error, as it
    arrives.

    Raises `GpuFailed` when a process dies. The processes end with the generator.
    """
    left = iter(jobs)
    with contextlib.ExitStack() as stack:
        busy: dict[Connection, Task] = {}
        places: dict[Connection, int] = {}
        for gpu, first in zip(gpus, left):
            ours, theirs = _CONTEXT.Pipe()
            stack.callback(_start(gpu, theirs))
            ours.send(first)
            busy[ours], places[ours] = first[0], gpu
        while busy:
            for each in connection.wait(list(busy)):
                assert isinstance(each, Connection)
                task = busy.pop(each)
                try:
                    answer = each.recv()
                except (EOFError, ConnectionResetError):  # a reset: its task is unread
                    raise GpuFailed(
                        f"the process of GPU {places[each]} ended while it tuned {task}; "
                        f"try --gpu {places[each]} alone"
                    ) from None
                # The GPU continues while the caller looks at results.
                following = next(left, None)
                if following is not None:
                    each.send(following)
                    busy[each] = following[0]
                yield task, answer


def _start(gpu: int, theirs: Connection) -> Callable[[], object]:
    """Start the process of a GPU; return a function that ends it."""
    process = _CONTEXT.Process(target=_serve_alone, args=(gpu, theirs), daemon=True)
    process.start()
    theirs.close()

    def end() -> None:
        process.terminate()
        process.join()

    return end


def _serve_alone(gpu: int, theirs: Connection) -> None:
    # The parent process ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        serve(gpu, theirs)


def serve(gpu: int, tasks: Any) -> None:
    """Answer tasks with their results or errors, forever."""
    while True:
        task, precisions = tasks.recv()
        try:
            tasks.send(tune(device.get(gpu), task, precisions))
        except Ece408Error as error:
            tasks.send(error)
