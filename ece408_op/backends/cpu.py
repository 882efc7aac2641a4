"""The fast CPU kernels, on the best instruction set.

`depthwise`, `direct` and `winograd` for what they do, else `general`.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import settings
from ..errors import InvalidSetting
from ..problem import ConvProblem
from . import Backend, native


class NativeFunction(NamedTuple):
    """The address of a function of the compiled kernels, and its last two arguments."""

    address: int
    threads: int
    isa: int


class CpuBackend(Backend):
    """Every problem in every direction; float16 is summed in float32.

    `settings.isa` forces an instruction set and `settings.threads` gives the number of threads;
    no result depends on the latter. All methods raise `InvalidSetting` for an instruction set
    that this CPU lacks, and `NotEnoughMemory`.
    """

    name = "cpu"

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        return None

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> str:
        self.require_bias(problem, bias)
        kernel = _forward_kernel(problem, native.LANES[_isa()])
        return _run(kernel, "forward", problem, x, w, bias, y, accumulate=accumulate)

    def forward_function(self, problem: ConvProblem) -> NativeFunction:
        """What `forward` would call; its last argument is the number of an instruction set."""
        isa = _isa()
        name = f"{_forward_kernel(problem, native.LANES[isa])}_forward"
        address = native.address(name, problem.dtype)
        return NativeFunction(address, settings.threads(), native.ISA_CODES[isa])

    def backward_data(
        self, problem: ConvProblem, w: int, dy: int, dx: int, accumulate: bool
    ) -> str:
        kernel = _backward_kernel(problem, native.LANES[_isa()])
        return _run(kernel, "backward_data", problem, w, dy, dx, accumulate=accumulate)

    def backward_weight(
        self,
        problem: ConvProblem,
        x: int,
        dy: int,
        dw: int | None,
        dbias: int | None,
        accumulate_w: bool,
        accumulate_bias: bool,
    ) -> str:
        kernel = f"general_{_isa()}"
        if dw is not None:
            _run("general", "backward_weight", problem, x, dy, dw, accumulate=accumulate_w)
        if dbias is not None:
            # Reads dy once and adds: the plain loop is as fast as memory is.
            native.run(
                "reference_backward_bias",
                problem,
                *(dy, dbias),
                accumulate=accumulate_bias,
                threads=settings.threads(),
            )
        return kernel


# Products of a sum up to which `direct` is faster for padded images; kernels/cpu/deep.h, with
# filters as lanes, has the others.
_DIRECT_PADDED = 128
# Products of a sum from which on `general`, which takes it in blocks, loses less to rounding.
_LONG = 1536
# Channels of x from which on the gradient for it fills register tiles.
_TILED = 3
# Images, channels and filters from which on packing the weights of a single tap pays for lanes
# that are all used, where planes would fill less than such a share of them.
_PACKS, _DEEP, _FULL = 8, 128, 0.8
# Products of a sum from which on fewer of them pay for what `winograd` does besides.
_PAIRED = 75


def _forward_kernel(problem: ConvProblem, lanes: int) -> str:
    if _is_depthwise(problem):
        return "depthwise"
    if _is_flat(problem, lanes):
        return "direct"
    if not _forward_is_direct(problem, lanes):
        return "general"
    return _direct_or_winograd(problem, _products(problem, problem.channels))


def _backward_kernel(problem: ConvProblem, lanes: int) -> str:
    if _is_depthwise(problem) and problem.stride == (1, 1) and problem.filters == problem.channels:
        return "depthwise"
    if _is_flat(problem, lanes) and _has_unit_steps(problem):
        return "direct"
    if not _backward_is_direct(problem, lanes):
        return "general"
    return _direct_or_winograd(problem, _products(problem, problem.filters))


def _is_depthwise(problem: ConvProblem) -> bool:
    """Groups of one channel, as kernels/cpu/shape.h's `depthwise_suits` has them."""
    stride = problem.stride[0] == problem.stride[1] <= (2 if problem.dilate == (1, 1) else 1)
    alone = 1 < problem.groups == problem.channels
    return alone and stride and problem.kernel in ((3, 3), (5, 5)) and problem.dtype == "float32"


def _is_flat(problem: ConvProblem, lanes: int) -> bool:
    """A single tap and no border: an image is one row of the pixels that the strides pick.

    Not for many images whose small planes would leave lanes idle; `general` packs their weights.
    """
    flat = (problem.kernel, problem.pad, problem.groups) == ((1, 1), (0, 0), 1)
    pixels = problem.out_height * problem.out_width
    idle = pixels < _FULL * lanes * -(-pixels // lanes)
    packs = problem.batch >= _PACKS and min(problem.channels, problem.filters) >= _DEEP
    fits = problem.dtype == "float32" and pixels >= lanes
    return flat and fits and not (idle and packs)


def _direct_or_winograd(problem: ConvProblem, products: int) -> str:
    """`winograd` takes kernels of odd height, two output rows at a time."""
    paired = problem.kernel[0] % 2 == 1 and problem.kernel[0] > 1
    return "winograd" if paired and products >= _PAIRED else "direct"


def _forward_is_direct(problem: ConvProblem, lanes: int) -> bool:
    """The course's layers, and padded ones of few channels or filters."""
    products = _products(problem, problem.channels)
    if not _has_unit_steps(problem) or products > _LONG or problem.out_width < lanes:
        return False
    few = problem.filters < lanes or products < _DIRECT_PADDED
    return problem.pad == (0, 0) or few


def _backward_is_direct(problem: ConvProblem, lanes: int) -> bool:
    """The gradient for x is a padded convolution of dy with as many filters as x has channels."""
    fits = all(pad < kernel for pad, kernel in zip(problem.pad, problem.kernel))
    products = _products(problem, problem.filters)
    if not fits or products > _LONG or problem.channels < _TILED:
        return False
    few = problem.channels < lanes or products < _DIRECT_PADDED
    return _has_unit_steps(problem) and few and problem.width >= lanes


def _has_unit_steps(problem: ConvProblem) -> bool:
    unit = (problem.stride, problem.dilate, problem.groups) == ((1, 1), (1, 1), 1)
    return unit and problem.dtype == "float32"


def _products(problem: ConvProblem, channels: int) -> int:
    return channels * problem.kernel[0] * problem.kernel[1]


def _run(
    kernel: str, direction: str, problem: ConvProblem, *arrays: int | None, accumulate: bool
) -> str:
    isa = _isa()
    native.run(
        f"{kernel}_{direction}",
        problem,
        *arrays,
        accumulate=accumulate,
        threads=settings.threads(),
        isa=isa,
    )
    return f"{kernel}_{isa}"


def _isa() -> str:
    """The instruction set to compute with. Raises `InvalidSetting` if this CPU lacks it."""
    asked, available = settings.isa(), native.isas()
    if asked is None:
        return available[0]
    if asked not in available:
        raise InvalidSetting(f"this CPU has no {asked} (ECE408_ISA); it has {', '.join(available)}")
    return asked
