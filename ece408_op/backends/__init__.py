"""Ways of computing a convolution: each takes a `ConvProblem` and addresses, knows no MXNet.

The arrays lie contiguous in NCHW order, in the problem's dtype, in the memory the backend
computes in. Addresses are integers, and the caller keeps the arrays alive during the call.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InvalidProblem, UnsupportedProblem
from ..op_log import GpuTime
from ..problem import ConvProblem

if TYPE_CHECKING:
    import numpy as np

DIRECTIONS = ("forward", "backward_data", "backward_weight")


@dataclass(frozen=True)
class Done:
    """What a call did: the kernel's name, the precision of its arithmetic as `op_log.OpTime` has
    it, and what kept a GPU busy, or `None` where none computed."""

    kernel: str
    precision: str = "float32"
    gpu: GpuTime | None = None


class NativeFunction(NamedTuple):
    """The address of a compiled function, its last arguments (the number of threads and those of an
    instruction set and of a kernel), and that kernel's name and precision, as `Done` has them.
    Beside the gradient for w, the address of the function for that of the bias."""

    address: int
    threads: int
    isa: int
    kernel: int
    name: str
    precision: str = "float32"
    bias_gradient: int | None = None


class NativeLaunch(NamedTuple):
    """One launch of a CUDA kernel as the driver takes it: a CUfunction, its grid and blocks, bytes
    of dynamic shared memory for each block, and its arguments as they lie in memory; addresses of
    arrays go to `slots`, offsets in bytes with roles: "x", "w", "bias", "y" and "workspace"."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: bytes
    slots: tuple[tuple[int, str], ...]


class NativeLaunches(NamedTuple):
    """What computes a direction on a GPU when it is launched in order, on one stream, with a
    workspace of so many bytes; and what it does then."""

    launches: tuple[NativeLaunch, ...]
    workspace_bytes: int
    done: Done


class HostMemory(NamedTuple):
    """`nbytes` of memory at an address, lent: whoever has it sets `busy` to 0 when nothing uses it
    any more, from any thread, also one without Python, and calls `before_fork`, when nothing is
    being computed, before the process forks."""

    address: int
    nbytes: int
    busy: ctypes.c_int
    before_fork: Callable[[], None]


def as_array(address: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """The array of a shape at an address on the host, such as those that a backend is given; it
    keeps nothing alive."""
    # Processes that compile a file import this package, and do without.
    import numpy as np

    nbytes = np.dtype(dtype).itemsize * math.prod(shape)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


class Backend(ABC):
    """One way of computing; it raises this package's errors, prints nothing and keeps no array.

    Every method that computes has finished when it returns, may be called from several threads at
    once, and raises `UnsupportedProblem` where `supports` has a reason. With `accumulate` the
    result is added to what the output holds; otherwise the output's old contents are not read.
    """

    name: str

    @abstractmethod
    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        """`None` if this backend can compute `direction` (of `DIRECTIONS`), else why not."""

    @abstractmethod
    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        """y (problem.y_shape) from x, w and, if the problem has one, the bias."""

    def backward_data(
        self, problem: ConvProblem, w: int, dy: int, dx: int, accumulate: bool
    ) -> Done:
        """dx, the gradient for x (problem.x_shape), from w and the gradient dy for y."""
        raise self._refusal(problem, "backward_data")

    def backward_weight(
        self,
        problem: ConvProblem,
        x: int,
        dy: int,
        dw: int | None,
        dbias: int | None,
        accumulate_w: bool,
        accumulate_bias: bool,
    ) -> Done:
        """dw and dbias, the gradients for w and the bias; `None` for one that is not wanted."""
        raise self._refusal(problem, "backward_weight")

    def prepare(self, problem: ConvProblem, direction: str) -> None:
        """Do now what the first call would spend time on. Raises what that raises."""
        return

    def native_function(
        self, problem: ConvProblem, direction: str, keeps_weights: bool = False
    ) -> NativeFunction | None:
        """What computes a direction without Python, or `None` where Python is needed.

        `keeps_weights`: whether the caller keeps the weights of a forward pass packed.
        """
        return None

    def native_launches(self, problem: ConvProblem, direction: str) -> NativeLaunches | None:
        """What computes a direction, which `supports` has nothing against, on the arrays' GPU
        without Python, compiled and loaded; or `None` where Python is needed.

        Raises what `prepare` raises.
        """
        return None

    def result_memory(self, problem: ConvProblem) -> HostMemory | None:
        """Memory for y to which this backend writes faster than to an array like any other, or
        `None`: then take an array like any other. Raises what `prepare` raises."""
        return None

    def require(self, problem: ConvProblem, direction: str) -> None:
        """Raises `UnsupportedProblem` if `supports` has a reason against the problem."""
        if self.supports(problem, direction) is not None:
            raise self._refusal(problem, direction)

    def require_bias(self, problem: ConvProblem, bias: int | None) -> None:
        """Raises `InvalidProblem` if a bias is given just when the problem has none."""
        if problem.bias != (bias is not None):
            raise InvalidProblem(
                f"{problem} has {'a' if problem.bias else 'no'} bias, "
                f"but {'none' if bias is None else 'one'} was given"
            )

    def _refusal(self, problem: ConvProblem, direction: str) -> UnsupportedProblem:
        reason = self.supports(problem, direction)
        return UnsupportedProblem(
            f"backend {self.name} cannot compute {direction} of {problem}: {reason}"
        )
