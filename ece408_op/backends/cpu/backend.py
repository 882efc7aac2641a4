"""The fast CPU kernels, on the best instruction set; `choice` says which one."""

from __future__ import annotations

from ... import settings
from ...errors import InvalidSetting
from ...problem import ConvProblem
from .. import Backend, Done, NativeFunction
from . import choice, native


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
    ) -> Done:
        self.require_bias(problem, bias)
        kernel = choice.forward_kernel(problem, native.LANES[_isa()])
        return _run(kernel, "forward", problem, x, w, bias, y, accumulate=accumulate)

    def native_function(self, problem: ConvProblem) -> NativeFunction:
        isa = _isa()
        name = f"{choice.forward_kernel(problem, native.LANES[isa])}_forward"
        address = native.address(name, problem.dtype)
        return NativeFunction(address, settings.threads(), native.ISA_CODES[isa])

    def backward_data(
        self, problem: ConvProblem, w: int, dy: int, dx: int, accumulate: bool
    ) -> Done:
        kernel = choice.backward_kernel(problem, native.LANES[_isa()])
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
    ) -> Done:
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
        return Done(kernel)


def _run(
    kernel: str, direction: str, problem: ConvProblem, *arrays: int | None, accumulate: bool
) -> Done:
    isa = _isa()
    native.run(
        f"{kernel}_{direction}",
        problem,
        *arrays,
        accumulate=accumulate,
        threads=settings.threads(),
        isa=isa,
    )
    return Done(f"{kernel}_{isa}")


def _isa() -> str:
    """The instruction set to compute with. Raises `InvalidSetting` if this CPU lacks it."""
    asked, available = settings.isa(), native.isas()
    if asked is None:
        return available[0]
    if asked not in available:
        raise InvalidSetting(f"this CPU has no {asked} (ECE408_ISA); it has {', '.join(available)}")
    return asked
