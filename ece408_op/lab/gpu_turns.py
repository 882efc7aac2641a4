"""GPU timing in turns: each turn is a few timed calls on arrays of this process.

The latency of a request to another process varies. So a window of many calls is timed as a whole,
each call on its own arrays, and the time of a window without kernels is subtracted. The number of
calls in a window is random, so a kernel cannot postpone work to a later one, and the weights are
written only when the window begins. Afterwards this process immediately reads a random output: if
that takes longer than usual, the kernel was still running.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from .. import settings
from ..backends import kernel_file
from ..backends.cuda.runtime import device
from ..backends.kernel_file import KernelFile
from ..errors import KernelFailed, WrongResult
from ..files.resources import kernels_dir
from ..problem import ConvProblem
from .guarded_gpu_arrays import Block, Judge, judge
from .session import Ended, Session

# Maximum calls of a window, if their arrays fit: the smallest number that takes long enough. On an
# H200 the time of a window varies by 20 us, independent of its calls.
_CALLS, _LONG_ENOUGH = (4, 16, 64), 0.01
# Counted windows per turn; two windows of one turn differ less than those of two turns. They have
# at least this fraction of the maximum calls; one further window, not counted, has any number.
_WINDOWS, _LEAST_FRACTION = 2, 0.75
_ARRAY_BYTES = 16 << 30
_FRACTION_OF_FREE = 0.25
# Files with an empty kernel, for each form that launches its kernels itself.
_EMPTY = {"course_2019": "empty.cuh", "course_2020": "empty_2020.cu"}
_EMPTY_WINDOWS = 15
# Reading an output may take this much longer than after our own kernels: a fraction, and seconds.
_LATE_FRACTION, _LATE_SECONDS = 0.25, 2e-4
_COUNTED = "prolog and epilog count: conv_forward_gpu needs the prolog for each input"
_COPIES = "copies count: conv_forward_gpu takes arrays on the host"
_SAMPLED = 16


@dataclass
class Turn:
    """Seconds of a contender's calls and, for a file that copies by itself, of its work `around`
    them. `note` is for the reader of a table."""

    seconds: list[float] = field(default_factory=list)
    around: list[float] = field(default_factory=list)
    note: str = ""


class _WrongAtOnce(Exception):
    """Elements of a turn's first window are wrong."""


class NeedsProlog(Exception):
    """A file since 2020 failed on inputs that are exchanged after the prolog. Its next turn, in a
    new process, counts all three methods."""


class GpuTurns:
    """Gives sessions their turns at these problems on the first GPU in the settings; use it in
    `with`, around the sessions.

    `largest_error` is the maximum error of outputs, as in `judge`. A problem's numbers are kept
    between turns. Entering raises `NoUsableGpu` and `NotEnoughMemory`; a turn raises what the
    kernel's backend raises, `Ended`, and `NeedsProlog`.
    """

    def __init__(self, problems: Iterable[ConvProblem], largest_error: float) -> None:
        self._gpu = device.get(settings.devices()[0])
        self._block = Block(self._gpu)
        self._largest_error = largest_error
        self._problem: ConvProblem | None = None
        self._judged = contextlib.ExitStack()
        # Seconds to read the output after our own kernels.
        self._usual: dict[ConvProblem, list[float]] = {}
        # Seconds of windows without kernels, by form and number of calls.
        self._empty: dict[str, dict[int, float]] = {}
        # Files and problems whose prolog and epilog count.
        self._counted: set[tuple[KernelFile | str, ConvProblem]] = set()
        with self._gpu.active():
            room = min(_ARRAY_BYTES, int(_FRACTION_OF_FREE * self._gpu.free_bytes()))
        # Possible numbers of calls per window, ascending.
        self._calls_of = {
            p: sorted({min(calls, max(1, room // p.bytes)) for calls in _CALLS}) for p in problems
        }

    def __enter__(self) -> GpuTurns:
        # The largest first, so that there is one block.
        most = {problem: counts[-1] for problem, counts in self._calls_of.items()}
        for problem in sorted(most, key=lambda p: most[p] * p.bytes, reverse=True):
            self._block.reserve(problem, most[problem])
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()
        self._judged.close()

    def measure_empty(self, forms: Iterable[str]) -> None:
        """Time windows without kernels, while no other session runs. For a form whose files launch
        kernels themselves, use an empty kernel. Raises what our own kernels raise."""
        folder = kernels_dir() / "files" / "empty"
        for form in forms:
            name = _EMPTY.get(form)
            with Session(kernel_file.find(str(folder / name)) if name else "cuda") as session:
                found = self._empty.setdefault(form, {})
                for problem, counts in self._calls_of.items():
                    for calls in {1, *counts} - set(found):
                        found[calls] = self._empty_seconds(session, problem, calls)

    def _empty_seconds(self, session: Session, problem: ConvProblem, calls: int) -> float:
        numbers = self._numbers(problem)
        session.prepare(problem, self._block.place(problem, calls))
        found = []
        for _ in range(_EMPTY_WINDOWS):
            session.wake()
            numbers.copy("w", self._block.sets[0][1])
            found.append(session.go_idle() if session.is_ours else session.go())
        return statistics.median(found)

    def __call__(self, session: Session, problem: ConvProblem) -> Turn:
        numbers = self._numbers(problem)
        try:
            if not session.by_method:
                return self._calls(session, numbers, problem)
            if session.has_prolog and (session.kernel, problem) not in self._counted:
                turn = self._by_method(session, numbers, problem)
                if turn is not None:
                    return turn
                self._counted.add((session.kernel, problem))
            return self._whole(session, numbers, problem)
        finally:
            session.host_arrays.release()

    def _numbers(self, problem: ConvProblem) -> Judge:
        if self._problem != problem:
            self._judged.close()
            self._judge = self._judged.enter_context(judge(self._gpu, problem, self._largest_error))
            self._problem = problem
        return self._judge

    def _calls(self, session: Session, numbers: Judge, problem: ConvProblem) -> Turn:
        """Time windows of calls on this process's GPU arrays, with a new w for each."""

        def window() -> tuple[float, int]:
            numbers.draw("w", secrets.token_bytes(8))
            return self._window(session, numbers, problem)

        try:
            return Turn(self._windows(session, problem, window))
        except _WrongAtOnce as error:
            raise WrongResult(str(error)) from None

    def _windows(
        self, session: Session, problem: ConvProblem, window: Callable[[], tuple[float, int]]
    ) -> list[float]:
        """Return the seconds per call of each counted window; `window` runs one, as `_window` does.
        Raises `WrongResult` for wrong elements, and `_WrongAtOnce` for those in the first
        window."""
        counts = self._calls_of[problem]
        begin = 1 + secrets.randbelow(counts[0])
        each = self._of_a_call(session, problem, window, begin, _WrongAtOnce)
        most = next((n for n in counts if n * each >= _LONG_ENOUGH), counts[-1])
        least = math.ceil(_LEAST_FRACTION * most)
        lengths = [least + secrets.randbelow(most - least + 1) for _ in range(_WINDOWS)]
        other = secrets.randbelow(_WINDOWS + 1)
        lengths.insert(other, 1 + secrets.randbelow(most))
        taken = [self._of_a_call(session, problem, window, calls) for calls in lengths]
        session.watch()
        return [*taken[:other], *taken[other + 1 :]]

    def _of_a_call(
        self,
        session: Session,
        problem: ConvProblem,
        window: Callable[[], tuple[float, int]],
        calls: int,
        error: type[Exception] = WrongResult,
    ) -> float:
        """Return the seconds per call in a window of `calls`. Raises `error` for wrong elements."""
        session.prepare(problem, self._block.place(problem, calls))
        seconds, wrong = window()
        if wrong:
            raise error(_wrong_elements(wrong))
        for each in self._block.strays():
            raise WrongResult(f"it {each}")
        known = sorted(self._empty[session.form].items())
        empty = np.interp(calls, [n for n, _ in known], [found for _, found in known])
        return max(seconds - float(empty), 1e-9) / calls

    def _window(
        self, session: Session, numbers: Judge, problem: ConvProblem, blank: float = np.nan
    ) -> tuple[float, int]:
        """Run one call per set of arrays, each with a new x and an output filled with `blank`;
        return the seconds per call and the number of wrong elements. Raises `WrongResult` for other
        errors."""
        sets = self._block.sets
        drawn = [(secrets.token_bytes(8), each) for each in sets]
        last = drawn.pop(secrets.randbelow(len(sets)) if secrets.randbelow(2) else -1)
        drawn.append(last)
        for seed, (x, _, y) in drawn:
            numbers.draw("x", seed)
            numbers.copy("x", x)
            numbers.clear(y, blank)
        numbers.expect()
        session.wake()
        numbers.copy("w", sets[0][1])
        seconds = session.go()
        begin = time.perf_counter()
        wrong = numbers.wrong(last[1][2])
        self._note_reading(session, problem, time.perf_counter() - begin)
        for seed, (x, _, y) in drawn[::-1]:
            numbers.draw("x", seed)
            numbers.expect()
            wrong += numbers.wrong(y)
            if numbers.changed("x", x):
                raise WrongResult("it writes into its input x")
        if numbers.changed("w", sets[0][1]):
            raise WrongResult("it writes into its input w")
        return seconds, wrong

    def _note_reading(self, session: Session, problem: ConvProblem, seconds: float) -> None:
        """Compare the time of reading an output with that after our own kernels. Raises
        `WrongResult` if work was still going on."""
        usual = self._usual.setdefault(problem, [])
        if session.is_ours:
            usual.append(seconds)
        elif usual:
            late = seconds - statistics.median(usual)
            if late > _LATE_FRACTION * statistics.median(usual) + _LATE_SECONDS:
                session.late += 1
                # A single delay may be chance.
                if session.late > 2:
                    raise WrongResult(
                        f"its call is not over when it returns: {1e3 * late:.2f} ms of work come "
                        "later"
                    )
            else:
                session.late = 0

    def _by_method(self, session: Session, numbers: Judge, problem: ConvProblem) -> Turn | None:
        """Time windows of conv_forward_gpu alone, on inputs that are exchanged after the prolog;
        `None` if the outputs are wrong, because the file needs its prolog for each input."""
        numbers.draw("w", secrets.token_bytes(8))
        numbers.draw("x", secrets.token_bytes(8))
        numbers.expect()
        self._prepare_on_host(session, numbers, problem)
        around = session.method("prolog")
        session.method("compute")
        around += session.method("epilog")
        self._check_on_host(session, numbers, problem, _SAMPLED)
        # Once more for the following calls: the file's own arrays are gone.
        session.method("prolog")
        try:
            seconds = self._method_windows(session, numbers, problem)
        except (Ended, KernelFailed) as error:
            # For example, the prolog copies x to a padded layout.
            self._counted.add((session.kernel, problem))
            raise NeedsProlog from error
        session.method("epilog")
        return Turn(seconds, [around]) if seconds else None

    def _method_windows(
        self, session: Session, numbers: Judge, problem: ConvProblem
    ) -> list[float]:
        """Return the seconds per call of each window; none if the file needs its prolog each time.
        Outputs are initially NaN, or 0 for a file that accumulates into what its prolog has
        cleared."""
        for blank in (np.nan, 0.0):
            window = functools.partial(self._window, session, numbers, problem, blank)
            with contextlib.suppress(_WrongAtOnce):
                return self._windows(session, problem, window)
        return []

    def _whole(self, session: Session, numbers: Judge, problem: ConvProblem) -> Turn:
        """Time calls of all three methods, which count as one."""
        for _ in range(2):
            for role in ("w", "x"):
                numbers.draw(role, secrets.token_bytes(8))
            numbers.expect()
            self._prepare_on_host(session, numbers, problem)
            session.wake()
            seconds = sum(session.method(name) for name in ("prolog", "compute", "epilog"))
            self._check_on_host(session, numbers, problem, problem.batch)
        session.watch()
        return Turn([seconds], note=_COUNTED if session.has_prolog else _COPIES)

    def _prepare_on_host(self, session: Session, numbers: Judge, problem: ConvProblem) -> None:
        """Prepare the session for x and w on the host, and write them."""
        arrays = session.host_arrays
        session.prepare(problem, arrays.place(problem))
        for index, role in enumerate("xw"):
            numbers.read(role, arrays.array(index))

    def _check_on_host(
        self, session: Session, numbers: Judge, problem: ConvProblem, images: int
    ) -> None:
        """Compare this number of images of the output on the host. Raises `WrongResult`."""
        expected = np.empty(problem.y_shape, np.float32)
        numbers.read("expected", expected)
        some = np.arange(problem.batch)
        if images < problem.batch:
            some = np.random.default_rng().integers(0, problem.batch, images)
        found = session.host_arrays.output()[some]
        wrong = ~(np.abs(found - expected[some]) <= numbers.bound)
        if wrong.any():
            raise WrongResult(_wrong_elements(int(np.count_nonzero(wrong))))


def _wrong_elements(count: int) -> str:
    return f"{count} elements are wrong; ece408 lab check says more"
