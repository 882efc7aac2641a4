"""Ranking on several GPUs: one process per GPU checks or times some of the files."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from .. import settings
from ..backends.kernel_file import KernelFile
from ..errors import Ece408Error
from ..problem import ConvProblem
from . import sandbox
from .timing import Race, Timing, device_of

# CUDA does not survive a fork.
_CONTEXT = multiprocessing.get_context("spawn")
Timings = dict[tuple["KernelFile | str", str], Timing]


def pool(jobs: int) -> ProcessPoolExecutor:
    """Return `jobs` processes, spread over the GPUs in the settings."""
    gpus = _CONTEXT.SimpleQueue()
    for _, gpu in zip(range(jobs), itertools.cycle(settings.devices())):
        gpus.put(gpu)
    return ProcessPoolExecutor(jobs, _CONTEXT, initializer=_use_next, initargs=(gpus,))


def _use_next(gpus: Any) -> None:
    sandbox.end_with_parent()
    settings.configure(devices=str(gpus.get()))


@dataclass(frozen=True)
class Turns:
    """Timing of contenders for `count` rounds, after one to warm up."""

    contenders: list[KernelFile | str]
    layers: Sequence[tuple[str, ConvProblem]]
    count: int
    precision: str

    def rounds(self, progress: Callable[[str, int, int], object]) -> Iterator[Timings]:
        """Yield the results of each round; with several GPUs each has some of the contenders, and a
        process that gives them their turns. Raises what a `Race` raises."""
        gpus = places(self.contenders)[: len(self.contenders)]
        turns = (len(self.contenders) + len(gpus)) * len(self.layers) * (self.count + 1)
        done = itertools.count(1)

        def turned() -> None:
            progress("timing", next(done), turns)

        if len(gpus) == 1:
            yield from self._here(turned)
            return
        parts = [
            dataclasses.replace(self, contenders=self.contenders[n :: len(gpus)])
            for n in range(len(gpus))
        ]
        yield from _side_by_side(parts, gpus, turned)

    def _here(self, turned: Callable[[], object]) -> Iterator[Timings]:
        with Race(self.contenders, self.layers, self.precision) as race:
            for number in range(self.count + 1):
                race.round(number > 0, turned)
                if number:
                    yield race.timings

    def run(self, gpu: int, results: Connection) -> None:
        """Run turns on a GPU in this process, and send the results of each round, `None` after each
        turn, and any error."""
        sandbox.end_with_parent()
        settings.configure(devices=str(gpu))
        # The parent ends this process, which then ends its own children.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        try:
            for timings in self._here(lambda: results.send(None)):
                results.send(timings)
                clear(timings)
        except Ece408Error as error:
            results.send(error)
        results.close()


def places(contenders: Sequence[KernelFile | str]) -> tuple[int, ...]:
    """Return the GPUs for the contenders, or one dummy for the CPU."""
    return settings.devices() if device_of(contenders) == "cuda" else (0,)


def _side_by_side(
    parts: Sequence[Turns], gpus: Sequence[int], turned: Callable[[], object]
) -> Iterator[Timings]:
    """Yield the results of rounds on several GPUs as they arrive."""
    with contextlib.ExitStack() as stack:
        waiting: list[Connection] = []
        for part, gpu in zip(parts, gpus):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            # Not a daemon, because it starts processes itself.
            process = _CONTEXT.Process(target=part.run, args=(gpu, theirs))
            process.start()
            theirs.close()
            stack.callback(process.join)
            stack.callback(process.terminate)
            waiting.append(ours)
        while waiting:
            ready = connection.wait(waiting)
            for each in [one for one in waiting if one in ready]:
                try:
                    said = each.recv()
                except EOFError:
                    waiting.remove(each)
                    continue
                if isinstance(said, Ece408Error):
                    raise said
                if said is None:
                    turned()
                else:
                    yield said


def clear(timings: Timings) -> None:
    """Discard the results."""
    for timing in timings.values():
        timing.seconds, timing.around = [], []
