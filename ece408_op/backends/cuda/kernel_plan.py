"""What it takes to compute one problem with one kernel: pure descriptions, no CUDA needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Union

from ...problem import PRECISIONS, ConvProblem

# As nvcc names them without the sm_: one of each major version at least.
ARCHITECTURES = ("75", "80", "86", "89", "90", "100", "120")

Capability = tuple[int, int]
Grid = tuple[int, int, int]
Defines = tuple[tuple[str, Union[str, int]], ...]
# A layout as names and numbers, such as rows and filters.
Tunables = tuple[tuple[str, int], ...]


class Target(Protocol):
    """A GPU as far as choosing a kernel for it goes: the name that its driver gives it, its
    compute capability, and the newest CUDA version that the driver knows, such as 13000."""

    name: str
    capability: Capability
    driver: int


@dataclass(frozen=True)
class Launch:
    """One launch of a function of the compiled source.

    `arguments` are, in the function's order, names of arrays ("x", "w", "bias", "y", "dx", "dw",
    "dy", "dbias", "workspace"), which become pointers (a bias that is not there becomes NULL),
    and numbers, which become 32-bit integers. `shared_bytes` is dynamic shared memory for each
    block. A launch of persistent blocks has `blocks_per_processor`: grid[0] then is the most
    blocks that there is work for, and no more are launched than the GPU holds at once.
    """

    function: str
    grid: Grid
    block: Grid
    arguments: tuple[str | int, ...]
    shared_bytes: int = 0
    blocks_per_processor: int = 0


@dataclass(frozen=True)
class ConstantCopy:
    """A copy on the GPU of an array's `nbytes` bytes into a `__constant__` variable, `symbol`."""

    symbol: str
    array: str
    nbytes: int


@dataclass(frozen=True)
class Code:
    """A source in kernels/cuda with macros, by a name.

    `architectures` are what it is for, as nvcc names them without the sm_. `precision` is that of
    its arithmetic: "strict", "float32" (of general kernels: the arrays' own, at least float32),
    "tf32" or "float16"; `float32_accurate` says that results are as accurate as plain float32
    arithmetic gives them.
    """

    name: str
    source: str
    architectures: tuple[str, ...]
    precision: str
    float32_accurate: bool

    @property
    def macros(self) -> Defines:
        """What its source is always compiled with."""
        return ()

    @property
    def exactness(self) -> str:
        """Of `PRECISIONS`, that of its results."""
        inexact = self.precision not in ("strict", "float32")
        return "float32" if inexact and self.float32_accurate else self.precision


@dataclass(frozen=True)
class Plan:
    """How a kernel computes a problem: the macros that its source is compiled with beside the
    kernel's own, and what to enqueue, copies first. Macros do not depend on the batch.

    `workspace_bytes` is memory on the GPU that the launches share; its contents do not matter.
    `apart` is the same with what depends on weights alone done first, if there is such a thing.
    """

    kernel: Code
    defines: Defines
    launches: tuple[Launch, ...]
    constants: tuple[ConstantCopy, ...] = ()
    workspace_bytes: int = 0
    apart: Apart | None = None

    @property
    def macros(self) -> Defines:
        """All that the source is compiled with."""
        return (*self.kernel.macros, *self.defines)


@dataclass(frozen=True)
class Apart:
    """A computation in two: `weights` makes `nbytes` of w, its "y"; `images` computes with them,
    as "prepared", as often as is wanted."""

    nbytes: int
    weights: Plan
    images: Plan


@dataclass(frozen=True)
class Layout:
    """How a kernel cuts a problem up: fields are numbers, which families add.

    Each field is a macro of the source, by its name in capitals.
    """

    @property
    def tunables(self) -> Tunables:
        """Names and numbers."""
        return tuple(vars(self).items())

    @property
    def defines(self) -> Defines:
        """The macros."""
        return tuple((name.upper(), value) for name, value in self.tunables)


class Family(ABC):
    """Kernels that are laid out in the same way; layouts of one problem compute the same.

    Of `spaced` ones the images of y may lie further apart than they are large: the macro OUT_IMAGE
    says how many elements. With a `prelude` the same is so of x (IN_IMAGE), and its elements can be
    made something else as they are read: the macro CONVERT, with which every function takes
    "factors" and "addends" as well.
    """

    spaced = False
    prelude = False

    @abstractmethod
    def why_not(self, problem: ConvProblem) -> str | None:
        """Why these kernels cannot compute the problem, or `None` if they can."""

    def layouts(self, problem: ConvProblem, capability: Capability) -> Sequence[Layout]:
        """Layouts worth measuring of a problem that `why_not` has nothing against; first the one
        that should be the fastest on a GPU of this capability."""
        return (Layout(),)

    @abstractmethod
    def plan(self, kernel: Code, problem: ConvProblem, layout: Any, accumulate: bool) -> Plan:
        """How one of the kernels computes the problem, laid out as one of `layouts`.

        With `accumulate` the result is added to the output, else overwrites it.
        """

    def holds(self, problem: ConvProblem) -> bool:
        """Whether results are as accurate as plain float32 sums, if these kernels' ever are: sums
        of few terms may not be."""
        return True

    def activates(self, accumulate: bool) -> bool:
        """Whether these kernels can make something else of results as they are stored: the macro
        ACTIVATE of output.cuh."""
        return True

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        """Whether these kernels should be faster than those of a higher rank."""
        return True


@dataclass(frozen=True)
class Kernel(Code):
    """An entry of the catalog.

    `direction` is "forward", "backward_data", "backward_weight" or "backward_bias". Every kernel
    can add to what its output holds. Of the kernels that can compute a problem and pay, the one of
    the lowest `rank` is the default; one without a rank computes only where it is asked for.
    """

    direction: str
    summary: str
    family: Family
    rank: int | None = None
    macros: Defines = ()

    def why_not(self, problem: ConvProblem, capability: Capability) -> str | None:
        """Why this kernel cannot compute the problem on a GPU of this capability, or `None`."""
        if architecture(self.architectures, capability) is None:
            return (
                f"it has no code for compute capability {capability[0]}.{capability[1]}, only for "
                f"{', '.join(f'sm_{name}' for name in self.architectures)}"
            )
        return self.family.why_not(problem)

    def permitted(self, precision: str, problem: ConvProblem) -> bool:
        """Whether it computes the problem at least as exactly as `precision`, one of `PRECISIONS`,
        asks for."""
        exactness = self.exactness
        if exactness == "float32" and not self.family.holds(problem):
            exactness = "tf32"
        return PRECISIONS.index(exactness) <= PRECISIONS.index(precision)

    def layouts(self, problem: ConvProblem, capability: Capability) -> Sequence[Layout]:
        """What `plan` takes, best first; none for a problem that the kernel cannot compute."""
        refused = self.why_not(problem, capability) is not None
        return () if refused else self.family.layouts(problem, capability)

    def plan(
        self,
        problem: ConvProblem,
        capability: Capability,
        accumulate: bool,
        layout: Layout | None = None,
    ) -> Plan:
        """How to compute a problem that `why_not` has nothing against, with the best layout unless
        another one is given. With `accumulate` the result is added to the output."""
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
    float32_accurate: bool = True,
    direction: str = "forward",
    source: str = "",
    macros: Defines = (),
) -> Kernel:
    """The kernel of a source in kernels/cuda with macros, ladder/`name`.cu unless another is named,
    which is for all GPUs and as accurate as float32 unless told otherwise."""
    code = (name, source or f"ladder/{name}.cu", architectures, precision, float32_accurate)
    return Kernel(*code, direction, summary, family, rank, macros)


def architecture(names: tuple[str, ...], capability: Capability) -> str | None:
    """The newest of the architectures, such as "86", whose code a GPU of this capability runs.

    Machine code runs on later GPUs of the same major version only; a name that ends in "a" is for
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
    """How many parts of `size` cover `count`."""
    return -(-count // size)


def window_defines(problem: ConvProblem) -> Defines:
    """The macros for kernel, strides, padding and dilation, such as KERNEL_H and KERNEL_W."""
    return tuple(
        (f"{name.upper()}_{axis}", value)
        for name in ("kernel", "stride", "pad", "dilate")
        for axis, value in zip("HW", getattr(problem, name))
    )
