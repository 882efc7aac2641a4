"""Whether a kernel file is right: on the course's layers, on odd sizes, and as exact as float32.

Every call has numbers of its own, which did not exist before it, and starts with an output full of
NaN. The expected output is computed elsewhere, in this process (`bench.oracle`).
"""

from __future__ import annotations

import dataclasses
import functools
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends import kernel_file
from ..backends.emulator import backend as emulator
from ..backends.emulator import findings
from ..backends.emulator.backend import Emulated
from ..backends.emulator.library import Emulation
from ..backends.kernel_file import KernelFile
from ..bench import oracle
from ..bench.shapes import SHAPES
from ..errors import (
    Ece408Error,
    InvalidProblem,
    KernelCompileFailed,
    NotEnoughMemory,
    NoUsableGpu,
    UnsupportedProblem,
)
from ..problem import ConvProblem
from . import patterns, sanitizer
from .sanitizer import Sanitized
from .session import CALL_SECONDS, Ended, Session

# The layers of the course's network from 2020 on.
_LATER = {"fa20_1": "c1,h86,w86,m4,k7x7", "fa20_2": "c4,h40,w40,m16,k7x7"}
# Images of the course's layers.
_BATCH = {"cpu": 10, "cuda": 25, "emulator": 2}
_ODD_PROBLEMS = 16
# So that sums are exact; in half precision whole numbers are up to 2048.
_LARGEST_INTEGER = {"strict": 8, "float32": 8, "tf32": 8, "float16": 1}
# How far an element may be off, relative to the sum of its products' magnitudes. In float32 it is a
# hundredth of what TF32 or half precision can reach; these round factors by 2 ** -11 each, and half
# precision sums, too.
LARGEST_ERROR = {"strict": 1e-6, "float32": 1e-5, "tf32": 2e-3, "float16": 1e-2}
# The exponents of ten that images and filters are multiplied with.
_MAGNITUDES = {"strict": 3.0, "float32": 3.0, "tf32": 3.0, "float16": 0.0}
# What kernels/emulator prints before it gives up.
_NO_ROOM = "the emulator has no room for"
# Processes that one file may use up, but for one that hangs.
_MOST_STARTS = 6
COURSE, ODD, GIVEN = "course's layers", "odd sizes", "given problems"


@dataclass(frozen=True)
class Failure:
    """What a call of one problem did wrong; `seed` makes its numbers again."""

    problem: str
    seed: int
    text: str
    first: str = ""


@dataclass
class Group:
    """Problems of a kind: how many are right, what is wrong with the others, and how many the
    kernel refuses."""

    name: str
    right: int = 0
    failures: list[Failure] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass
class Verdict:
    """What checking a file found. `error` is the largest relative L2 error on real numbers,
    `sanitized` what compute-sanitizer's tools or the emulator found, if it was asked, `order` the
    emulator's of threads if it was not the usual one. `broken` says why checking stopped, and
    `by_machine` whether that was no fault of the file."""

    file: str
    groups: list[Group] = field(default_factory=list)
    error: float = 0.0
    broken: str = ""
    by_machine: bool = False
    lacking: list[str] = field(default_factory=list)
    sanitized: list[Sanitized] = field(default_factory=list)
    precision: str = "float32"
    order: str = ""

    @property
    def is_right(self) -> bool:
        """Whether nothing was wrong, and something was computed."""
        computed = sum(group.right for group in self.groups)
        clean = all(each.is_clean for each in self.sanitized)
        return (
            bool(computed)
            and clean
            and not self.broken
            and not any(g.failures for g in self.groups)
        )

    def says(self, text: str) -> bool:
        """Whether this is said of what is wrong."""
        failures = [each for group in self.groups for each in group.failures]
        return any(text in said for said in (self.broken, *(each.text for each in failures)))

    @property
    def is_right_for_the_course(self) -> bool:
        """Whether the course's layers were checked, and are right."""
        course = [group for group in self.groups if group.name == COURSE]
        right = [group for group in course if group.right and not group.failures]
        return not self.broken and bool(right)


def check(
    file: KernelFile,
    problems: Sequence[ConvProblem] = (),
    seed: int | None = None,
    progress: Callable[[], object] = lambda: None,
    call_seconds: float = CALL_SECONDS,
    memory: int | None = None,
    layers: Sequence[ConvProblem] = (),
    precision: str = "float32",
    emulation: Emulation | None = None,
) -> Verdict:
    """Check the file on these problems, or, without any, on layers and on odd ones; the layers are
    those of all the course's terms unless others are given. With a `precision` of "tf32" or
    "float16" it need be no more exact.

    With an `emulation` a CUDA file runs without a GPU, and what it does wrong with memory is part
    of the verdict. Without a `seed` numbers and odd sizes are secret. `progress` is called after
    each problem. A call may take `call_seconds`, and the kernel `memory` bytes, as `Session` has
    it. Raises `KernelCompileFailed`, `NoUsableGpu` and other errors that keep the file from being
    run at all.
    """
    seed = secrets.randbits(32) if seed is None else seed
    verdict = Verdict(str(file.path), precision=precision)
    if emulation is not None and emulation.seed is not None:
        verdict.order = "random"
    own = emulator.of_kernel(file, emulation) if emulation else None
    start = functools.partial(Session, file, call_seconds, memory, emulated=own)
    runner = _Runner(file, verdict, start, keep_seed=bool(problems), emulated=own)
    try:
        device = "emulator" if emulation else file.device
        for name, group in groups(problems, seed, device, layers):
            runner.check(Group(name), group, seed, progress)
    except _Exhausted:
        # The problem that met it has it among the failures of its group.
        pass
    except Ended as ended:
        verdict.broken = str(ended)
    except NotEnoughMemory as error:
        verdict.broken, verdict.by_machine = str(error), True
    finally:
        runner.close()
    if emulation and emulation.mode == "checked":
        verdict.sanitized = [sanitizer.of_emulator(runner.findings)]
    return verdict


def groups(
    problems: Sequence[ConvProblem],
    seed: int,
    device: str,
    layers: Sequence[ConvProblem] = (),
) -> list[tuple[str, list[ConvProblem]]]:
    """What `check` checks, in an order that the seed gives."""
    if problems:
        return [(GIVEN, list(problems))]
    rng = random.Random(seed)
    later = [ConvProblem.parse(f"b1,{text}") for text in _LATER.values()]
    course = [
        dataclasses.replace(each, batch=_BATCH[device])
        for each in layers or [*SHAPES.values(), *later]
    ]
    rng.shuffle(course)
    return [(COURSE, course), (ODD, _odd(rng))]


def _odd(rng: random.Random) -> list[ConvProblem]:
    """Small problems whose sizes are no multiples of anything; a quarter has a stride."""
    found: list[ConvProblem] = []
    while len(found) < _ODD_PROBLEMS:
        kernel = rng.randint(1, 7)
        try:
            found.append(
                ConvProblem(
                    batch=rng.randint(1, 7),
                    channels=rng.choice([1, 1, 2, 3, 5, 6, 7, 13]),
                    height=rng.randint(kernel, 45),
                    width=rng.randint(kernel, 45),
                    filters=rng.choice([1, 2, 3, 5, 7, 9, 13, 17, 25]),
                    kernel=(kernel, kernel),
                    stride=(2, 2) if len(found) % 4 == 3 else (1, 1),
                )
            )
        except InvalidProblem:
            continue
    return found


class _Exhausted(Exception):
    """The file has used up its processes."""


class _Runner:
    """Runs one file's problems in sessions: a new one after each that ended."""

    def __init__(
        self,
        file: KernelFile,
        verdict: Verdict,
        start: Callable[[], Session],
        keep_seed: bool,
        emulated: Emulated | None,
    ) -> None:
        self._file, self._verdict = file, verdict
        self._start, self._keep_seed, self._emulated = start, keep_seed, emulated
        self._session: Session | None = None
        self._starts = 0
        # Of the emulator, by what the kernels that they are of were compiled to.
        self.findings: dict[bytes, list[dict[str, Any]]] = {}
        self._before: tuple[ConvProblem, np.ndarray] | None = None
        self._whole = functools.partial(_whole, largest=_LARGEST_INTEGER[verdict.precision])
        self._real = functools.partial(_real, magnitudes=_MAGNITUDES[verdict.precision])

    def close(self) -> None:
        if self._session is not None:
            self._session.__exit__()
            self._session = None

    def _reorder(self, seed: int) -> None:
        """Have the emulator run threads in the order of a seed, if in a random one."""
        if self._emulated is not None and self._verdict.order:
            emulation = dataclasses.replace(self._emulated.emulation, seed=seed)
            self._emulated.emulation = emulation

    def _take_findings(self, problem: ConvProblem) -> None:
        if self._emulated is None or self._session is None:
            return
        try:
            found = findings.accepted(self._session.findings())
        except (Ended, Ece408Error):
            found = findings.left(self._session.scratch)
        if found:
            self.findings.setdefault(self._emulated.content(problem), []).extend(found)

    def check(
        self,
        group: Group,
        problems: Iterable[ConvProblem],
        seed: int,
        progress: Callable[[], object],
    ) -> None:
        """Check problems, each with whole numbers twice and with real ones."""
        self._verdict.groups.append(group)
        for index, problem in enumerate(problems):
            # So that the problem alone, given this seed, has the same numbers.
            own = seed if self._keep_seed else seed + index + 1
            try:
                self._reorder(own)
                failure = self._failure(problem, own)
            except _Exhausted as error:
                group.failures.append(Failure(str(problem), own, str(error)))
                raise
            except UnsupportedProblem as error:
                if self._may_refuse(problem):
                    group.refused.append(str(error))
                    continue
                failure = Failure(str(problem), own, f"it is refused: {error}")
            finally:
                progress()
            self._take_findings(problem)
            if failure is None:
                group.right += 1
            else:
                group.failures.append(failure)

    def _may_refuse(self, problem: ConvProblem) -> bool:
        """Whether a file of this form may have this problem refused: of the course's forms, what
        this process knows to be beyond them. Of others nothing runs that could pretend it."""
        plain = kernel_file.why_not(problem, takes_strides=False) is None
        return self._file.form == "declared" or not plain

    def _failure(self, problem: ConvProblem, seed: int) -> Failure | None:
        rng = np.random.default_rng(seed)
        for numbers in (self._whole, self._whole, self._real):
            x, w = numbers(rng, problem.x_shape), numbers(rng, problem.w_shape)
            try:
                y = self._forward(problem, x, w)
            except (UnsupportedProblem, KernelCompileFailed, NoUsableGpu):
                raise
            except (Ended, Ece408Error) as error:
                self._raise_for_machine(error)
                self._take_findings(problem)
                text = self._cause(problem, x, w, error)
                self.close()
                if isinstance(error, Ended) and error.by_time:
                    # Others would take as long.
                    self._starts = _MOST_STARTS
                return Failure(str(problem), seed, text)
            found = self._compare(problem, seed, x, w, y, exact=numbers is self._whole)
            if found is not None:
                return found
        return None

    def _raise_for_machine(self, error: Exception) -> None:
        """Raise `NotEnoughMemory` where the emulator has no room, which is no fault of the file."""
        if self._emulated is None:
            return
        if isinstance(error, NotEnoughMemory) or _NO_ROOM in str(error):
            raise NotEnoughMemory(
                "the emulator has not enough memory to check this file; free some and try again"
            ) from None

    def _forward(
        self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, margins: str = "closed"
    ) -> np.ndarray:
        if self._session is None:
            if self._starts == _MOST_STARTS:
                raise _Exhausted("its process hung, or ended too often; nothing more was tried")
            self._starts += 1
            self._before = None
            session = self._start()
            session.__enter__()
            self._session = session
            self._verdict.lacking = session.lacking
        return self._session.forward(problem, x, w, margins)

    def _cause(self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, error: Exception) -> str:
        """What is said of a call that failed; where memory was touched, which."""
        if not isinstance(error, Ended) or not error.by_memory:
            return str(error)
        self.close()
        try:
            self._forward(problem, x, w, "open")
            damage = self._session.damage() if self._session else []
        except (Ended, _Exhausted, Ece408Error):
            return str(error)
        return "; ".join(damage) or "reads memory behind or before its arrays"

    def _compare(
        self,
        problem: ConvProblem,
        seed: int,
        x: np.ndarray,
        w: np.ndarray,
        y: np.ndarray,
        exact: bool,
    ) -> Failure | None:
        damage = self._session.damage() if self._session else []
        if damage:
            return Failure(str(problem), seed, "; ".join(damage))
        expected = oracle.forward(problem, x, w)
        if exact:
            wrong = y != expected
        else:
            wrong = beyond(LARGEST_ERROR[self._verdict.precision], problem, x, w, y, expected)
            error = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
            self._verdict.error = max(self._verdict.error, error)
        last, self._before = self._before, (problem, y)
        if not wrong.any():
            return None
        before = last[1] if last is not None and last[0] == problem else None
        if exact or np.isnan(y).any():
            text = patterns.describe(problem, x, w, y, expected, wrong, before)
        else:
            text = (
                f"whole numbers are exact, real ones are off by {error:.1e} (relative L2), more "
                f"than {self._verdict.precision} is"
            )
            if self._verdict.precision == "float32":
                text += ": half precision or TF32? --precision float16 or tf32 allows that"
        index = tuple(int(each) for each in np.argwhere(wrong)[0])
        return Failure(
            str(problem),
            seed,
            f"{np.count_nonzero(wrong)} of {wrong.size} elements are wrong: {text}",
            "image {}, filter {}, row {}, column {}".format(*index)
            + f": {y[index]:g} instead of {expected[index]:g}",
        )


def beyond(
    largest_error: float,
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    expected: np.ndarray,
) -> np.ndarray:
    """Which elements of y, from real numbers, are off by more than that, relative to the sum of
    their products' magnitudes, or NaN: a mask in y's shape."""
    magnitudes = oracle.forward(problem, abs(x), abs(w))
    return ~(np.abs(y - expected) <= largest_error * magnitudes)


def _whole(rng: np.random.Generator, shape: tuple[int, ...], largest: int) -> np.ndarray:
    return rng.integers(-largest, largest + 1, shape).astype(np.float32)


def _real(rng: np.random.Generator, shape: tuple[int, ...], magnitudes: float) -> np.ndarray:
    """Normally distributed numbers, each image or filter at a magnitude of its own."""
    scale = 10.0 ** rng.uniform(-magnitudes, magnitudes, (shape[0], 1, 1, 1))
    return (scale * rng.standard_normal(shape)).astype(np.float32)
