"""Turns of kernels on the GPU: some timed calls each, on numbers and outputs of this process's.

What this process reads of another one's memory cannot be there before it was written: whoever
answers early is found by how long reading the output then takes.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from .. import settings
from ..backends.cuda.runtime import device
from ..errors import Ece408Error, GpuFailed, WrongResult
from ..problem import ConvProblem
from .gpu_arrays import Block, Judge, Opened, judge
from .session import Session

# Timed calls of a turn, after one that warms up.
_CALLS = 3
# Reading an output may take this much longer than after our own kernels: a share, and seconds.
_LATE_SHARE, _LATE_SECONDS = 0.25, 2e-4
_COUNTED = "prolog and epilog count: they do more than copy x to the GPU and y from it"
_SAMPLED = 16


@dataclass
class Turn:
    """Seconds of a contender's calls, and, of a file that copies by itself, of what it does
    `around` them. `note` says what else a reader should know."""

    seconds: list[float] = field(default_factory=list)
    around: list[float] = field(default_factory=list)
    note: str = ""


class GpuTurns:
    """Gives sessions their turns on the first GPU that the settings name; use it in `with`.

    The arrays of one problem are kept from turn to turn. Entering raises `NoUsableGpu`; a turn
    raises what the kernel's backend raises, `Ended`, and `NotEnoughMemory`.
    """

    def __init__(self) -> None:
        self._gpu = device.get(settings.devices()[0])
        self._block = Block(self._gpu)
        self._judge: Judge | None = None
        self._problem: ConvProblem | None = None
        self._stack = contextlib.ExitStack()
        # Seconds that reading the output takes after our own kernels.
        self._usual: dict[ConvProblem, list[float]] = {}
        # Files whose prolog and epilog count, on a problem.
        self._counted: set[tuple[Session, ConvProblem]] = set()

    def __enter__(self) -> GpuTurns:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._block.close()
        self._stack.close()

    def __call__(self, session: Session, problem: ConvProblem) -> Turn:
        numbers = self._numbers(problem)
        try:
            if not session.by_method:
                return self._on_block(session, numbers, problem)
            if (session, problem) not in self._counted:
                with contextlib.suppress(_DoesMore):
                    return self._by_method(session, numbers, problem)
                self._counted.add((session, problem))
            return self._whole(session, numbers, problem)
        finally:
            session.host_arrays.release()

    def _numbers(self, problem: ConvProblem) -> Judge:
        if self._judge is None or self._problem != problem:
            self._stack.close()
            self._judge = self._stack.enter_context(judge(self._gpu, problem))
            self._problem = problem
        return self._judge

    def _on_block(self, session: Session, numbers: Judge, problem: ConvProblem) -> Turn:
        """Calls on arrays that this process has on the GPU."""
        session.prepare(problem, self._block.place(problem))
        x, w, y = self._block.addresses
        calls = _Calls(self._usual.setdefault(problem, []), session.is_ours)
        for _ in range(1 + _CALLS):
            numbers.draw()
            numbers.clear(y)
            numbers.copy("x", x)
            numbers.copy("w", w)
            session.wake()
            calls.add(session.go(), numbers, y)
            for role, address in (("x", x), ("w", w)):
                if numbers.changed(role, address):
                    raise WrongResult(f"it writes into its input {role}")
        for each in self._block.strays():
            raise WrongResult(f"it {each}")
        session.watch()
        return calls.turn()

    def _by_method(self, session: Session, numbers: Judge, problem: ConvProblem) -> Turn:
        """Calls of conv_forward_gpu alone, each on an x that was not there in the prolog. Raises
        `_DoesMore` where that cannot be right."""
        numbers.draw()
        arrays = self._prepare(session, numbers, problem)
        prolog, shared = session.method("prolog")
        calls = _Calls(self._usual.setdefault(problem, []), session.is_ours)
        with self._opened(shared, arrays) as (x, y):
            if x is not None and y is not None and not numbers.changed("x", x):
                self._calls(session, numbers, x, y, calls)
        epilog, _ = session.method("epilog")
        if not calls.seconds:
            raise _DoesMore
        expected = np.empty(problem.y_shape, np.float32)
        numbers.read("expected", expected)
        found = arrays.output()
        some = np.random.default_rng().integers(0, problem.batch, _SAMPLED)
        if not (np.abs(found[some] - expected[some]) <= numbers.bound).all():
            raise WrongResult("its epilog does not copy what conv_forward_gpu computed")
        session.watch()
        turn = calls.turn()
        turn.around = [prolog + epilog]
        return turn

    def _calls(self, session: Session, numbers: Judge, x: int, y: int, calls: _Calls) -> None:
        """Calls of conv_forward_gpu; none is left in `calls` where it needs its prolog each time.

        Its output is NaN before, or 0, if it adds to what the prolog has left there.
        """
        for value in (np.nan, 0.0):
            numbers.clear(y, value)
            session.wake()
            session.method("compute")
            if not numbers.wrong(y):
                break
        else:
            return
        for _ in range(1 + _CALLS):
            numbers.draw(("x",))
            numbers.clear(y, value)
            numbers.copy("x", x)
            session.wake()
            calls.add(session.method("compute")[0], numbers, y)

    def _whole(self, session: Session, numbers: Judge, problem: ConvProblem) -> Turn:
        """Calls of all three methods, which count as one."""
        for _ in range(2):
            numbers.draw()
            arrays = self._prepare(session, numbers, problem)
            seconds = sum(session.method(name)[0] for name in ("prolog", "compute", "epilog"))
            expected = np.empty(problem.y_shape, np.float32)
            numbers.read("expected", expected)
            wrong = ~(np.abs(arrays.output() - expected) <= numbers.bound)
            if wrong.any():
                raise _wrong(np.count_nonzero(wrong))
        session.watch()
        return Turn([seconds], note=_COUNTED)

    def _prepare(self, session: Session, numbers: Judge, problem: ConvProblem) -> Any:
        """Have x and w on the host, for a call; returns the arrays there."""
        arrays = session.host_arrays
        told = arrays.place(problem)
        for index, role in enumerate("xw"):
            numbers.read(role, arrays.array(index))
        session.prepare(problem, told)
        return arrays

    @contextlib.contextmanager
    def _opened(self, shared: list[Any], arrays: Any) -> Iterator[tuple[int | None, int | None]]:
        """Addresses here of a file's own x and y, where it shares them."""
        with contextlib.ExitStack() as stack:
            addresses: list[int | None] = []
            for role in (0, 2):
                with contextlib.suppress(GpuFailed, TypeError, ValueError, OverflowError):
                    memory, offset = shared[role]
                    opened = Opened(self._gpu, str(memory), int(offset), arrays.array(role).nbytes)
                    stack.callback(opened.close)
                    addresses.append(opened.address)
                    continue
                addresses.append(None)
            yield addresses[0], addresses[1]


class _DoesMore(Exception):
    """A prolog or an epilog does more than copy."""


class _Calls:
    """The calls of a turn; `usual` are seconds that reading an output takes after our own."""

    def __init__(self, usual: list[float], is_ours: bool) -> None:
        self.seconds: list[float] = []
        self._reading: list[float] = []
        self._usual, self._is_ours = usual, is_ours

    def add(self, seconds: float, numbers: Judge, y: int) -> None:
        """Note a call, after which the output is at y now. Raises `WrongResult`."""
        begin = time.perf_counter()
        wrong = numbers.wrong(y)
        self._reading.append(time.perf_counter() - begin)
        if wrong:
            raise _wrong(wrong)
        self.seconds.append(seconds)

    def turn(self) -> Turn:
        """The turn of these calls. Raises `WrongResult` if they were not over when they seemed."""
        reading = min(self._reading[1:])
        if self._is_ours:
            self._usual += self._reading[1:]
        elif self._usual:
            usual = statistics.median(self._usual)
            if reading > (1 + _LATE_SHARE) * usual + _LATE_SECONDS:
                raise WrongResult(
                    f"its call is not over when it returns: {1e3 * (reading - usual):.2f} ms of "
                    "work come later"
                )
        return Turn(self.seconds[1:])


def _wrong(elements: int) -> Ece408Error:
    return WrongResult(f"{elements} elements are wrong; ece408 lab check says more")
