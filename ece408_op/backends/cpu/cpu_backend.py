"""CPU backend: the optimised kernels; kernels/cpu/api/choice.cpp chooses among them."""

from __future__ import annotations

from typing import Any

from ... import settings
from ...errors import InvalidSetting
from ...problem import ConvProblem
from .. import Backend, Done, NativeFunction
from . import native


class CpuBackend(Backend):
    """A backend for every problem and direction; float16 arrays are summed in float32.

    With `precision` "strict" products and sums are in float64, by kernels that do not split
    numbers; float16 arrays then use the textbook loops. `gradient_precision` applies to gradients.
    Lower precisions than float32 are not faster here.

    `settings.isa` forces an instruction set; `settings.threads` sets the number of threads and does
    not affect results. All methods raise `InvalidSetting` for an instruction set that this CPU
    lacks, and `NotEnoughMemory`.
    """

    name = "cpu"

    def __init__(self, precision: str = "float32", gradient_precision: str = "float32") -> None:
        self._precision, self._gradient_precision = precision, gradient_precision

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        return None

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        self.require_bias(problem, bias)
        return _run("forward", self._precision, problem, x, w, bias, y, accumulate=accumulate)

    def native_function(self, problem: ConvProblem, direction: str) -> NativeFunction | None:
        precision = self._precision if direction == "forward" else self._gradient_precision
        is_strict = precision == "strict"
        if is_strict and problem.dtype == "float16":
            return None
        isa = chosen_isa()
        kernel = native.choose(problem, direction, isa, is_strict)
        of_bias = direction == "backward_weight"
        return NativeFunction(
            native.address(direction, problem.dtype, is_strict),
            settings.threads(),
            native.ISA_CODES[isa],
            native.kernels().index(kernel),
            f"{kernel}_{isa}",
            _done(precision),
            native.address("reference_backward_bias", problem.dtype) if of_bias else None,
        )

    def backward_data(
        self, problem: ConvProblem, w: int, dy: int, dx: int, accumulate: bool
    ) -> Done:
        precision = self._gradient_precision
        return _run("backward_data", precision, problem, w, dy, dx, accumulate=accumulate)

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
        precision = self._gradient_precision
        done = Done("reference", _done(precision))
        if dw is not None:
            done = _run("backward_weight", precision, problem, x, dy, dw, accumulate=accumulate_w)
        if dbias is not None:
            # It reads dy once and only adds: the plain loop is memory-bound.
            native.run(
                "reference_backward_bias",
                problem,
                *(dy, dbias),
                accumulate=accumulate_bias,
                threads=settings.threads(),
            )
        return done


def _run(
    direction: str, precision: str, problem: ConvProblem, *arrays: int | None, accumulate: bool
) -> Done:
    how: dict[str, Any] = {"accumulate": accumulate, "threads": settings.threads()}
    is_strict = precision == "strict"
    if is_strict and problem.dtype == "float16":
        native.run(f"reference_{direction}", problem, *arrays, **how)
        return Done("reference", precision)
    isa = chosen_isa()
    kernel = native.choose(problem, direction, isa, is_strict)
    native.run(direction, problem, *arrays, **how, isa=isa, kernel=kernel, strict=is_strict)
    return Done(f"{kernel}_{isa}", _done(precision))


def _done(wanted: str) -> str:
    """Return the precision of results for a requested one."""
    return "strict" if wanted == "strict" else "float32"


def chosen_isa() -> str:
    """Return the instruction set to use. Raises `InvalidSetting` if this CPU lacks it."""
    wanted, available = settings.isa(), native.isas()
    if wanted is None:
        return available[0]
    if wanted not in available:
        raise InvalidSetting(
            f"this CPU has no {wanted} (ECE408_ISA); it has {', '.join(available)}"
        )
    return wanted
