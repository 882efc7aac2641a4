"""GPU arrays on which another process computes, and the comparison of its results.

The other process opens this one's memory by CUDA's IPC handles (cuIpcGetMemHandle and
cuIpcOpenMemHandle of the driver API). It never sees the numbers and the expected output, which this
process keeps in other memory.
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

# Margin around each array: canaries, which are NaN as floats.
_MARGIN = 1 << 16
_ALIGNMENT = 256  # as cudaMalloc
# IPC shares memory in whole blocks of this size, with all arrays in them.
_SHARED = 2 << 20
_THREADS, _BLOCKS = 256, 2048
_SAMPLED = 2
# Mean magnitude of a product of two numbers drawn from +-0.5.
_MAGNITUDE = 1 / 16
_OWN_ERROR = 1e-5
# kernels/cuda/measuring/judge.cu takes it as a 32-bit multiple of 1e-9.
_LARGEST_BOUND = 2.0
_JUDGE = Code("judge", "measuring/judge.cu", ARCHITECTURES, "float32", float32_accurate=True)


class Block:
    """Sets of x, w and y of one problem, all with the same w, between margins, in memory that
    another process opens; `sets` are their addresses."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        # All but the last were too small; another process may still have them open.
        self._blocks: list[Any] = []
        self._nbytes = 0
        self.sets: list[tuple[int, int, int]] = []
        self._shapes: list[tuple[int, ...]] = []
        self._inputs: tuple[np.ndarray, ...] = ()

    def close(self) -> None:
        """Free the memory, which no other process may have open."""
        with self._gpu.active():
            for block in self._blocks:
                block.free()
        self._blocks = []

    def reserve(self, problem: ConvProblem, sets: int) -> None:
        """Allocate memory for this number of sets. Raises `NotEnoughMemory`."""
        nbytes = _layout(problem, sets)[1]
        if nbytes > self._nbytes:
            with self._gpu.active(), reported("allocating what another process computes on"):
                self._blocks.append(self._gpu.cuda.mem_alloc(nbytes))
            self._nbytes = nbytes

    def place(self, problem: ConvProblem, sets: int = 1, margins: str = "") -> dict[str, Any]:
        """Lay out `sets` sets, all NaN, always with open margins; return the other process's part
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
                # A copy from pageable memory may still be in progress when it returns.
                self._gpu.cuda.Context.synchronize()

    def output(self) -> np.ndarray:
        return self._read(2)

    def damage(self) -> list[str]:
        """Describe the changes by the call since `fill`, except to its output."""
        found = self.strays()
        for index, array in enumerate(self._inputs):
            if self._read(index).tobytes() != array.tobytes():
                found.append(f"writes into its input {'xw'[index]}")
        return found

    def strays(self) -> list[str]:
        """Describe writes around the arrays since `place`."""
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
    """Return the offsets of x, w and y of each set in a block, and the block's size in bytes."""
    shapes = (problem.x_shape, problem.w_shape, problem.y_shape)
    x, w, y = (-(-4 * math.prod(s) // _ALIGNMENT) * _ALIGNMENT + _MARGIN for s in shapes)
    first = _MARGIN + w
    offsets = [(first + n * (x + y), _MARGIN, first + n * (x + y) + x) for n in range(sets)]
    return offsets, -(-(first + sets * (x + y)) // _SHARED) * _SHARED


class Judge:
    """One problem's numbers, drawn on the GPU from +-0.5, and the expected output, in memory that
    no other process sees. Elements may be off by `bound`, our own by `_own_bound`. Create it with
    `judge`."""

    def __init__(
        self, gpu: Gpu, problem: ConvProblem, pointers: dict[str, int], largest_error: float
    ) -> None:
        self._gpu, self._problem = gpu, problem
        self._pointers = pointers
        self._ours = ZeroCopyBackend(gpu.index)
        # As in `check.beyond`, for numbers of known magnitude.
        magnitude = _MAGNITUDE * problem.channels * math.prod(problem.kernel)
        self.bound = min(largest_error * magnitude, _LARGEST_BOUND)
        self._own_bound = _OWN_ERROR * magnitude
        self._checked = False

    def draw(self, role: str, seed: bytes) -> None:
        """Draw x or w from a seed of eight bytes."""
        with self._gpu.active():
            self._gpu.cuda.memcpy_htod(self._pointers["seed"], np.frombuffer(seed, np.uint8))
            self._gpu.cuda.Context.synchronize()
        self._launch("draw", role, "seed", self._elements(role))

    def expect(self) -> None:
        """Compute the expected output of x and w. Raises `WrongResult` if our own kernel is
        wrong."""
        x, w, y = (self._pointers[role] for role in ("x", "w", "expected"))
        self._ours.forward(self._problem, x, w, None, y, False)
        if not self._checked:
            self._check()
            self._checked = True

    def copy(self, role: str, address: int) -> None:
        """Copy x or w to the other process's array."""
        with self._gpu.active():
            nbytes = 4 * self._elements(role)
            self._gpu.cuda.memcpy_dtod(address, self._pointers[role], nbytes)
            self._gpu.cuda.Context.synchronize()

    def read(self, role: str, out: np.ndarray) -> None:
        """Copy x, w or the expected output to a host array."""
        with self._gpu.active():
            self._gpu.cuda.memcpy_dtoh(out, self._pointers[role])

    def clear(self, address: int, value: float = np.nan) -> None:
        """Fill an output with one value."""
        bits = int(np.float32(value).view(np.uint32))
        with self._gpu.active():
            self._gpu.cuda.memset_d32(address, bits, self._elements("expected"))
            self._gpu.cuda.Context.synchronize()

    def wrong(self, address: int) -> int:
        """Return the number of wrong elements of an output."""
        elements = self._elements("expected")
        return self._count("count_wrong", address, "expected", elements, round(1e9 * self.bound))

    def changed(self, role: str, address: int) -> bool:
        """Return whether the other process's x or w differs from what `copy` wrote."""
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
        """Compare some images of our own kernel's output with the oracle."""
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
    """Provide a `Judge` whose outputs may be off by this fraction of the average sum of their
    products' magnitudes. Raises `NotEnoughMemory`, and what launching a kernel raises."""
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
