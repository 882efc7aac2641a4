"""The ladder's first kernels, which take the layer's shape as arguments."""

from __future__ import annotations

import math

from ....problem import ConvProblem
from .. import gpu_limits
from ..kernel_plan import Code, ConstantCopy, Family, Launch, Layout, Plan, divide_up, entry
from . import layer_macros

_THREADS = 256
_TILE = 16
_COLUMN_BYTES = 256 << 20


def not_plain(problem: ConvProblem) -> str | None:
    """Return why ladder kernels cannot compute it (they need stride 1, no padding, and so on), or
    `None`."""
    for name, only in (("stride", (1, 1)), ("pad", (0, 0)), ("dilate", (1, 1)), ("groups", 1)):
        if getattr(problem, name) != only:
            return f"it computes {name} {only} only, not {getattr(problem, name)}"
    if problem.dtype != "float32":
        return f"it computes float32 only, not {problem.dtype}"
    return None


class Naive(Family):
    """One thread per output element."""

    def why_not(self, problem: ConvProblem) -> str | None:
        return not_plain(problem)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Layout, accumulate: bool) -> Plan:
        launch = _one_each(problem, "y", "x", "w", "bias")
        return Plan(kernel, layer_macros.output(problem.bias, accumulate), (launch,))


def _one_each(problem: ConvProblem, *arrays: str) -> Launch:
    """Return a launch of a thread for each output element."""
    blocks = divide_up(math.prod(problem.y_shape), _THREADS)
    return Launch.line("convolve", blocks, _THREADS, (*arrays, *_sizes(problem)))


class ConstantWeights(Family):
    """One thread per output element, weights in constant memory."""

    def why_not(self, problem: ConvProblem) -> str | None:
        nbytes = _weight_bytes(problem)
        if nbytes > gpu_limits.CONSTANT_BYTES:
            return (
                f"its weights take {nbytes} bytes, and constant memory has "
                f"{gpu_limits.CONSTANT_BYTES}"
            )
        return not_plain(problem)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Layout, accumulate: bool) -> Plan:
        copy = ConstantCopy("weights", "w", _weight_bytes(problem))
        defines = layer_macros.output(problem.bias, accumulate)
        return Plan(kernel, defines, (self._launch(problem),), (copy,))

    def _launch(self, problem: ConvProblem) -> Launch:
        return _one_each(problem, "y", "x", "bias")


class SharedTiles(ConstantWeights):
    """`ConstantWeights` with a tile of the image in shared memory."""

    def why_not(self, problem: ConvProblem) -> str | None:
        nbytes = _tile_bytes(problem)
        if nbytes > gpu_limits.STATIC_SHARED_BYTES:
            return f"a tile and its halo take {nbytes} bytes of shared memory, more than 48 KiB"
        return super().why_not(problem)

    def _launch(self, problem: ConvProblem) -> Launch:
        height, width = _tile(problem)
        tiles = divide_up(problem.out_height, height) * divide_up(problem.out_width, width)
        return Launch(
            "convolve",
            (tiles * problem.batch * problem.filters, 1, 1),
            (width, height, 1),
            ("y", "x", "bias", *_sizes(problem)),
            _tile_bytes(problem),
        )


class Im2col(Family):
    """Explicit im2col, then a matrix product, for as many images at a time as fit into the
    workspace."""

    def why_not(self, problem: ConvProblem) -> str | None:
        elements = math.prod(problem.w_shape[1:]) * problem.out_height * problem.out_width
        if elements >= 1 << 31:
            return f"the columns of one image have {elements} elements, more than 2^31 - 1"
        return not_plain(problem)

    def plan(self, kernel: Code, problem: ConvProblem, layout: Layout, accumulate: bool) -> Plan:
        depth, pixels = math.prod(problem.w_shape[1:]), problem.out_height * problem.out_width
        at_once = min(problem.batch, max(1, _COLUMN_BYTES // (4 * depth * pixels)))
        launches: list[Launch] = []
        for first in range(0, problem.batch, at_once):
            images = min(at_once, problem.batch - first)
            launches += _im2col_launches(problem, first, images, depth, pixels)
        return Plan(
            kernel,
            layer_macros.output(problem.bias, accumulate),
            tuple(launches),
            workspace_bytes=4 * depth * pixels * at_once,
        )


def _im2col_launches(
    problem: ConvProblem, first: int, images: int, depth: int, pixels: int
) -> tuple[Launch, Launch]:
    sizes = (problem.channels, problem.height, problem.width, *problem.kernel)
    blocks, read = divide_up(images * depth * pixels, _THREADS), ("workspace", "x", first, images)
    grid = (_matrix_tiles(problem) * images, 1, 1)
    arguments = ("y", "w", "workspace", "bias", first, problem.filters, depth, pixels)
    return (
        Launch.line("unroll", blocks, _THREADS, (*read, *sizes)),
        Launch("multiply", grid, (_TILE, _TILE, 1), arguments),
    )


class ImplicitGemm(Naive):
    """A matrix product whose columns are gathered from the image."""

    def plan(self, kernel: Code, problem: ConvProblem, layout: Layout, accumulate: bool) -> Plan:
        grid = (_matrix_tiles(problem) * problem.batch, 1, 1)
        arrays, sizes = ("y", "x", "w", "bias"), _sizes(problem)[1:]
        launch = Launch("convolve", grid, (_TILE, _TILE, 1), (*arrays, *sizes))
        return Plan(kernel, layer_macros.output(problem.bias, accumulate), (launch,))


def _matrix_tiles(problem: ConvProblem) -> int:
    pixels = problem.out_height * problem.out_width
    return divide_up(pixels, _TILE) * divide_up(problem.filters, _TILE)


def _sizes(problem: ConvProblem) -> tuple[int, ...]:
    return (
        *(problem.batch, problem.filters, problem.channels, problem.height, problem.width),
        *problem.kernel,
    )


def _weight_bytes(problem: ConvProblem) -> int:
    return 4 * math.prod(problem.w_shape)


def _tile(problem: ConvProblem) -> tuple[int, int]:
    """Return the tile of outputs, one thread each, with the least waste at the borders."""
    width = divide_up(problem.out_width, divide_up(problem.out_width, 32))
    most = _THREADS // width
    return divide_up(problem.out_height, divide_up(problem.out_height, most)), width


def _tile_bytes(problem: ConvProblem) -> int:
    height, width = _tile(problem)
    return 4 * (height + problem.kernel[0] - 1) * (width + problem.kernel[1] - 1)


KERNELS = (
    entry("1_naive", "a thread for each output element, everything from global memory", Naive()),
    entry("2_constant_weights", "weights in constant memory", ConstantWeights()),
    entry("3_shared_tiles", "tiles of the image and their halo in shared memory", SharedTiles()),
    entry("4_im2col", "explicit im2col, then a tiled matrix product", Im2col()),
    entry(
        "5_implicit_gemm",
        "the same matrix product, its columns gathered from the image on the fly",
        ImplicitGemm(),
    ),
)
