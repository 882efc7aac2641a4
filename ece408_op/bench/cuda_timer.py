"""Times of the CUDA kernels on the GPU, measured by events, their results checked around it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backends.cuda.plan import ARCHITECTURES, Code, Kernel, Launch, Plan
from ..backends.cuda.runtime import launcher, pause
from ..backends.cuda.runtime.device import BEGIN, COMPUTED, Gpu, Lane
from ..problem import ConvProblem
from . import oracle
from .checker import largest_error

_WARM_UP = 3
# Before what is timed: the host takes some 20 microseconds from one launch to the next.
_PAUSE_US = 200
_CHECKED_IMAGES = 8
_NAN = 0xFFFFFFFF
_COUNT = Code(
    "count_nonfinite", "count_nonfinite.cu", ARCHITECTURES, "float32", float32_accurate=True
)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of each timed run, and the larger of the relative L2 errors before and after.

    `failure` says what was wrong with the results, if anything.
    """

    samples_ms: list[float]
    error: float
    failure: str | None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)


class Bench:
    """One problem's arrays on the GPU, filled with uniformly distributed numbers in +-0.5.

    To be used inside `bench`, with the GPU's context current.
    """

    def __init__(self, gpu: Gpu, problem: ConvProblem, pointers: dict[str, int]) -> None:
        self.gpu = gpu
        self.problem = problem
        self._pointers = pointers
        rng = np.random.default_rng(408)
        self._pause = pause.load(gpu, _PAUSE_US)
        self._w = rng.random(problem.w_shape, np.float32) - np.float32(0.5)
        gpu.cuda.memcpy_htod(pointers["w"], self._w)
        self._images = self._fill(rng)
        checked = dataclasses.replace(problem, batch=len(self._images))
        self._expected = oracle.forward(checked, np.stack(list(self._images.values())), self._w)

    def time(self, kernel: Kernel, samples: int, plan: Plan | None = None) -> Timing:
        """`samples` timed runs of a kernel, by its own plan unless another is given.

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
        # A NaN is not at most anything.
        if failure is None and not error <= largest_error(kernel, self.problem):
            failure = f"the relative L2 error is {error:.1e}"
        return Timing([1e3 * seconds for seconds in times[_WARM_UP:]], error, failure)

    def launch(self, loaded: launcher.LoadedPlan) -> None:
        """One run, waited for."""
        with loaded.lock, self.gpu.lane(loaded.plan.workspace_bytes) as lane:
            self._once(loaded, {**self._pointers, "workspace": lane.device}, lane)

    def _once(self, loaded: Any, pointers: dict[str, int], lane: Lane) -> None:
        lane.launch(loaded, pointers)
        lane.wait()

    def _timed(self, loaded: Any, pointers: dict[str, int], lane: Lane) -> float:
        """The seconds that one run takes on the GPU."""
        lane.launch(self._pause, {})
        lane.mark(BEGIN)
        lane.launch(loaded, pointers)
        lane.mark(COMPUTED)
        lane.wait()
        return lane.seconds(BEGIN, COMPUTED)

    def _checked(
        self, loaded: Any, pointers: dict[str, int], lane: Lane
    ) -> tuple[float, str | None]:
        """The error of a run onto NaN, and what is wrong with it."""
        elements = math.prod(self.problem.y_shape)
        self.gpu.cuda.memset_d32(pointers["y"], _NAN, elements)
        self._once(loaded, pointers, lane)
        missing = self._count_nonfinite(elements, lane)
        found = np.stack([self._read_image(index) for index in self._images]).astype(np.float64)
        error = float(np.linalg.norm(found - self._expected) / np.linalg.norm(self._expected))
        return error, f"{missing} elements are not finite" if missing else None

    def _count_nonfinite(self, elements: int, lane: Lane) -> int:
        launch = Launch("count_nonfinite", (2048, 1, 1), (256, 1, 1), ("count", "y", elements))
        plan = Plan(_COUNT, (), (launch,))
        self.gpu.cuda.memset_d32(self._pointers["count"], 0, 1)
        lane.launch(launcher.load(self.gpu, plan), self._pointers)
        lane.wait()
        count = np.empty(1, np.uint32)
        self.gpu.cuda.memcpy_dtoh(count, self._pointers["count"])
        return int(count[0])

    def _fill(self, rng: np.random.Generator) -> dict[int, np.ndarray]:
        """Write x image block by image block; returns the images to check, by number."""
        batch, image_bytes = self.problem.batch, 4 * math.prod(self.problem.x_shape[1:])
        middle = rng.integers(batch, size=_CHECKED_IMAGES - 2)
        kept: dict[int, np.ndarray] = {}
        step = max(1, (64 << 20) // image_bytes)
        for first in range(0, batch, step):
            shape = (min(step, batch - first), *self.problem.x_shape[1:])
            block = rng.random(shape, np.float32) - np.float32(0.5)
            self.gpu.cuda.memcpy_htod(self._pointers["x"] + first * image_bytes, block)
            for index in {0, *map(int, middle), batch - 1}:
                if first <= index < first + len(block):
                    kept[index] = block[index - first].copy()
        return kept

    def _read_image(self, index: int) -> np.ndarray:
        image = np.empty(self.problem.y_shape[1:], np.float32)
        self.gpu.cuda.memcpy_dtoh(image, self._pointers["y"] + index * image.nbytes)
        return image


@contextlib.contextmanager
def bench(gpu: Gpu, problem: ConvProblem) -> Iterator[Bench]:
    """A `Bench` for a float32 problem without bias. Raises `NotEnoughMemory`."""
    sizes = {"x": problem.x_shape, "w": problem.w_shape, "y": problem.y_shape, "count": (1,)}
    with gpu.active(), contextlib.ExitStack() as lanes:
        pointers = {
            name: lanes.enter_context(gpu.lane(4 * math.prod(shape))).device
            for name, shape in sizes.items()
        }
        yield Bench(gpu, problem, pointers)
