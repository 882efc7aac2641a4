"""Whether a kernel file is right: on the layers of its terms, and as exact as float32; what it does
on other layers and on odd sizes is told.

Every call has numbers of its own, which did not exist before it, and starts with an output full of
NaN. The expected output is computed elsewhere, in this process (`bench.oracle`).
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
from ..problem import PRECISIONS, ConvProblem
from . import patterns, sanitizer
from .sanitizer import Finding, Sanitized
from .session import CALL_SECONDS, Ended, Session

# The terms whose files have a form of the course, and what they are called.
_TERMS = {
    "course_2019": {term: term for term in shapes.TERMS if term != shapes.LAST},
    "course_2020": {shapes.LAST: f"{shapes.LAST} and later"},
}
# Images of the course's layers; and, of a file that leaves images out then, as one does that has
# streams compute a part of a batch each, as many as are affordable.
_BATCH = {"cpu": 10, "cuda": 25, "emulator": 2}
_LARGER = {"cuda": 100, "emulator": 20}
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
_OTHERS = "other layers"
# What the emulator finds of a launch of no blocks, and of a copy to a variable.
_NO_BLOCKS = re.compile(r"launches .* with \((0,\d+,\d+|\d+,0,\d+|\d+,\d+,0)\) blocks")
_COPY = re.compile(r"copies (\d+) bytes to or from (\w+), which has (\d+)")


@dataclass(frozen=True)
class Failure:
    """What a call of one problem did wrong; `seed` makes its numbers again. `short` says it in few
    words, where a constant array has too little room. `near` says that half precision may be as far
    off, `absent` that whole images are not written, or a launch has no blocks."""

    problem: str
    seed: int
    text: str
    first: str = ""
    short: str = ""
    near: bool = False
    absent: bool = False


@dataclass
class Group:
    """Problems of a kind: how many are right, what is wrong with the others, how many the kernel
    refuses, what it did wrong with memory in the emulator, and what else is to be said.

    Of groups with a `term` one that is right is enough; what is `told` does not count.
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
    """What checking a file found. `error` is the largest relative L2 error on real numbers,
    `sanitized` what compute-sanitizer's tools or the emulator found, if it was asked, `order` the
    emulator's of threads if it was not the usual one, `allowed_by` the precision by which a file is
    right that is wrong by the one asked for. `broken` says why checking stopped, and
    `by_machine` the name of the error if that was no fault of the file."""

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
        """Whether nothing is wrong that counts, and something was computed."""
        return self.has_right_results and all(each.is_clean for each in self.sanitized)

    @property
    def has_right_results(self) -> bool:
        """`is_right`, but for what was done wrong with memory."""
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
        """What is wrong, and does not count if the verdict is that the file is right."""
        return [g for g in self.groups if (g.told or g.term) and (g.failures or g.mistakes)]

    @property
    def is_right_for_the_course(self) -> bool:
        """Whether all of the course's layers were checked, and are right."""
        course = [group for group in self.groups if group.name == COURSE]
        return not self.broken and any(group.right and not group.failures for group in course)

    def says(self, text: str) -> bool:
        """Whether this is said of what is wrong."""
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
    """Check the file on these problems, or, without any, on what `groups` has. With a `precision`
    of "tf32" or "float16" it need be no more exact.

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
        verdict.allowed_by = _precision_that_allows(
            [ConvProblem.parse(each.problem) for each in failures],
            precision,
            functools.partial(
                check,
                file,
                seed=seed,
                call_seconds=call_seconds,
                memory=memory,
                emulation=emulation,
            ),
        )
    if emulation and emulation.mode == "checked":
        verdict.sanitized = [sanitizer.of_emulator(runner.findings_that_count())]
    return verdict


def _precision_that_allows(
    problems: Sequence[ConvProblem], precision: str, checked: Callable[..., Verdict]
) -> str:
    """The precision after this one by which these problems are right; empty if there is none."""
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
    """What `check` checks a file of a form on: these problems; or the layers, a term's if it is
    named, else of each term that has such files, and odd ones, in an order that the seed gives.
    Raises `UnknownModel` for a term."""
    if problems:
        return [(Group(GIVEN), list(problems))]
    rng = random.Random(seed)

    def shuffled(found: Iterable[ConvProblem]) -> list[ConvProblem]:
        at_batch = [dataclasses.replace(each, batch=_BATCH[device]) for each in found]
        rng.shuffle(at_batch)
        return at_batch

    known = [*shapes.SHAPES.values(), *shapes.LATER.values()]
    if layers:
        asked = [(Group(COURSE), shuffled(layers))]
    else:
        terms = {term: term} if term else _TERMS.get(form, {})
        asked = [
            (Group(f"layers of {said}", term=said), shuffled(shapes.of_term(each).values()))
            for each, said in terms.items()
        ]
        own = {each for name in terms for each in shapes.of_term(name).values()}
        others = shuffled(each for each in known if each not in own)
        if not term:
            asked.append((Group(_OTHERS, told=True) if asked else Group(COURSE), others))
    # Files of this package's own form say for which sizes they are.
    is_told = form != "declared" or bool(layers or term)
    return [*asked, (Group(ODD, told=is_told), _odd(rng))]


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


_Findings = dict[bytes, list[dict[str, Any]]]


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
        # Of the emulator, of each group by what the kernels that they are of were compiled to.
        self._findings: list[tuple[Group, _Findings]] = []
        # Those of the problem that is checked.
        self._found: list[dict[str, Any]] = []
        # Of the course's layers, once it is known that the file needs more.
        self._batch = 0
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

    def findings_that_count(self) -> _Findings:
        """Of terms those of the ones for which the file is right, if there are any."""
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
        """Check problems, each with whole numbers twice and with real ones; whether to go on with
        other groups."""
        self._verdict.groups.append(group)
        if group.term:
            # That it ends on another term's layers says nothing of these.
            self._starts = 0
        taken: _Findings = {}
        self._findings.append((group, taken))
        try:
            for index, problem in enumerate(problems):
                # So that the problem alone, given this seed, has the same numbers.
                own = seed if self._keep_seed else seed + index + 1
                try:
                    self._check(group, problem, own)
                finally:
                    progress()
                    if self._emulated is not None and self._found:
                        taken.setdefault(self._emulated.content(problem), []).extend(self._found)
        except _Exhausted:
            # The problem that met it has it among the failures of its group.
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
        """`_failure`, of a layer of the course at as many images as the file needs."""
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
            # More images do not help: the others have as few.
            self._batch = problem.batch
        return failure

    def _at_batch(self, problem: ConvProblem) -> ConvProblem:
        return dataclasses.replace(problem, batch=self._batch or problem.batch)

    def _may_refuse(self, problem: ConvProblem) -> bool:
        """Whether a file of this form may have this problem refused: of the course's forms, what
        this process knows to be beyond them. Of others nothing runs that could pretend it."""
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
                self.close()
                if isinstance(error, Ended) and error.by_time:
                    # Others would take as long.
                    self._starts = _MOST_STARTS
                absent = bool(_NO_BLOCKS.search(text))
                return Failure(str(problem), seed, text, short=short, absent=absent)
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

    def _cause(
        self, problem: ConvProblem, x: np.ndarray, w: np.ndarray, error: Exception
    ) -> tuple[str, str]:
        """What is said of a call that failed: the CUDA call that did, if the emulator knows it;
        where memory was touched, which; and a constant array that is too small in few words."""
        said = str(error).removeprefix(f"kernel file {self._file.path}: ")
        said = said.removesuffix(f" ({problem})")
        if self._emulated is not None and self._found:
            last = findings.ending(self._found, self._emulated.content(problem))
            if last is not None:
                return f"{last.place}: {last.title}", _too_small(last.text, problem)
        if not isinstance(error, Ended) or not error.by_memory:
            return said, ""
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
    """Of a copy that found too little room, what that means to a layer."""
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
