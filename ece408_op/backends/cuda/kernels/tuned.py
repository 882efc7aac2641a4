"""Which kernel, with which tiles, was measured to be the best for a problem on a GPU.

What `ece408 tune` measures is kept in the cache, one file for each GPU; results for some GPUs
come with the package. A call looks here and never measures anything itself: a problem without
results runs by the catalog's rules. Results are advice: all that they can name computes
the same, and what no longer exists is passed over.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .... import settings
from ....errors import Ece408Error
from ....files.cachedir import atomic_path, ensure_folder, locked
from ....files.resources import kernels_dir
from ....problem import ConvProblem
from ....version import __version__
from ... import kernel_file
from ..kernel_plan import Capability, Kernel, Layout, Target, Tunables
from . import catalog

# What is best for a batch says little of one that is more than this many times as large.
_FARTHEST = 4
# GPUs that take each other's shipped results where there are none of their own; names of files.
_ALIKE = re.compile(r"nvidia-(h100|h200|h800|gh200)\b")
_COMMENT = re.compile(r"//[^\n]*")
_log = logging.getLogger("ece408_op")


@dataclass(frozen=True)
class Choice:
    """A kernel, with the layout that it thinks best unless another one is given."""

    kernel: Kernel
    layout: Layout | None = None

    @property
    def tunables(self) -> Tunables:
        """The layout's, if one is given."""
        return () if self.layout is None else self.layout.tunables

    def __str__(self) -> str:
        return " ".join([self.kernel.name, *(f"{name}={value}" for name, value in self.tunables)])


@dataclass(frozen=True)
class Result:
    """What was best for a direction of a problem among all that are at least as exact as
    `precision`: a kernel's name and tunables, its median milliseconds, and how many candidates
    there were. Of a user's file it is the best among the file's own tunables, and `kernel` is what
    `identity` gives."""

    problem: ConvProblem
    precision: str
    kernel: str
    tunables: Tunables
    ms: float
    candidates: int
    direction: str = "forward"

    def document(self) -> dict[str, Any]:
        """For JSON; `_result` reads it."""
        content = {**vars(self), "problem": str(self.problem), "tunables": dict(self.tunables)}
        return {**content, "ms": round(self.ms, 4)}


def best(problem: ConvProblem, gpu: Target, precision: str, direction: str = "forward") -> Choice:
    """The kernel and tunables for a direction, as the catalog names them, at least as exact as
    `precision`.

    They are those of the results for the same layer at the batch nearest to the problem's, at most
    four times as large or as small: from the cache, else from the package, else as
    `catalog.default` has it. Files are read once in the life of a process, and again after it has
    written some. Raises `UnsupportedProblem` on a GPU that no kernel has code for.
    """
    return _best(problem, gpu.name, gpu.capability, gpu.driver, precision, direction)


@functools.lru_cache(maxsize=4096)
def _best(
    problem: ConvProblem,
    name: str,
    capability: Capability,
    driver: int,
    precision: str,
    direction: str,
) -> Choice:
    own = _kept(_file(_folder(), name), name, capability, driver)
    for results in (own, *_shipped(name)):
        for result in _nearest(results, problem, _FARTHEST):
            if (result.precision, result.direction) != (precision, direction):
                continue
            choice = _choice(result, problem, capability)
            if choice is not None:
                return choice
    return Choice(catalog.default(problem, direction, capability, precision))


# Asked for in every call of a user's file. A file of another text is another kernel.
@functools.lru_cache(maxsize=64)
def identity(kernel: Kernel) -> str:
    """A kernel's name in results; a user's file is told from others by its text."""
    if not Path(kernel.source).is_absolute():
        return kernel.name
    return f"{kernel.name}@{kernel_file.find(kernel.source).key}"


def layout_of(kernel: Kernel, problem: ConvProblem, gpu: Target) -> Layout | None:
    """The layout of a user's file that the cache has as the best for the same layer, at the batch
    nearest to the problem's; `None` without one."""
    of_gpu = (gpu.name, gpu.capability, gpu.driver)
    return _layout_of(identity(kernel), kernel, problem, *of_gpu)


@functools.lru_cache(maxsize=4096)
def _layout_of(
    owner: str,
    kernel: Kernel,
    problem: ConvProblem,
    name: str,
    capability: Capability,
    driver: int,
) -> Layout | None:
    results = _kept(_file(_folder(), name), name, capability, driver)
    for result in _nearest(results, problem):
        if result.kernel != owner:
            continue
        choice = _with_tunables(kernel, result, problem, capability)
        if choice is not None:
            return choice.layout
    return None


def kept(
    problem: ConvProblem,
    gpu: Target,
    precision: str,
    kernel: Kernel | None = None,
    direction: str = "forward",
    path: Path | None = None,
) -> Result | None:
    """What the cache, or the file at `path`, has for exactly this problem, its bias aside; of a
    user's file if one is given."""
    wanted = (problem.batch, precision, direction)
    results = _kept(path or file(gpu), gpu.name, gpu.capability, gpu.driver)
    for each in results.get(_layer(problem), ()):
        of_same = each.kernel == identity(kernel) if kernel else not _owner(each)
        if of_same and (each.problem.batch, each.precision, each.direction) == wanted:
            return each
    return None


def _owner(result: Result) -> str:
    """The name of the file that a result is of, or nothing."""
    name, at, _ = result.kernel.partition("@")
    return name if at else ""


def file(gpu: Target) -> Path:
    """Where the cache has the results for this GPU; not necessarily there yet."""
    return _file(_folder(), gpu.name)


def _folder() -> Path:
    return settings.cache() / "cuda-tuning"


def _file(folder: Path, name: str) -> Path:
    """The file for GPUs of this name."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return folder / f"{slug}.json"


def save(results: Iterable[Result], gpu: Target, path: Path | None = None) -> Path:
    """Add results to those in the file, in the place of older ones of the same problems.

    Other processes may do so at the same time. `path` is that of the GPU's own file in the cache
    unless given. Results in it that are out of date are dropped. Raises `CacheUnwritable`.
    """
    path = path or file(gpu)
    with locked(ensure_folder(path.parent), "write results of tuning"):
        old = _read(path, _about(gpu.name, gpu.capability, gpu.driver))
        merged = {
            (_owner(each), each.problem, each.precision, each.direction): each
            for each in [*old, *results]
        }
        content = {
            **_about(gpu.name, gpu.capability, gpu.driver),
            "results": [each.document() for each in merged.values()],
        }
        with atomic_path(path) as temporary:
            temporary.write_text(_text({"sha256": _sum(content), **content}), encoding="utf-8")
    forget()
    return path


def forget() -> None:
    """Read the files again when they are next needed."""
    for function in (_best, _layout_of, _kept, _shipped):
        function.cache_clear()


def _sum(content: dict[str, Any]) -> str:
    """The checksum that is in a file with this content besides."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _text(content: dict[str, Any]) -> str:
    """JSON with a line for each result."""
    lines = ",\n".join(f"    {json.dumps(each)}" for each in content["results"])
    head = json.dumps({**content, "results": []}, indent=2)
    return head.replace('"results": []', f'"results": [\n{lines}\n  ]') + "\n"


# By layer: networks have hundreds, and each is looked for.
_Results = dict[ConvProblem, list[Result]]


@functools.lru_cache(maxsize=16)
def _kept(path: Path, name: str, capability: Capability, driver: int) -> _Results:
    return _by_layer(_read(path, _about(name, capability, driver)))


@functools.lru_cache(maxsize=16)
def _shipped(name: str) -> list[_Results]:
    """What comes with the package for GPUs of this name, and then for those that are alike."""
    folder = kernels_dir() / "tuned"
    own = _file(folder, name)
    others = folder.glob("*.json") if _ALIKE.match(own.name) else ()
    paths = [own, *sorted(path for path in others if path != own and _ALIKE.match(path.name))]
    # They stay of use when a kernel or the driver changes a little.
    return [_by_layer(_read(path, {})) for path in paths]


def _by_layer(results: Iterable[Result]) -> _Results:
    found: _Results = {}
    for each in results:
        found.setdefault(_layer(each.problem), []).append(each)
    return found


def _layer(problem: ConvProblem) -> ConvProblem:
    """What results of the same layer have in common; batch and bias may differ."""
    return dataclasses.replace(problem, batch=1, bias=False)


def _nearest(results: _Results, problem: ConvProblem, farthest: float = math.inf) -> list[Result]:
    """Those of the problem's layer, of the nearest batch first, and of none that is more than
    `farthest` times as large or as small."""

    def distance(each: Result) -> float:
        return abs(math.log(each.problem.batch / problem.batch))

    near = (
        each
        for each in results.get(_layer(problem), ())
        if distance(each) <= math.log(farthest) + 1e-9
    )
    return sorted(near, key=distance)


def _read(path: Path, about: dict[str, Any]) -> list[Result]:
    """The results in a file that is about this, with a word where it cannot be used."""
    if not path.is_file():
        return []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        different = [key for key, value in about.items() if document[key] != value]
        if different:
            _log.warning(
                "ece408: the results of tuning in %s are not used: they are of another %s; "
                "`ece408 tune` measures again",
                path,
                " and ".join(different),
            )
            return []
        results = [_result(each) for each in document["results"]]
        if document.pop("sha256") != _sum(document):
            raise ValueError("its content is not that of its checksum")
        return results
    except (OSError, ValueError, TypeError, KeyError, AttributeError, Ece408Error) as error:
        _log.warning(
            "ece408: the results of tuning in %s are not used: they cannot be read (%s); remove "
            "the file, `ece408 tune` writes it again",
            path,
            " ".join(f"{type(error).__name__}: {error}".split()),
        )
        return []


def _result(each: dict[str, Any]) -> Result:
    tunables = tuple((str(name), int(value)) for name, value in each["tunables"].items())
    problem = ConvProblem.parse(each["problem"])
    names = (str(each["precision"]), str(each["kernel"]))
    numbers = (float(each["ms"]), int(each["candidates"]))
    # Results of before gradients were tuned do not say their direction.
    return Result(problem, *names, tunables, *numbers, str(each.get("direction", "forward")))


def _choice(result: Result, problem: ConvProblem, capability: Capability) -> Choice | None:
    """What a result names, unless that cannot, or no longer, be used for the problem."""
    kernel = catalog.find(result.kernel)
    if kernel is None or not kernel.permitted(result.precision, problem):
        return None
    if kernel.direction != result.direction:
        return None
    return _with_tunables(kernel, result, problem, capability)


def _with_tunables(
    kernel: Kernel, result: Result, problem: ConvProblem, capability: Capability
) -> Choice | None:
    """The kernel with a result's tunables, if it has such a layout."""
    layouts = kernel.layouts(problem, capability)
    if layouts and not result.tunables:
        return Choice(kernel)
    fitting = (each for each in layouts if set(each.tunables) == set(result.tunables))
    layout = next(fitting, None)
    return None if layout is None else Choice(kernel, layout)


def _about(name: str, capability: Capability, driver: int) -> dict[str, Any]:
    """What results depend on besides the problem."""
    major, minor = capability
    return {
        "gpu": name,
        "capability": f"{major}.{minor}",
        "driver": driver,
        "kernels": _kernels(),
    }


@functools.lru_cache(maxsize=1)
def _kernels() -> str:
    """A word that changes with the kernels: with their code, not with their comments."""
    key = hashlib.sha256(__version__.encode())
    folder = kernels_dir() / "cuda"
    for path in sorted([*folder.rglob("*.cu"), *folder.rglob("*.cuh")]):
        code = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        key.update(f"{path.name}\0{' '.join(code.split())}\0".encode())
    return key.hexdigest()[:12]
