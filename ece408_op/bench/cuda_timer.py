"""Timing of the CUDA kernels on the GPU by events, with checks of results before and after."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.cuda.kernel_plan import ARCHITECTURES, Code, Kernel, Launch, Plan, Target
from ..backends.cuda.kernels import catalog
from ..backends.cuda.runtime import launcher, pause
from ..backends.cuda.runtime.device import BEGIN, COMPUTED, Gpu, Lane
from ..backends.cuda.work import OVER_BATCH, shape_of
from ..problem import ConvProblem
from . import oracle
from .checker import ARRAYS, largest_error

_WARM_UP = 3
# Delay before the timed launch: the host takes about 20 microseconds between launches.
_PAUSE_US = 200
_CHECKED_IMAGES = 8
# Multiply-adds of the checked images: about a second of the reference.
_CHECKED_PRODUCTS = 4e9
# Bytes of fresh random numbers; larger arrays repeat them.
_RANDOM_BYTES = 1 << 28
_NAN = 0xFFFFFFFF
_COUNT = Code(
    "count_nonfinite",
    "measuring/count_nonfinite.cu",
    ARCHITECTURES,
    "float32",
    float32_accurate=True,
)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of each timed run, and the larger of the relative L2 errors before and after.

    `failure` says how the results were wrong, or is `None`.
    """

    samples_ms: list[float]
    error: float
    failure: str | None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


class Bench:
    """One direction's arrays on the GPU, with uniformly distributed inputs in +-0.5.

    The oracle checks some images of results per image; the strict kernel checks gradients for w.
    Use it within `bench`, with the GPU's context current.
    """

    def __init__(
        self, gpu: Gpu, problem: ConvProblem, direction: str, pointers: dict[str, int]
    ) -> None:
        self.gpu = gpu
        self.problem = problem
        self._direction, self._pointers = direction, pointers
        self._output, *self._inputs = roles(direction)
        self._pause = pause.load(gpu, _PAUSE_US)
        rng = np.random.default_rng(408)
        self._images = self._some_images(rng)
        kept = [self._fill(role, rng) for role in self._inputs]
        if self._output in OVER_BATCH:
            checked = dataclasses.replace(problem, batch=len(self._images))
            self._expected = getattr(oracle, direction)(checked, *kept)
        else:
            self._expected = self._strictly()

    def time(self, kernel: Kernel, samples: int, plan: Plan | None = None) -> Timing:
        """Time `samples` runs of a kernel, by its own plan unless another is given.

        Raises the errors of compiling, loading and launching.
        """
        plan = plan or kernel.plan(self.problem, self.gpu.capability, False)
        loaded = launcher.load(self.gpu, plan)
        with loaded.lock, self.gpu.lane(plan.workspace_bytes) as lane:
            pointers = {**self._pointers, "workspace": lane.device}
            before = self._checked(loaded, pointers, lane)
            times = [self._timed(loaded, pointers, lane) for _ in range(_WARM_UP + samples)]
            after = self._checked(loaded, pointers, lane)
        error, failure = max(before[0], after[0]), before[1] or after[1]
        # This comparison also rejects NaN.
        if failure is None and not error <= largest_error(kernel, self.problem):
            failure = f"the relative L2 error is {error:.1e}"
        return Timing([1e3 * seconds for seconds in times[_WARM_UP:]], error, failure)

    def launch(self, loaded: launcher.LoadedPlan) -> None:
        """Run once and wait."""
        with loaded.lock, self.gpu.lane(loaded.plan.workspace_bytes) as lane:
            self._once(loaded, {**self._pointers, "workspace": lane.device}, lane)

    def _once(self, loaded: Any, pointers: dict[str, int], lane: Lane) -> None:
        lane.launch(loaded, pointers)
        lane.wait()

    def _timed(self, loaded: Any, pointers: dict[str, int], lane: Lane) -> float:
        """Return the seconds that one run takes on the GPU."""
        lane.launch(self._pause, {})
        lane.mark(BEGIN)
        lane.launch(loaded, pointers)
        lane.mark(COMPUTED)
        lane.wait()
        return lane.seconds(BEGIN, COMPUTED)

    def _checked(
        self, loaded: Any, pointers: dict[str, int], lane: Lane
    ) -> tuple[float, str | None]:
        """Return the error of a run onto NaN, and its failure or `None`."""
        elements = math.prod(shape_of(self.problem, self._output))
        self.gpu.cuda.memset_d32(pointers[self._output], _NAN, elements)
        self._once(loaded, pointers, lane)
        missing = self._count_nonfinite(elements, lane)
        found = self._read().astype(np.float64)
        error = float(np.linalg.norm(found - self._expected) / np.linalg.norm(self._expected))
        return error, f"{missing} elements are not finite" if missing else None

    def _count_nonfinite(self, elements: int, lane: Lane) -> int:
        arguments = ("count", self._output, elements)
        launch = Launch("count_nonfinite", (2048, 1, 1), (256, 1, 1), arguments)
        plan = Plan(_COUNT, (), (launch,))
        self.gpu.cuda.memset_d32(self._pointers["count"], 0, 1)
        lane.launch(launcher.load(self.gpu, plan), self._pointers)
        lane.wait()
        count = np.empty(1, np.uint32)
        self.gpu.cuda.memcpy_dtoh(count, self._pointers["count"])
        return int(count[0])

    def _some_images(self, rng: np.random.Generator) -> list[int]:
        """Return the numbers of the images to check: the first, the last and some between."""
        problem = self.problem
        products = math.prod(problem.y_shape[1:]) * math.prod(problem.w_shape[1:])
        count = max(1, min(_CHECKED_IMAGES, int(_CHECKED_PRODUCTS / products)))
        if count == 1:
            return [problem.batch - 1]
        return sorted({0, *rng.integers(problem.batch, size=count - 2), problem.batch - 1})

    def _fill(self, role: str, rng: np.random.Generator) -> np.ndarray:
        """Write an input block by block; return the images to check if it has a batch, else all of
        it."""
        shape = shape_of(self.problem, role)
        wanted = self._images if role in OVER_BATCH else range(shape[0])
        row_bytes = 4 * math.prod(shape[1:])
        fresh = max(1, min(shape[0], _RANDOM_BYTES // row_bytes))
        numbers = rng.random((fresh, *shape[1:]), np.float32)
        numbers -= np.float32(0.5)
        for first in range(0, shape[0], fresh):
            block = numbers[: shape[0] - first]
            self.gpu.cuda.memcpy_htod(self._pointers[role] + first * row_bytes, block)
        return numbers[[index % fresh for index in wanted]]

    def _read(self) -> np.ndarray:
        """Read the images to check if the array has a batch, else all of it."""
        shape = shape_of(self.problem, self._output)
        if self._output not in OVER_BATCH:
            everything = np.empty(shape, np.float32)
            self.gpu.cuda.memcpy_dtoh(everything, self._pointers[self._output])
            return everything
        images = np.empty((len(self._images), *shape[1:]), np.float32)
        for image, index in zip(images, self._images):
            start = self._pointers[self._output] + int(index) * image.nbytes
            self.gpu.cuda.memcpy_dtoh(image, start)
        return images

    def _strictly(self) -> np.ndarray:
        """Return the result of the strict kernel."""
        self.launch(launcher.load(self.gpu, strict_plan(self.gpu, self.problem, self._direction)))
        return self._read().astype(np.float64)


def strict_plan(gpu: Target, problem: ConvProblem, direction: str) -> Plan:
    """Return the plan that checks gradients for w."""
    kernel = catalog.default(problem, direction, gpu.capability, "strict")
    return kernel.plan(problem, gpu.capability, False)


def roles(direction: str) -> list[str]:
    """Return the arrays of a direction, the output first, without a bias."""
    return [role for role in ARRAYS[direction] if role != "bias"]


@contextlib.contextmanager
def bench(gpu: Gpu, problem: ConvProblem, direction: str = "forward") -> Iterator[Bench]:
    """Yield a `Bench` for a direction, "forward", "backward_data" or "backward_weight", of a
    float32 problem without bias. Raises `NotEnoughMemory`."""
    sizes = {role: math.prod(shape_of(problem, role)) for role in roles(direction)}
    with gpu.active(), contextlib.ExitStack() as lanes:
        pointers = {
            name: lanes.enter_context(gpu.lane(4 * size)).device
            for name, size in {**sizes, "count": 1}.items()
        }
        yield Bench(gpu, problem, direction, pointers)
