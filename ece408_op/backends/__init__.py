"""Backends: each computes a `ConvProblem` on arrays given by address, without MXNet.

Arrays are contiguous, in NCHW order and the problem's dtype, in the memory in which the backend
computes. Addresses are integers; the caller keeps the arrays alive during the call.
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
    """Summary of a call: the kernel's name, the precision of its arithmetic as in `op_log.OpTime`,
    and the GPU's busy time, or `None` if no GPU computed."""

    kernel: str
    precision: str = "float32"
    gpu: GpuTime | None = None


class NativeFunction(NamedTuple):
    """A compiled function: its address, its last arguments (the number of threads, and those of an
    instruction set and a kernel), and that kernel's name and precision, as in `Done`. For the
    gradient for w, also the address of the function for the bias's gradient."""

    address: int
    threads: int
    isa: int
    kernel: int
    name: str
    precision: str = "float32"
    bias_gradient: int | None = None


class NativeLaunch(NamedTuple):
    """One launch of a CUDA kernel in the driver's terms: a CUfunction, grid and block, bytes of
    dynamic shared memory per block, and the arguments' memory layout. Addresses of arrays go to
    `slots`: byte offsets with roles "x", "w", "bias", "y" and "workspace"."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: bytes
    slots: tuple[tuple[int, str], ...]


class NativeLaunches(NamedTuple):
    """The launches that compute a direction on a GPU, in order on one stream; the bytes of
    workspace that they need; and the summary of such a call."""

    launches: tuple[NativeLaunch, ...]
    workspace_bytes: int
    done: Done


class HostMemory(NamedTuple):
    """`nbytes` of borrowed memory at an address. The borrower sets `busy` to 0 when the memory is
    no longer used, from any thread, even one without Python; before the process forks, it calls
    `before_fork` while nothing is being computed."""

    address: int
    nbytes: int
    busy: ctypes.c_int
    before_fork: Callable[[], None]


def as_array(address: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Return an array of this shape on host memory at an address; it keeps nothing alive."""
    # Imported here, because processes that compile a file import this package and need no NumPy.
    import numpy as np

    nbytes = np.dtype(dtype).itemsize * math.prod(shape)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


class Backend(ABC):
    """One way of computing. It raises this package's errors, prints nothing and keeps no arrays.

    Methods that compute are synchronous and thread-safe, and raise `UnsupportedProblem` where
    `supports` returns a reason. With `accumulate` the result is added to the output; otherwise the
    output's old contents are not read.
    """

    name: str

    @abstractmethod
    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        """Return why this backend cannot compute `direction` (of `DIRECTIONS`), or `None` if it
        can."""

    @abstractmethod
    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        """Compute y (problem.y_shape) from x, w and, if the problem has one, the bias."""

    def backward_data(
        self, problem: ConvProblem, w: int, dy: int, dx: int, accumulate: bool
    ) -> Done:
        """Compute dx, the gradient for x (problem.x_shape), from w and the gradient dy for y."""
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
        """Compute dw and dbias, the gradients for w and the bias, each unless it is `None`."""
        raise self._refusal(problem, "backward_weight")

    def prepare(self, problem: ConvProblem, direction: str) -> None:
        """Do the one-time work of a first call now. Raises what that raises."""
        return

    def native_function(self, problem: ConvProblem, direction: str) -> NativeFunction | None:
        """Return a function that computes a direction without Python, or `None` if Python is
        needed."""
        return None

    def native_launches(self, problem: ConvProblem, direction: str) -> NativeLaunches | None:
        """Return compiled and loaded launches that compute a supported direction on the arrays' GPU
        without Python, or `None` if Python is needed.

        Raises what `prepare` raises.
        """
        return None

    def result_memory(self, problem: ConvProblem) -> HostMemory | None:
        """Return memory for y to which this backend writes faster than to an ordinary array, or
        `None` if an ordinary one is as good. Raises what `prepare` raises."""
        return None

    def require(self, problem: ConvProblem, direction: str) -> None:
        """Raise `UnsupportedProblem` if `supports` returns a reason."""
        if self.supports(problem, direction) is not None:
            raise self._refusal(problem, direction)

    def require_bias(self, problem: ConvProblem, bias: int | None) -> None:
        """Raise `InvalidProblem` unless a bias is given exactly if the problem has one."""
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
