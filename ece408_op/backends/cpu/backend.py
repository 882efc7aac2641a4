"""The fast CPU kernels, on the best instruction set; kernels/cpu/choice.cpp chooses among them."""

from __future__ import annotations

from ... import settings
from ...errors import InvalidSetting
from ...problem import ConvProblem
from .. import Backend, Done, NativeFunction
from . import native


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
        return _run("forward", problem, x, w, bias, y, accumulate=accumulate)

    def native_function(self, problem: ConvProblem, direction: str) -> NativeFunction:
        isa = chosen_isa()
        kernel = native.choose(problem, direction, isa)
        of_bias = direction == "backward_weight"
        return NativeFunction(
            native.address(direction, problem.dtype),
            settings.threads(),
            native.ISA_CODES[isa],
            native.kernels().index(kernel),
            f"{kernel}_{isa}",
            native.address("reference_backward_bias", problem.dtype) if of_bias else None,
        )

    def backward_data(
        self, problem: ConvProblem, w: int, dy: int, dx: int, accumulate: bool
    ) -> Done:
        return _run("backward_data", problem, w, dy, dx, accumulate=accumulate)

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
        done = Done("reference")
        if dw is not None:
            done = _run("backward_weight", problem, x, dy, dw, accumulate=accumulate_w)
        if dbias is not None:
            # Reads dy once and adds: the plain loop is as fast as memory is.
            native.run(
                "reference_backward_bias",
                problem,
                *(dy, dbias),
                accumulate=accumulate_bias,
                threads=settings.threads(),
            )
        return done


def _run(direction: str, problem: ConvProblem, *arrays: int | None, accumulate: bool) -> Done:
    isa = chosen_isa()
    kernel = native.choose(problem, direction, isa)
    threads = settings.threads()
    native.run(
        direction,
        problem,
        *arrays,
        accumulate=accumulate,
        threads=threads,
        isa=isa,
        kernel=kernel,
    )
    return Done(f"{kernel}_{isa}")


def chosen_isa() -> str:
    """The instruction set to compute with. Raises `InvalidSetting` if this CPU lacks it."""
    asked, available = settings.isa(), native.isas()
    if asked is None:
        return available[0]
    if asked not in available:
        raise InvalidSetting(f"this CPU has no {asked} (ECE408_ISA); it has {', '.join(available)}")
    return asked
