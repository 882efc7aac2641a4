"""Kernel plans: how a kernel computes a problem, as data; needs no CUDA."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Union

from ...problem import PRECISIONS, ConvProblem

# Architectures without nvcc's "sm_" prefix: at least one per major version.
ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")

Capability = tuple[int, int]
Grid = tuple[int, int, int]
Defines = tuple[tuple[str, Union[str, int]], ...]
# A layout's parameters by name, such as rows and filters.
Tunables = tuple[tuple[str, int], ...]


class Target(Protocol):
    """A GPU's properties that kernel choice depends on: driver name, compute capability, and the
    newest CUDA version that the driver supports, such as 13000."""

    name: str
    capability: Capability
    driver: int


@dataclass(frozen=True)
class Launch:
    """One launch of a function of the compiled source.

    `arguments` are, in the function's order, names of arrays ("x", "w", "bias", "y", "dx", "dw",
    "dy", "dbias", "workspace"), passed as pointers (a missing bias as NULL), and numbers, passed as
    32-bit integers. `shared_bytes` is dynamic shared memory per block. Persistent kernels set
    `blocks_per_processor`: grid[0] is then the maximum number of useful blocks, and the launch is
    limited to the blocks that the GPU can hold at the same time.
    """

    function: str
    grid: Grid
    block: Grid
    arguments: tuple[str | int, ...]
    shared_bytes: int = 0
    blocks_per_processor: int = 0

    @classmethod
    def line(
        cls, function: str, blocks: int, threads: int, arguments: tuple[str | int, ...], *more: int
    ) -> Launch:
        """Return a launch whose grid and blocks have one dimension."""
        return cls(function, (blocks, 1, 1), (threads, 1, 1), arguments, *more)


@dataclass(frozen=True)
class ConstantCopy:
    """A device-to-device copy of an array's `nbytes` bytes to the `__constant__` variable `symbol`;
    `place` is the line of the file that requests it, if any."""

    symbol: str
    array: str
    nbytes: int
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Code:
    """A named kernel: a source in kernels/cuda with macros.

    `architectures` are those it supports, without nvcc's "sm_" prefix. `precision` is that of its
    arithmetic: "strict", "float32" (for general kernels: the arrays' type, at least float32),
    "tf32" or "float16". `float32_accurate` says that results are as accurate as plain float32
    arithmetic.
    """

    name: str
    source: str
    architectures: tuple[str, ...]
    precision: str
    float32_accurate: bool

    @property
    def macros(self) -> Defines:
        """The macros that every compilation of the source defines."""
        return ()


@dataclass(frozen=True)
class Plan:
    """How a kernel computes a problem: macros in addition to the kernel's own, constant copies,
    then launches. Macros do not depend on the batch size.

    `workspace_bytes` is scratch memory on the GPU for the launches; its initial contents do not
    matter. `apart` is the same computation with the weight-dependent part separated, if there is
    one.
    """

    kernel: Code
    defines: Defines
    launches: tuple[Launch, ...]
    constants: tuple[ConstantCopy, ...] = ()
    workspace_bytes: int = 0
    apart: Apart | None = None

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    @property
    def macros(self) -> Defines:
        """All macros for compiling the source."""
        return (*self.kernel.macros, *self.defines)

    def has_code_of(self, other: Plan) -> bool:
        """Return whether it differs from a plan without constant copies in its launches alone."""
        return (self.kernel, self.defines) == (other.kernel, other.defines) and not other.constants


@dataclass(frozen=True)
class Apart:
    """A computation in two parts: `weights` computes an array of `nbytes`, its "y", from w;
    `images` reads it as "prepared" and may run repeatedly."""

    nbytes: int
    weights: Plan
    images: Plan


@dataclass(frozen=True)
class Layout:
    """Tiling parameters of a kernel; families add fields, all of them integers.

    Each field becomes a macro of the source, with its name in capitals.
    """

    @property
    def tunables(self) -> Tunables:
        """The parameters by name."""
        return tuple(vars(self).items())

    @property
    def defines(self) -> Defines:
        """The macros."""
        return tuple((name.upper(), value) for name, value in self.tunables)


class Family(ABC):
    """A family of kernels with the same layouts; all layouts of one problem compute the same.

    If `spaced`, the images of y may be strided: the macro OUT_IMAGE is the stride in elements. With
    a `prelude`, x may be strided, too (IN_IMAGE), and its elements can be transformed as they are
    loaded, by the macro CONVERT; every function then takes the arguments "factors" and "addends".
    If it `stores` halves, float32 x and y may be float16 in memory (X_TYPE and Y_TYPE).
    """

    spaced = False
    prelude = False
    stores = False

    @abstractmethod
    def why_not(self, problem: ConvProblem) -> str | None:
        """Return why these kernels cannot compute the problem, or `None` if they can."""

    def layouts(self, problem: ConvProblem, capability: Capability) -> Sequence[Layout]:
        """Return the layouts worth measuring for a problem that `why_not` accepts; the first is
        expected to be the fastest on a GPU of this capability."""
        return (Layout(),)

    @abstractmethod
    def plan(self, kernel: Code, problem: ConvProblem, layout: Any, accumulate: bool) -> Plan:
        """Return how one of the kernels computes the problem with one of `layouts`.

        With `accumulate` the result is added to the output, else overwrites it.
        """

    def holds(self, problem: ConvProblem) -> bool:
        """Return whether results are as accurate as plain float32 sums, for kernels that usually
        are; sums of few terms may not be."""
        return True

    def activates(self, accumulate: bool) -> bool:
        """Return whether these kernels support an epilogue (macro ACTIVATE of output.cuh)."""
        return True

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        """Return whether these kernels are expected to be faster than those of a higher rank."""
        return True


@dataclass(frozen=True)
class Kernel(Code):
    """An entry of the catalog.

    `direction` is "forward", "backward_data", "backward_weight" or "backward_bias". Every kernel
    can accumulate into its output. By default the applicable kernel of the lowest `rank` that pays
    is chosen; a kernel without a rank must be requested.
    """

    direction: str
    summary: str
    family: Family
    rank: int | None = None
    macros: Defines = ()

    def why_not(self, problem: ConvProblem, capability: Capability) -> str | None:
        """Return why this kernel cannot compute the problem on such a GPU, or `None` if it can."""
        if architecture(self.architectures, capability) is None:
            return (
                f"it has no code for compute capability {capability[0]}.{capability[1]}, only for "
                f"{', '.join(f'sm_{name}' for name in self.architectures)}"
            )
        return self.family.why_not(problem)

    def permitted(self, precision: str, problem: ConvProblem) -> bool:
        """Return whether it computes the problem at least as exactly as `precision`, one of
        `PRECISIONS`."""
        exactness = self.precision
        if exactness == "float32" and not self.family.holds(problem):
            exactness = "tf32"
        return PRECISIONS.index(exactness) <= PRECISIONS.index(precision)

    def layouts(self, problem: ConvProblem, capability: Capability) -> Sequence[Layout]:
        """Return the layouts for `plan`, best first; none for a problem that the kernel cannot
        compute."""
        refused = self.why_not(problem, capability) is not None
        return () if refused else self.family.layouts(problem, capability)

    def plan(
        self,
        problem: ConvProblem,
        capability: Capability,
        accumulate: bool,
        layout: Layout | None = None,
    ) -> Plan:
        """Return how to compute a problem that `why_not` accepts; `layout` defaults to the best
        one. With `accumulate` the result is added to the output."""
        if layout is None:
            layout = self.family.layouts(problem, capability)[0]
        return self.family.plan(self, problem, layout, accumulate)


def entry(
    name: str,
    summary: str,
    family: Family,
    rank: int | None = None,
    architectures: tuple[str, ...] = ARCHITECTURES,
    precision: str = "float32",
    source: str = "ladder/{}.cu",
    macros: Defines = (),
) -> Kernel:
    """Return a catalog entry for a source in kernels/cuda, whose path may have the name in it
    (without "_strict"), by default with all architectures and float32 accuracy. A gradient's name
    ends with its direction."""
    accurate = precision in ("strict", "float32")
    code = (name, source.format(name.replace("_strict", "")), architectures, precision, accurate)
    gradient = re.search(r"backward_\w+$", name)
    return Kernel(*code, gradient[0] if gradient else "forward", summary, family, rank, macros)


def architecture(names: tuple[str, ...], capability: Capability) -> str | None:
    """Return the newest architecture in `names`, such as "86", whose code this GPU can run.

    Machine code runs on later GPUs of the same major version only; a name ending in "a" is for
    exactly one capability.
    """
    major, minor = capability
    fitting = []
    for name in names:
        number = int(name.rstrip("a"))
        exact = not name.endswith("a") or number % 10 == minor
        if number // 10 == major and number % 10 <= minor and exact:
            fitting.append((number, name))
    return max(fitting)[1] if fitting else None


def divide_up(count: int, size: int) -> int:
    """Return ceil(count / size)."""
    return -(-count // size)
