"""Correctness check of a kernel file: on the layers of its terms, at float32 accuracy. Results for
other layers and odd sizes are reported, too.

Every call has fresh random numbers, and an output filled with NaN. This process computes the
expected output (`bench.oracle`).
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..backends import kernel_file
from ..backends.emulator import emulator_backend as emulator
from ..backends.emulator import findings
from ..backends.emulator.emulator_backend import Emulated
from ..backends.emulator.library import Emulation
from ..backends.kernel_file import KernelFile
from ..bench import oracle, shapes
from ..errors import (
    Ece408Error,
    InvalidProblem,
    KernelCompileFailed,
    KernelNotSupported,
    NotEnoughMemory,
    NoUsableGpu,
    UnsupportedProblem,
)
from ..problem import LARGEST_ERRORS, PRECISIONS, ConvProblem
from . import patterns, sanitizer
from .sanitizer import Finding, Sanitized
from .session import CALL_SECONDS, Ended, Session

# Names of the terms whose files have each form of the course.
_TERMS = {
    "course_2019": {term: term for term in shapes.TERMS if term != shapes.LAST},
    "course_2020": {shapes.LAST: f"{shapes.LAST} and later"},
}
# Images for the course's layers. A file that omits images of a small batch, such as one that
# splits it over streams, is judged with as many as are affordable.
_BATCH = {"cpu": 10, "cuda": 25, "emulator": 2}
_LARGER = {"cuda": 100, "emulator": 20}
_ODD_PROBLEMS = 16
# Sums of integers up to this size are exact; half precision represents integers up to 2048.
_LARGEST_INTEGER = {"strict": 8, "float32": 8, "tf32": 8, "float16": 1}
# Maximum error of an element, relative to the sum of its products' magnitudes. A file may truncate
# factors to TF32, where our kernels round.
LARGEST_ERROR = {**LARGEST_ERRORS, "tf32": 2e-3}
# Images and filters are scaled by up to this power of ten.
_MAGNITUDES = {"strict": 3.0, "float32": 3.0, "tf32": 3.0, "float16": 0.0}
# Message of kernels/emulator before it gives up.
_NO_ROOM = "the emulator has no room for"
# Maximum number of processes per file; a hang counts more.
_MOST_STARTS = 6
COURSE, ODD, GIVEN = "course's layers", "odd sizes", "given problems"
_OTHERS = "other layers"
# The emulator's findings for an empty launch, and for a copy to a variable.
_NO_BLOCKS = re.compile(r"launches .* with \((0,\d+,\d+|\d+,0,\d+|\d+,\d+,0)\) blocks")
_COPY = re.compile(r"copies (\d+) bytes to or from (\w+), which has (\d+)")


@dataclass(frozen=True)
class Failure:
    """A failed call on a problem; `seed` reproduces its numbers. `short` is a short description if
    a constant array is too small. `near` says that the error is within half precision's, `absent`
    that whole images are missing or a launch has no blocks."""

    problem: str
    seed: int
    text: str
    first: str = ""
    short: str = ""
    near: bool = False
    absent: bool = False


@dataclass
class Group:
    """Problems of a kind: the number of right ones, failures, refusals, the emulator's findings,
    and notes.

    In groups with a `term` one right group is enough; groups that are `told` do not count.
    """

    name: str
    right: int = 0
    failures: list[Failure] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    mistakes: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    term: str = ""
    told: bool = False

    @property
    def is_right(self) -> bool:
        return bool(self.right) and not self.failures and not self.mistakes


@dataclass
class Verdict:
    """Result of checking a file. `error` is the largest relative L2 error on real numbers;
    `sanitized` the findings of compute-sanitizer's tools or the emulator, if requested; `order` the
    emulator's thread order if not the usual one; `allowed_by` the lower precision at which a wrong
    file is right. `broken` says why checking stopped; `by_machine` is the name of the error if the
    file did not cause it."""

    file: str
    groups: list[Group] = field(default_factory=list)
    error: float = 0.0
    broken: str = ""
    by_machine: str = ""
    lacking: list[str] = field(default_factory=list)
    sanitized: list[Sanitized] = field(default_factory=list)
    precision: str = "float32"
    order: str = ""
    allowed_by: str = ""

    @property
    def is_right(self) -> bool:
        """Return whether something was computed and no error counts."""
        return self.has_right_results and all(each.is_clean for each in self.sanitized)

    @property
    def has_right_results(self) -> bool:
        """As `is_right`, ignoring memory errors."""
        needed = [group for group in self.groups if not group.term and not group.told]
        terms = [group for group in self.groups if group.term]
        return (
            not self.broken
            and any(group.right for group in [*needed, *terms])
            and not any(group.failures for group in needed)
            and (not terms or any(group.right and not group.failures for group in terms))
        )

    @property
    def elsewhere(self) -> list[Group]:
        """Return the groups with errors that do not count for a file that is right."""
        return [g for g in self.groups if (g.told or g.term) and (g.failures or g.mistakes)]

    @property
    def is_right_for_the_course(self) -> bool:
        """Return whether all of the course's layers were checked and are right."""
        course = [group for group in self.groups if group.name == COURSE]
        return not self.broken and any(group.right and not group.failures for group in course)

    def says(self, text: str) -> bool:
        """Return whether this text is among the errors."""
        failures = [each for group in self.groups for each in group.failures]
        return any(text in said for said in (self.broken, *(each.text for each in failures)))


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
    term: str = "",
) -> Verdict:
    """Check the file on these problems, or by default on those in `groups`. `precision` "tf32" or
    "float16" is sufficient accuracy.

    With an `emulation` a CUDA file runs without a GPU, and its memory errors are part of the
    verdict. Without a `seed` numbers and odd sizes are secret. `progress` is called after each
    problem. A call may take `call_seconds`, and the kernel `memory` bytes, as for `Session`. Raises
    `KernelCompileFailed`, `NoUsableGpu` and other errors that prevent the file from running at all.
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
        for group, own_problems in groups(file.form, problems, seed, device, layers, term):
            if not runner.check(group, own_problems, seed, progress):
                break
    except Ended as ended:
        verdict.broken = str(ended)
    except NotEnoughMemory as error:
        verdict.broken, verdict.by_machine = str(error), type(error).__name__
    finally:
        runner.close()
    failures = [each for group in verdict.groups if not group.told for each in group.failures]
    if not verdict.is_right and failures and all(each.near for each in failures):
        given = {"call_seconds": call_seconds, "memory": memory, "emulation": emulation}
        again = functools.partial(check, file, seed=seed, **given)  # type: ignore[arg-type]
        wrong = [ConvProblem.parse(each.problem) for each in failures]
        verdict.allowed_by = _precision_that_allows(wrong, precision, again)
    if emulation and emulation.mode == "checked":
        verdict.sanitized = [sanitizer.of_emulator(runner.findings_that_count())]
    return verdict


def _precision_that_allows(
    problems: Sequence[ConvProblem], precision: str, checked: Callable[..., Verdict]
) -> str:
    """Return the highest lower precision at which these problems are right, or an empty string."""
    less = PRECISIONS[PRECISIONS.index(precision) + 1 :]
    if not less:
        return ""
    found = checked(problems=problems, precision=less[0])
    return less[0] if found.is_right else found.allowed_by


def groups(
    form: str,
    problems: Sequence[ConvProblem],
    seed: int,
    device: str,
    layers: Sequence[ConvProblem] = (),
    term: str = "",
) -> list[tuple[Group, list[ConvProblem]]]:
    """Return the problems on which `check` checks a file of a form: these problems; or the given
    layers, or a term's, else those of each term with such files, and odd ones, in an order that
    depends on the seed. Raises `UnknownModel` for an unknown term."""
    if problems:
        return [(Group(GIVEN), list(problems))]
    rng = random.Random(seed)

    def shuffled(found: Iterable[ConvProblem]) -> list[ConvProblem]:
        at_batch = [dataclasses.replace(each, batch=_BATCH[device]) for each in found]
        rng.shuffle(at_batch)
        return at_batch

    known = [*shapes.SHAPES.values(), *shapes.LATER.values()]
    if layers:
        selected = [(Group(COURSE), shuffled(layers))]
    else:
        terms = {term: term} if term else _TERMS.get(form, {})
        selected = [
            (Group(f"layers of {said}", term=said), shuffled(shapes.of_term(each).values()))
            for each, said in terms.items()
        ]
        own = {each for name in terms for each in shapes.of_term(name).values()}
        others = shuffled(each for each in known if each not in own)
        if not term:
            selected.append((Group(_OTHERS, told=True) if selected else Group(COURSE), others))
    # Files in this package's own form declare their sizes.
    is_told = form != "declared" or bool(layers or term)
    return [*selected, (Group(ODD, told=is_told), _odd(rng))]


def _odd(rng: random.Random) -> list[ConvProblem]:
    """Return small problems with odd sizes; a quarter has a stride."""
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
    """The file has used its maximum number of processes."""


_Findings = dict[bytes, list[dict[str, Any]]]


class _Runner:
    """Runs one file's problems in sessions; a new one starts after each that ended."""

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
        # The emulator's findings per group, by the library of their kernels.
        self._findings: list[tuple[Group, _Findings]] = []
        # Findings of the current problem.
        self._found: list[dict[str, Any]] = []
        # Batch size for the course's layers, once the file is known to need more images.
        self._batch = 0
        self._before: tuple[ConvProblem, np.ndarray] | None = None
        self._whole = functools.partial(_whole, largest=_LARGEST_INTEGER[verdict.precision])
        self._real = functools.partial(_real, magnitudes=_MAGNITUDES[verdict.precision])

    def close(self) -> None:
        if self._session is not None:
            self._session.__exit__()
            self._session = None

    def _reorder(self, seed: int) -> None:
        """Make the emulator use the thread order of a seed, if it is to be random."""
        if self._emulated is not None and self._verdict.order:
            emulation = dataclasses.replace(self._emulated.emulation, seed=seed)
            self._emulated.emulation = emulation

    def findings_that_count(self) -> _Findings:
        """Return the findings that count: if the file is right for some terms, only those of these
        terms."""
        counting = [each for each in self._findings if not each[0].told]
        right = [each for each in counting if each[0].is_right or not each[0].term]
        if any(group.is_right for group, _ in counting):
            counting = right
        merged: _Findings = {}
        for _, found in counting:
            for content, told in found.items():
                merged.setdefault(content, []).extend(told)
        return merged

    def _take_findings(self) -> None:
        if self._emulated is not None and self._session is not None:
            self._found += sanitizer.told(self._session)

    def check(
        self,
        group: Group,
        problems: Iterable[ConvProblem],
        seed: int,
        progress: Callable[[], object],
    ) -> bool:
        """Check problems, each with integers twice and with real numbers; return whether to check
        other groups."""
        self._verdict.groups.append(group)
        if group.term:
            # Its end on another term's layers does not affect these.
            self._starts = 0
        taken: _Findings = {}
        self._findings.append((group, taken))
        try:
            for index, problem in enumerate(problems):
                # The problem alone, with this seed, reproduces the same numbers.
                own = seed if self._keep_seed else seed + index + 1
                try:
                    self._check(group, problem, own)
                finally:
                    progress()
                    if self._emulated is not None and self._found:
                        taken.setdefault(self._emulated.content(problem), []).extend(self._found)
        except _Exhausted:
            # The problem's group records the failure.
            return bool(group.term)
        finally:
            found = sanitizer.of_emulator(taken).findings
            group.mistakes = [each for each in found if not each.warning]
        return True

    def _check(self, group: Group, problem: ConvProblem, seed: int) -> None:
        try:
            self._reorder(seed)
            failure = self._judged(group, problem, seed)
        except (_Exhausted, NotEnoughMemory) as error:
            if isinstance(error, NotEnoughMemory) and not group.told:
                raise
            group.failures.append(Failure(str(problem), seed, str(error)))
            raise _Exhausted from None
        except UnsupportedProblem as error:
            if self._may_refuse(problem):
                group.refused.append(str(error))
                return
            failure = Failure(str(problem), seed, f"it is refused: {error}")
        self._take_findings()
        if failure is None:
            group.right += 1
        else:
            group.failures.append(failure)

    def _judged(self, group: Group, problem: ConvProblem, seed: int) -> Failure | None:
        """As `_failure`, with the number of images that the file needs for a layer of the
        course."""
        if group.name in (GIVEN, ODD) or self._file.form == "declared":
            return self._failure(problem, seed)
        first = failure = self._failure(self._at_batch(problem), seed)
        if first is None or not first.absent or self._batch or self._file.device == "cpu":
            return failure
        self._batch = _LARGER["emulator" if self._emulated else "cuda"]
        failure = self._failure(self._at_batch(problem), seed)
        if failure is None:
            what = first.text.rpartition(" elements are wrong: ")[2]
            group.notes.append(f"judged with {self._batch} images; with {problem.batch}: {what}")
        elif failure.absent:
            # More images do not help; the other layers use the usual number.
            self._batch = problem.batch
        return failure

    def _at_batch(self, problem: ConvProblem) -> ConvProblem:
        return dataclasses.replace(problem, batch=self._batch or problem.batch)

    def _may_refuse(self, problem: ConvProblem) -> bool:
        """Return whether a file of this form may refuse the problem: for the course's forms this
        process knows their limits. For other forms no code of the file runs that could fake a
        refusal."""
        plain = kernel_file.why_not(problem, takes_strides=False) is None
        return self._file.form == "declared" or not plain

    def _failure(self, problem: ConvProblem, seed: int) -> Failure | None:
        self._found = []
        rng = np.random.default_rng(seed)
        for numbers in (self._whole, self._whole, self._real):
            x, w = numbers(rng, problem.x_shape), numbers(rng, problem.w_shape)
            try:
                y = self._forward(problem, x, w)
            except (UnsupportedProblem, KernelCompileFailed, KernelNotSupported, NoUsableGpu):
                raise
            except (Ended, Ece408Error) as error:
                self._raise_for_machine(error)
                self._take_findings()
                text, short = self._cause(problem, x, w, error)
                if isinstance(error, Ended) or not short:
                    self.close()
                if isinstance(error, Ended) and error.by_time:
                    # Others would also hang.
                    self._starts = _MOST_STARTS
                absent = bool(_NO_BLOCKS.search(text))
                return Failure(str(problem), seed, text, short=short, absent=absent)
            found = self._compare(problem, seed, x, w, y, exact=numbers is self._whole)
            if found is not None:
                return found
        return None

    def _raise_for_machine(self, error: Exception) -> None:
        """Raise `NotEnoughMemory` if the emulator has no memory left; the file is not to blame."""
        if self._emulated is None:
            return
        if isinstance(error, NotEnoughMemory) or _NO_ROOM in str(error):
            raise NotEnoughMemory(
                "the emulator lacks memory to check this file; free some and try again"
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

    def _cause(
        self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, error: Exception
    ) -> tuple[str, str]:
        """Return descriptions of a failed call: the failing CUDA call, if the emulator knows it;
        the memory accessed; and a short one for a constant array that is too small."""
        said = str(error).removeprefix(f"kernel file {self._file.path}: ")
        said = said.removesuffix(f" ({problem})")
        if self._emulated is not None and self._found:
            last = findings.ending(self._found, self._emulated.content(problem))
            if last is not None:
                return f"{last.place}: {last.title}", _too_small(last.text, problem)
        if not isinstance(error, Ended) or not error.by_memory:
            return said, _too_small(said, problem)
        self.close()
        try:
            self._forward(problem, x, w, "open")
            damage = self._session.damage() if self._session else []
        except (Ended, _Exhausted, Ece408Error):
            return said, ""
        return "; ".join(damage) or "reads memory behind or before its arrays", ""

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
        index = tuple(int(each) for each in np.argwhere(wrong)[0])
        return Failure(
            str(problem),
            seed,
            f"{np.count_nonzero(wrong)} of {wrong.size} elements are wrong: {text}",
            "image {}, filter {}, row {}, column {}".format(*index)
            + f": {y[index]:g} instead of {expected[index]:g}",
            near=not beyond(LARGEST_ERROR["float16"], problem, x, w, y, expected).any(),
            absent=bool(np.isnan(y).all(axis=(1, 2, 3)).any()),
        )


def _too_small(text: str, problem: ConvProblem) -> str:
    """Describe a copy to a variable that is too small, in terms of a layer."""
    copy = _COPY.search(text)
    weights = int(np.prod(problem.w_shape))
    if copy is None or int(copy[1]) != 4 * weights:
        return ""
    layer = shapes.called(problem)
    return f"its constant {copy[2]} holds {int(copy[3]) // 4} weights, {layer} has {weights}"


def beyond(
    largest_error: float,
    problem: ConvProblem,
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    expected: np.ndarray,
) -> np.ndarray:
    """Return a mask of the elements of y, from real numbers, whose error exceeds the limit relative
    to the sum of their products' magnitudes, or that are NaN."""
    magnitudes = oracle.forward(problem, abs(x), abs(w))
    return ~(np.abs(y - expected) <= largest_error * magnitudes)


def _whole(rng: np.random.Generator, shape: tuple[int, ...], largest: int) -> np.ndarray:
    return rng.integers(-largest, largest + 1, shape).astype(np.float32)


def _real(rng: np.random.Generator, shape: tuple[int, ...], magnitudes: float) -> np.ndarray:
    """Return normally distributed numbers, with a random magnitude for each image or filter."""
    scale = 10.0 ** rng.uniform(-magnitudes, magnitudes, (shape[0], 1, 1, 1))
    return (scale * rng.standard_normal(shape)).astype(np.float32)
