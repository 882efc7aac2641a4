"""1x1 convolutions of halves in NCHW on tensor cores. kernels/cuda/gemm/pointwise_half.cu explains
the algorithm; this module chooses the tiling."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ....problem import ConvProblem
from ..kernel_plan import (
    ARCHITECTURES,
    Apart,
    Capability,
    Code,
    Family,
    Launch,
    Layout,
    Plan,
    divide_up,
    entry,
)
from . import layer_macros
from .pointwise_simt import refused

_THREADS, _WARPS = 256, 8


@dataclass(frozen=True)
class Blocks(Layout):
    """Tiling: filters and positions of a block, channels per step, steps in shared memory."""

    rows: int
    columns: int
    depth: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """The size of the union Shared, which the source asserts."""
        stage = self.rows * (self.depth + 8) + self.depth * (self.columns + 8)
        return max(2 * stage * self.stages, 4 * self.rows * (self.columns + 8))


class Pointwise(Family):
    """The forward pass."""

    spaced = True
    prelude = True
    stores = True

    def why_not(self, problem: ConvProblem) -> str | None:
        return refused(problem)

    def pays(self, problem: ConvProblem, capability: Capability) -> bool:
        # Single elements take more time than implicit_gemm_prepacked.
        return refused(problem) is None and _vector(problem) >= 4

    def layouts(self, problem: ConvProblem, capability: Capability) -> list[Blocks]:
        # Steps of 64 channels have half the waits.
        whole = problem.channels % 64 == 0 or problem.channels > 256
        wide = Blocks(128, 128, 64, 2) if whole else Blocks(128, 128, 32, 3)
        narrow = Blocks(64, 256, 32, 3)
        return [narrow, wide] if problem.filters <= 64 else [wide, narrow]

    def plan(self, kernel: Code, problem: ConvProblem, layout: Blocks, accumulate: bool) -> Plan:
        plane = problem.height * problem.width
        row_tiles = divide_up(problem.filters, layout.rows)
        rows = row_tiles * layout.rows
        nbytes = rows * (2 * divide_up(problem.channels, layout.depth) * layout.depth + 4)
        shared = layout.shared_bytes
        sizes = problem.channels, problem.filters
        macros = (
            *layer_macros.output(problem.bias, accumulate),
            *layout.defines,
            ("VECTOR", _vector(problem)),
            ("SHARED_BYTES", shared),
        )

        def pack(to: str) -> Launch:
            return Launch.line("pack", divide_up(rows, _WARPS), _THREADS, (to, "w", *sizes))

        def multiply(prepared: str) -> Launch:
            arrays = ("y", "x", "bias", prepared, problem.batch, *sizes, plane)
            blocks = row_tiles * divide_up(problem.batch * plane, layout.columns)
            return Launch.line("multiply_pixels", blocks, _THREADS, arrays, shared)

        apart = Apart(
            nbytes,
            Plan(kernel, macros, (pack("y"),)),
            Plan(kernel, macros, (multiply("prepared"),)),
        )
        whole = (pack("workspace"), multiply("workspace"))
        return Plan(kernel, macros, whole, workspace_bytes=nbytes, apart=apart)


def _vector(problem: ConvProblem) -> int:
    """Return how many neighbouring pixels are always in one plane and aligned, up to 8."""
    return math.gcd(problem.height * problem.width, 8)


KERNELS = (
    entry(
        "pointwise_half",
        "1x1 kernels on tensor cores, with x and y of halves or float32 as they are in memory",
        Pointwise(),
        architectures=ARCHITECTURES[1:],
        precision="tf32",
        source="gemm/pointwise_half.cu",
    ),
)
