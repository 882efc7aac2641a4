"""Timing of kernels, in files and this package's own.

All contenders take turns in random order, each in its own process. This process measures the time
from request to answer and subtracts that of an empty request. Every timed call has fresh random
numbers, and an output filled with NaN that is checked afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from .. import settings
from ..backends import kernel_file
from ..backends.cpu import native
from ..backends.cuda.runtime import device
from ..backends.kernel_file import KernelFile
from ..bench import ceilings, oracle
from ..errors import Ece408Error, InvalidSetting, WrongResult
from ..host import footprint
from ..problem import ConvProblem
from ..profile import gpu_ceilings
from .check import LARGEST_ERROR, beyond
from .gpu_turns import GpuTurns, NeedsProlog, Turn
from .session import Ended, Session

OURS = "ece408_op"
CALL_SECONDS = 300.0
# Images of each output that are compared on the CPU.
_SAMPLED = 2
# A median with a wider interquartile range, relative to it, is not steady.
STEADY = 0.02
# No kernel is faster than this fraction of the floor, even with arrays in caches and a fast
# algorithm. It is checked for contenders below this fraction of our time.
_BELIEVED, _SUSPICIOUS = 1 / 8, 1 / 4
# A call shorter than this fraction of a request cannot be distinguished from no call.
_TOLD_APART = 0.1
# Memory of an idle process; on the GPU, of CUDA's context.
_SESSION_BYTES, _SESSION_GPU_BYTES = 512 << 20, 1 << 30


@dataclass
class Timing:
    """One contender on one layer: seconds of each call, and why there are no more.

    `around` are the seconds of the prolog and epilog of a file since 2020. `note` is for the reader
    of a table.
    """

    name: str
    layer: str
    problem: ConvProblem
    seconds: list[float] = field(default_factory=list)
    around: list[float] = field(default_factory=list)
    failure: str = ""
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The interquartile range of the calls, relative to the median."""
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        return float((high - low) / self.median)


def floor_seconds(device_kind: str, problem: ConvProblem) -> float:
    """Return this machine's minimum time for a kernel that does all products, by memory and
    arithmetic."""
    if device_kind == "cpu":
        return _cpu_ceilings().floor_ms(problem) / 1e3
    found = _gpu_ceilings()
    seconds = problem.flops / (1e9 * found.gflops("float32"))
    return max(seconds, problem.bytes / (1e9 * found.copy_gbs))


@functools.cache
def _cpu_ceilings() -> ceilings.Ceilings:
    return ceilings.measure(settings.isa() or native.isas()[0], settings.threads())


@functools.cache
def _gpu_ceilings() -> gpu_ceilings.GpuCeilings:
    return gpu_ceilings.measure(device.get(settings.devices()[0]))


class Race:
    """Timing of files, or of our own kernels by name, for one device, together with our own choice,
    on named problems, in rounds; use it in `with`.

    Every round adds a turn of each contender on each problem to `timings`. A contender that fails,
    even to compile, or is less exact than `precision`, is removed. Entering raises `NoUsableGpu`,
    and what our own kernels raise.
    """

    def __init__(
        self,
        contenders: Sequence[KernelFile | str],
        layers: Sequence[tuple[str, ConvProblem]],
        precision: str = "float32",
    ) -> None:
        self._kind = device_of(contenders)
        self._largest_error = LARGEST_ERROR[precision]
        self._contenders = [self._kind, *contenders]
        self._stack = contextlib.ExitStack()
        self._sessions: dict[KernelFile | str, Session] = {}
        called = names(self._contenders)
        self.timings = {
            (each, layer): Timing(called[each], layer, problem)
            for layer, problem in layers
            for each in self._contenders
        }

    def __enter__(self) -> Race:
        self._turn: Callable[[Session, ConvProblem], Turn] = functools.partial(
            _cpu_turn, largest_error=self._largest_error
        )
        if self._kind == "cuda":
            problems = [timing.problem for timing in self.timings.values()]
            turns = GpuTurns(problems, self._largest_error)
            self._turn = self._stack.enter_context(turns)
            # This package launches its own kernels as those of declared files.
            turns.measure_empty({getattr(c, "form", "declared") for c in self._contenders})
        self._keeps = len(self._contenders) <= _most_sessions(self._kind)
        if self._keeps:
            # Starting a session is mostly waiting, for a compiler and for CUDA. A process ends with
            # the thread that started it, so these threads stay.
            pool = self._stack.enter_context(ThreadPoolExecutor(max(1, settings.threads() // 2)))
            try:
                list(pool.map(self._start, self._contenders))
            except BaseException:
                self._stack.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def round(self, counts: bool = True, progress: Callable[[], object] = lambda: None) -> None:
        """Run a turn of every contender in random order; call `progress` after each. The first
        round warms up and does not count."""
        rng = random.SystemRandom()
        for each in rng.sample(self._contenders, len(self._contenders)):
            own = [timing for (who, _), timing in self.timings.items() if who == each]
            for timing in rng.sample(own, len(own)):
                if not timing.failure:
                    self._take(each, timing, counts)
                progress()
            if not self._keeps:
                self._leave(each)
        for (_, layer), timing in self.timings.items():
            self._doubt(timing, self.timings[self._kind, layer])

    def _doubt(self, timing: Timing, ours: Timing) -> None:
        """Fail a contender that was faster than this machine can be."""
        if not timing.seconds or not ours.seconds:
            return
        least = min(timing.seconds)
        if least < _SUSPICIOUS * ours.median:
            floor = _BELIEVED * floor_seconds(self._kind, timing.problem)
            if least < floor:
                timing.failure = (
                    f"a call took {1e3 * least:.3g} ms; no kernel takes less than "
                    f"{1e3 * floor:.3g} ms on this machine"
                )
                timing.seconds = []

    def _take(self, each: KernelFile | str, timing: Timing, counts: bool) -> None:
        """Run a contender's turn on a problem."""
        try:
            try:
                taken = self._turn_of(each, timing.problem)
            except NeedsProlog:
                self._leave(each)
                taken = self._turn_of(each, timing.problem)
        except (Ended, Ece408Error) as error:
            timing.failure = str(error)
            # Its remaining work must not disturb others.
            self._leave(each)
            return
        if taken is None:
            return
        timing.note = taken.note or timing.note
        if counts:
            timing.seconds += taken.seconds
            timing.around += taken.around

    def _turn_of(self, each: KernelFile | str, problem: ConvProblem) -> Turn | None:
        """Return a contender's turn, or `None` if its process does not start."""
        session = self._sessions.get(each) or self._start(each)
        if session is None:
            return None
        if self._kind == "cpu" and not session.idle:
            session.measure_idle()
        taken = self._turn(session, problem)
        least = max(_TOLD_APART * session.idle, 1e-9)
        taken.seconds = [max(each - session.idle, least) for each in taken.seconds]
        return taken

    def _start(self, each: KernelFile | str) -> Session | None:
        """Return a contender's session; if it does not start, its timings record the reason."""
        session = Session(each, CALL_SECONDS)
        try:
            session.__enter__()
        except (Ended, Ece408Error) as error:
            if not isinstance(each, KernelFile):
                raise
            for (who, _), timing in self.timings.items():
                if who == each:
                    timing.failure = kernel_file.reason(error)
            return None
        self._stack.push(session)
        self._sessions[each] = session
        return session

    def _leave(self, each: KernelFile | str) -> None:
        # Leaving again at the end is harmless.
        if each in self._sessions:
            self._sessions.pop(each).__exit__()


def _most_sessions(kind: str) -> int:
    """Return the number of processes that fit into memory."""
    if kind == "cpu":
        return footprint.available_bytes() // _SESSION_BYTES
    gpu = device.get(settings.devices()[0])
    with gpu.active():
        return gpu.free_bytes() // 2 // _SESSION_GPU_BYTES


def measure(
    contenders: Sequence[KernelFile | str],
    layers: Sequence[tuple[str, ConvProblem]],
    rounds: int,
    progress: Callable[[], object] = lambda: None,
    precision: str = "float32",
) -> list[Timing]:
    """Return the timings of a `Race` of `rounds` rounds, after one to warm up. `progress` is called
    after each turn."""
    with Race(contenders, layers, precision) as race:
        for number in range(rounds + 1):
            race.round(number > 0, progress)
        return list(race.timings.values())


def device_of(contenders: Sequence[KernelFile | str]) -> str:
    """Return the one device of all contenders. Raises `InvalidSetting` if there are two."""
    kinds = {each.device if isinstance(each, KernelFile) else "cuda" for each in contenders}
    if len(kinds) > 1:
        raise InvalidSetting("kernels for the CPU and for CUDA do not race; name those of one kind")
    return kinds.pop()


def names(contenders: Sequence[KernelFile | str]) -> dict[KernelFile | str, str]:
    """Return contenders' names in tables; files of the same name get relative paths."""
    own = [each.name for each in contenders if isinstance(each, KernelFile)]
    found: dict[KernelFile | str, str] = {}
    for each in contenders:
        if not isinstance(each, KernelFile):
            found[each] = OURS if each in ("cpu", "cuda") else each
        else:
            alone = own.count(each.name) == 1
            found[each] = each.name if alone else os.path.relpath(each.path)
    return found


def _cpu_turn(session: Session, problem: ConvProblem, largest_error: float) -> Turn:
    """Run one call on the CPU."""
    rng = np.random.default_rng()
    x, w = (
        rng.random(shape, np.float32) - np.float32(0.5)
        for shape in (problem.x_shape, problem.w_shape)
    )
    y, seconds = session.timed(problem, x, w)
    if np.isnan(y).any():
        raise WrongResult("parts of the output are not written")
    one = dataclasses.replace(problem, batch=1)
    for image in rng.integers(0, len(x), _SAMPLED):
        image_x, image_y = x[image : image + 1], y[image : image + 1]
        expected = oracle.forward(one, image_x, w)
        if beyond(largest_error, one, image_x, w, image_y, expected).any():
            raise WrongResult(f"image {image} is wrong; ece408 lab check says more")
    if _sum_is_wrong(largest_error, problem, x, w, y, rng.choice([-1, 1], len(x))):
        raise WrongResult("some images are wrong; ece408 lab check says more")
    return Turn([seconds])


def _sum_is_wrong(
    largest_error: float,
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    signs: np.ndarray,
) -> bool:
    """Check the sum of all outputs with random signs against the output for the sum of the images:
    one image's work detects a wrong one among any number (after Freivalds, "Probabilistic machines
    can use less running time", 1977). Errors of the outputs add up as random ones do."""
    one = dataclasses.replace(problem, batch=1)
    weights = signs.astype(np.float32)
    summed_x, summed_y = (
        (weights @ each.reshape(len(each), -1)).reshape(1, *each.shape[1:]) for each in (x, y)
    )
    # Of a typical image: that of the sum is smaller, because of the signs.
    magnitudes = oracle.forward(one, abs(x[:1]), abs(w)).mean(axis=(2, 3), keepdims=True)
    error = np.abs(summed_y - oracle.forward(one, summed_x, w))
    return bool((~(error <= largest_error * math.sqrt(len(x)) * magnitudes)).any())
