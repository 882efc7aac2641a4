"""Tuned choice of kernel and layout per problem and GPU.

`ece408 tune` writes its results to the cache, one file per GPU; the package ships results for some
GPUs. A call only reads them and never measures: a problem without results uses the catalog's rules.
Results are hints: every kernel they can name computes the same, and entries that no longer exist
are ignored.
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
from ....files.cachedir import ensure_folder, locked, write_text
from ....files.resources import kernels_dir
from ....problem import ConvProblem
from ....version import __version__
from ... import kernel_file
from ..kernel_plan import Capability, Kernel, Layout, Target, Tunables
from . import catalog

# A result applies to batches up to this factor larger or smaller.
_FARTHEST = 4
# GPUs without shipped results of their own use those of a similar one; names of files.
_ALIKE = re.compile(r"nvidia-(h100|h200|h800|gh200)\b")
_COMMENT = re.compile(r"//[^\n]*")
_log = logging.getLogger("ece408_op")


@dataclass(frozen=True)
class Choice:
    """A kernel and a layout (`None`: the kernel's own choice)."""

    kernel: Kernel
    layout: Layout | None = None

    @property
    def tunables(self) -> Tunables:
        """The layout's parameters, if one is given."""
        return () if self.layout is None else self.layout.tunables

    def __str__(self) -> str:
        return " ".join([self.kernel.name, *(f"{name}={value}" for name, value in self.tunables)])


@dataclass(frozen=True)
class Result:
    """The fastest choice for one direction of a problem among all at least as exact as `precision`:
    a kernel's name and tunables, its median milliseconds, and the number of candidates. For a
    user's file it is the best of the file's own tunables, and `kernel` is its `identity`."""

    problem: ConvProblem
    precision: str
    kernel: str
    tunables: Tunables
    ms: float
    candidates: int
    direction: str = "forward"

    def document(self) -> dict[str, Any]:
        """Return it as a JSON object; `_result` parses it."""
        content = {**vars(self), "problem": str(self.problem), "tunables": dict(self.tunables)}
        return {**content, "ms": round(self.ms, 4)}


def best(problem: ConvProblem, gpu: Target, precision: str, direction: str = "forward") -> Choice:
    """Return the fastest known kernel and tunables for a direction that are at least as exact as
    `precision`.

    Uses results of the same layer at the nearest batch size, within a factor of four: from the
    cache, else from the package, else `catalog.default`. Files are read once per process, and again
    after the process has written results. Raises `UnsupportedProblem` on a GPU that no kernel
    supports.
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


# Cached: every call of a user's file needs it. A file with another text is another kernel.
@functools.lru_cache(maxsize=64)
def identity(kernel: Kernel) -> str:
    """Return a kernel's name in results; a user's file is identified by its text."""
    if not Path(kernel.source).is_absolute():
        return kernel.name
    return f"{kernel.name}@{kernel_file.find(kernel.source).key}"


def layout_of(kernel: Kernel, problem: ConvProblem, gpu: Target) -> Layout | None:
    """Return the cached layout of a user's file for the same layer, at the nearest batch size;
    `None` without one."""
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
    """Return the result for exactly this problem (ignoring bias) from the cache or from `path`; of
    a user's file if `kernel` is given."""
    wanted = (problem.batch, precision, direction)
    results = _kept(path or file(gpu), gpu.name, gpu.capability, gpu.driver)
    for each in results.get(_layer(problem), ()):
        of_same = each.kernel == identity(kernel) if kernel else not _owner(each)
        if of_same and (each.problem.batch, each.precision, each.direction) == wanted:
            return each
    return None


def _owner(result: Result) -> str:
    """Return the name of the result's file, or an empty string."""
    name, at, _ = result.kernel.partition("@")
    return name if at else ""


def file(gpu: Target) -> Path:
    """Return the path of this GPU's results in the cache, which may not exist yet."""
    return _file(_folder(), gpu.name)


def _folder() -> Path:
    return settings.cache() / "cuda-tuning"


def _file(folder: Path, name: str) -> Path:
    """Return the file for GPUs of this name."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return folder / f"{slug}.json"


def save(results: Iterable[Result], gpu: Target, path: Path | None = None) -> Path:
    """Add results to the file, replacing older ones of the same problems.

    Safe with concurrent processes. `path` defaults to the GPU's own file in the cache. Outdated
    results in it are dropped. Raises `CacheUnwritable`.
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
        write_text(path, _text({"sha256": _sum(content), **content}))
    forget()
    return path


def forget() -> None:
    """Discard cached results; files are read again when needed."""
    for function in (_best, _layout_of, _kept, _shipped):
        function.cache_clear()


def _sum(content: dict[str, Any]) -> str:
    """Return the checksum of this content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _text(content: dict[str, Any]) -> str:
    """Return JSON with one line per result."""
    lines = ",\n".join(f"    {json.dumps(each)}" for each in content["results"])
    head = json.dumps({**content, "results": []}, indent=2)
    return head.replace('"results": []', f'"results": [\n{lines}\n  ]') + "\n"


# Results by layer, as networks look up hundreds of layers.
_Results = dict[ConvProblem, list[Result]]


@functools.lru_cache(maxsize=16)
def _kept(path: Path, name: str, capability: Capability, driver: int) -> _Results:
    return _by_layer(_read(path, _about(name, capability, driver)))


@functools.lru_cache(maxsize=16)
def _shipped(name: str) -> list[_Results]:
    """Return the shipped results for GPUs of this name, then those for similar ones."""
    folder = kernels_dir() / "tuned"
    own = _file(folder, name)
    others = folder.glob("*.json") if _ALIKE.match(own.name) else ()
    paths = [own, *sorted(path for path in others if path != own and _ALIKE.match(path.name))]
    # They stay useful when a kernel or the driver changes a little.
    return [_by_layer(_read(path, {})) for path in paths]


def _by_layer(results: Iterable[Result]) -> _Results:
    found: _Results = {}
    for each in results:
        found.setdefault(_layer(each.problem), []).append(each)
    return found


def _layer(problem: ConvProblem) -> ConvProblem:
    """Return the problem's layer: batch and bias are normalised."""
    return dataclasses.replace(problem, batch=1, bias=False)


def _nearest(results: _Results, problem: ConvProblem, farthest: float = math.inf) -> list[Result]:
    """Return the results of the problem's layer, nearest batch first, within a factor of
    `farthest`."""

    def distance(each: Result) -> float:
        return abs(math.log(each.problem.batch / problem.batch))

    near = (
        each
        for each in results.get(_layer(problem), ())
        if distance(each) <= math.log(farthest) + 1e-9
    )
    return sorted(near, key=distance)


def _read(path: Path, about: dict[str, Any]) -> list[Result]:
    """Return the results in a file if it matches `about`; log why it cannot be used otherwise."""
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
    # Results from before gradients were tuned have no direction.
    return Result(problem, *names, tunables, *numbers, str(each.get("direction", "forward")))


def _choice(result: Result, problem: ConvProblem, capability: Capability) -> Choice | None:
    """Return the choice that a result names, if it still exists and can compute the problem."""
    kernel = catalog.find(result.kernel)
    if kernel is None or not kernel.permitted(result.precision, problem):
        return None
    if kernel.direction != result.direction:
        return None
    return _with_tunables(kernel, result, problem, capability)


def _with_tunables(
    kernel: Kernel, result: Result, problem: ConvProblem, capability: Capability
) -> Choice | None:
    """Return the kernel with a result's tunables, if it has such a layout."""
    layouts = kernel.layouts(problem, capability)
    if layouts and not result.tunables:
        return Choice(kernel)
    fitting = (each for each in layouts if set(each.tunables) == set(result.tunables))
    layout = next(fitting, None)
    return None if layout is None else Choice(kernel, layout)


def _about(name: str, capability: Capability, driver: int) -> dict[str, Any]:
    """Return the conditions of results besides the problem."""
    major, minor = capability
    return {
        "gpu": name,
        "capability": f"{major}.{minor}",
        "driver": driver,
        "kernels": _kernels(),
    }


@functools.lru_cache(maxsize=1)
def _kernels() -> str:
    """Return a hash of the kernels' code without comments."""
    key = hashlib.sha256(__version__.encode())
    folder = kernels_dir() / "cuda"
    for path in sorted([*folder.rglob("*.cu"), *folder.rglob("*.cuh")]):
        code = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        key.update(f"{path.name}\0{' '.join(code.split())}\0".encode())
    return key.hexdigest()[:12]
