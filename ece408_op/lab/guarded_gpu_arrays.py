"""Arrays on the GPU that another process computes on, and what this one compares them with.

Another process opens memory of this one by CUDA's handles for that (cuIpcGetMemHandle and
cuIpcOpenMemHandle of the driver's interface). It never sees the numbers and the expected output
that this process keeps for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..backends.cuda.cuda_backend import ZeroCopyBackend
from ..backends.cuda.kernel_plan import ARCHITECTURES, Code, Launch, Plan
from ..backends.cuda.runtime import launcher
from ..backends.cuda.runtime.device import Gpu, reported
from ..bench import oracle
from ..errors import WrongResult
from ..problem import ConvProblem
from .guarded_arrays import CANARY, damage

# Around each array: canaries, which are NaN to what reads them.
_MARGIN = 1 << 16
_ALIGNMENT = 256  # as cudaMalloc
# What another process opens is shared by whole blocks of this size, with all that lies in them.
_SHARED = 2 << 20
_THREADS, _BLOCKS = 256, 2048
_SAMPLED = 2
# Of a product of two numbers drawn in +-0.5, on average.
_MAGNITUDE = 1 / 16
_OWN_ERROR = 1e-5
# kernels/cuda/measuring/judge.cu takes it as a 32-bit number of 1e-9.
_LARGEST_BOUND = 2.0
_JUDGE = Code("judge", "measuring/judge.cu", ARCHITECTURES, "float32", float32_accurate=True)


class Block:
    """Sets of x, w and y of one problem, all with the same w, between margins, in memory that
    another process opens; `sets` are their addresses."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        # All but the last were too small. Another process may have them open still.
        self._blocks: list[Any] = []
        self._nbytes = 0
        self.sets: list[tuple[int, int, int]] = []
        self._shapes: list[tuple[int, ...]] = []
        self._inputs: tuple[np.ndarray, ...] = ()

    def close(self) -> None:
        """Free the memory, which no other process may have open any more."""
        with self._gpu.active():
            for block in self._blocks:
                block.free()
        self._blocks = []

    def reserve(self, problem: ConvProblem, sets: int) -> None:
        """Have room for so many sets. Raises `NotEnoughMemory`."""
        nbytes = _layout(problem, sets)[1]
        if nbytes > self._nbytes:
            with self._gpu.active(), reported("allocating what another process computes on"):
                self._blocks.append(self._gpu.cuda.mem_alloc(nbytes))
            self._nbytes = nbytes

    def place(self, problem: ConvProblem, sets: int = 1, margins: str = "") -> dict[str, Any]:
        """Lay out `sets` sets, all NaN, always with open margins; returns the other process's part
        of a request. Raises `NotEnoughMemory`."""
        self.reserve(problem, sets)
        self._shapes = [problem.x_shape, problem.w_shape, problem.y_shape]
        offsets, nbytes = _layout(problem, sets)
        begin = int(self._blocks[-1])
        with self._gpu.active(), reported("allocating what another process computes on"):
            self._gpu.cuda.memset_d8(begin, CANARY, nbytes)
            handle = bytes(self._gpu.cuda.mem_get_ipc_handle(begin))
        self.sets = [(begin + i, begin + j, begin + k) for i, j, k in offsets]
        return {"memory": handle.hex(), "sets": offsets}

    def fill(self, x: np.ndarray, w: np.ndarray) -> None:
        """Copy the inputs to the first set."""
        self._inputs = (x, w)
        for address, array in zip(self.sets[0], self._inputs):
            with self._gpu.active():
                self._gpu.cuda.memcpy_htod(address, np.ascontiguousarray(array))
                # Of memory that is not page-locked it may not have arrived when the copy returns.
                self._gpu.cuda.Context.synchronize()

    def output(self) -> np.ndarray:
        return self._read(2)

    def damage(self) -> list[str]:
        """What the call since `fill` changed beside its output."""
        found = self.strays()
        for index, array in enumerate(self._inputs):
            if self._read(index).tobytes() != array.tobytes():
                found.append(f"writes into its input {'xw'[index]}")
        return found

    def strays(self) -> list[str]:
        """What was written around the arrays since `place`."""
        found = []
        for addresses in self.sets:
            for role, address, shape in zip("xwy", addresses, self._shapes):
                before, behind = np.empty((2, _MARGIN), np.uint8)
                with self._gpu.active():
                    self._gpu.cuda.memcpy_dtoh(before, address - _MARGIN)
                    self._gpu.cuda.memcpy_dtoh(behind, address + 4 * math.prod(shape))
                found += damage(role, np.flatnonzero(before != CANARY) - _MARGIN, behind != CANARY)
        return found

    def _read(self, role: int) -> np.ndarray:
        found = np.empty(self._shapes[role], np.float32)
        with self._gpu.active():
            self._gpu.cuda.memcpy_dtoh(found, self.sets[0][role])
        return found


def _layout(problem: ConvProblem, sets: int) -> tuple[list[tuple[int, int, int]], int]:
    """Where x, w and y of each set begin in a block, and the block's size in bytes."""
    shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
    x, w, y = (-(-4 * math.prod(s) // _ALIGNMENT) * _ALIGNMENT + _MARGIN for s in shapes)
    first = _MARGIN + w
    offsets = [(first + n * (x + y), _MARGIN, first + n * (x + y) + x) for n in range(sets)]
    return offsets, -(-(first + sets * (x + y)) // _SHARED) * _SHARED


class Judge:
    """One problem's numbers, drawn on the GPU in +-0.5, and the output that they give, in memory
    that no other process sees. Elements may be off by `bound`, our own by `_own_bound`. Make one
    with `judge`."""

    def __init__(
        self, gpu: Gpu, problem: ConvProblem, pointers: dict[str, int], largest_error: float
    ) -> None:
        self._gpu, self._problem = gpu, problem
        self._pointers = pointers
        self._ours = ZeroCopyBackend(gpu.index)
        # As `check.beyond` has it, for numbers whose magnitudes are known.
        magnitude = _MAGNITUDE * problem.channels * math.prod(problem.kernel)
        self.bound = min(largest_error * magnitude, _LARGEST_BOUND)
        self._own_bound = _OWN_ERROR * magnitude
        self._checked = False

    def draw(self, role: str, seed: bytes) -> None:
        """Set x or w to the numbers that eight bytes give."""
        with self._gpu.active():
            self._gpu.cuda.memcpy_htod(self._pointers["seed"], np.frombuffer(seed, np.uint8))
            self._gpu.cuda.Context.synchronize()
        self._launch("draw", role, "seed", self._elements(role))

    def expect(self) -> None:
        """Compute what x and w give. Raises `WrongResult` if our own kernel is wrong."""
        x, w, y = (self._pointers[role] for role in ("x", "w", "expected"))
        self._ours.forward(self._problem, x, w, None, y, False)
        if not self._checked:
            self._check()
            self._checked = True

    def copy(self, role: str, address: int) -> None:
        """Copy x or w to where another process has it."""
        with self._gpu.active():
            nbytes = 4 * self._elements(role)
            self._gpu.cuda.memcpy_dtod(address, self._pointers[role], nbytes)
            self._gpu.cuda.Context.synchronize()

    def read(self, role: str, out: np.ndarray) -> None:
        """Copy x, w or what is expected to an array on the host."""
        with self._gpu.active():
            self._gpu.cuda.memcpy_dtoh(out, self._pointers[role])

    def clear(self, address: int, value: float = np.nan) -> None:
        """Fill an output with one value."""
        bits = int(np.float32(value).view(np.uint32))
        with self._gpu.active():
            self._gpu.cuda.memset_d32(address, bits, self._elements("expected"))
            self._gpu.cuda.Context.synchronize()

    def wrong(self, address: int) -> int:
        """How many elements of an output are not what is expected."""
        elements = self._elements("expected")
        return self._count("count_wrong", address, "expected", elements, round(1e9 * self.bound))

    def changed(self, role: str, address: int) -> bool:
        """Whether another process's x or w is not what `copy` made it."""
        return self._count("count_changed", address, role, self._elements(role)) > 0

    def _elements(self, role: str) -> int:
        shapes = {"x": self._problem.x_shape, "w": self._problem.w_shape}
        return math.prod(shapes.get(role, self._problem.y_shape))

    def _count(self, function: str, address: int, role: str, *numbers: int) -> int:
        self._pointers["theirs"] = address
        with self._gpu.active():
            self._gpu.cuda.memset_d32(self._pointers["count"], 0, 1)
        self._launch(function, "count", "theirs", role, *numbers)
        count = np.empty(1, np.uint32)
        self.read("count", count)
        return int(count[0])

    def _launch(self, function: str, *arguments: str | int) -> None:
        launch = Launch(function, (_BLOCKS, 1, 1), (_THREADS, 1, 1), arguments)
        plan = Plan(_JUDGE, (), (launch,))
        with self._gpu.active(), self._gpu.lane() as lane:
            lane.launch(launcher.load(self._gpu, plan), self._pointers)
            lane.wait()

    def _check(self) -> None:
        """Compare some images of what our own kernel gives with the oracle."""
        problem = self._problem
        w = np.empty(problem.w_shape, np.float32)
        self.read("w", w)
        one = dataclasses.replace(problem, batch=1)
        for image in {0, *(secrets.randbelow(problem.batch) for _ in range(_SAMPLED))}:
            x, y = np.empty(one.x_shape, np.float32), np.empty(one.y_shape, np.float32)
            with self._gpu.active():
                self._gpu.cuda.memcpy_dtoh(x, self._pointers["x"] + image * x.nbytes)
                self._gpu.cuda.memcpy_dtoh(y, self._pointers["expected"] + image * y.nbytes)
            if not np.abs(y - oracle.forward(one, x, w)).max() <= self._own_bound:
                raise WrongResult(f"this package's own CUDA kernel is wrong ({problem})")


@contextlib.contextmanager
def judge(gpu: Gpu, problem: ConvProblem, largest_error: float) -> Iterator[Judge]:
    """A `Judge` of outputs that may be off by so much of the sum of their products' magnitudes, on
    average. Raises `NotEnoughMemory`, and what launching a kernel raises."""
    sizes = {
        **{"x": problem.x_shape, "w": problem.w_shape, "expected": problem.y_shape},
        **{"count": (1,), "seed": (2,)},
    }
    with contextlib.ExitStack() as stack:
        with gpu.active():
            pointers = {
                name: stack.enter_context(gpu.lane(4 * math.prod(shape))).device
                for name, shape in sizes.items()
            }
        yield Judge(gpu, problem, pointers, largest_error)
