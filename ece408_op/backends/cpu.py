"""The fast CPU kernels, on the best instruction set: `direct` for what it does, else `general`."""

from __future__ import annotations

from .. import settings
from ..errors import InvalidSetting
from ..problem import ConvProblem
from . import Backend, native


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
        kernel = "direct" if _is_direct(problem, native.LANES[_isa()]) else "general"
        return _run(kernel, "forward", problem, x, w, bias, y, accumulate=accumulate)

    def backward_data(
        self, problem: ConvProblem, w: int, dy: int, dx: int, accumulate: bool
    ) -> str:
        return _run("general", "backward_data", problem, w, dy, dx, accumulate=accumulate)

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


# Output pixels from which on `direct` is faster for a 1x1 kernel.
_DIRECT_1X1 = 256


def _is_direct(problem: ConvProblem, lanes: int) -> bool:
    """Whether the kernel `direct` computes this: the course's layers, large 1x1, and the like."""
    plain = (problem.stride, problem.pad, problem.dilate) == ((1, 1), (0, 0), (1, 1))
    if not plain or problem.groups != 1 or problem.dtype != "float32":
        return False
    if problem.kernel == (1, 1):
        return problem.out_height * problem.out_width >= _DIRECT_1X1
    return problem.out_width >= lanes


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
