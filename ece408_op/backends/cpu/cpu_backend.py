"""CPU backend: the optimised kernels; kernels/cpu/api/choice.cpp chooses among them."""

from __future__ import annotations

from typing import Any

from ... import settings
from ...errors import InvalidSetting
from ...problem import ConvProblem
from .. import Done, NativeFunction
from . import native
from .reference import ReferenceBackend


class CpuBackend(ReferenceBackend):
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

    def native_function(self, problem: ConvProblem, direction: str) -> NativeFunction | None:
        precision = self._exactness(direction)
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
            precision,
            native.address("reference_backward_bias", problem.dtype) if of_bias else None,
        )

    def _exactness(self, direction: str) -> str:
        wanted = self._precision if direction == "forward" else self._gradient_precision
        return "strict" if wanted == "strict" else "float32"

    def _run(
        self, direction: str, problem: ConvProblem, *arrays: int | None, accumulate: bool
    ) -> Done:
        precision = self._exactness(direction)
        is_strict = precision == "strict"
        # The plain loop of the bias reads dy once and only adds: it is memory-bound.
        if direction == "backward_bias" or (is_strict and problem.dtype == "float16"):
            return super()._run(direction, problem, *arrays, accumulate=accumulate)
        isa = chosen_isa()
        kernel = native.choose(problem, direction, isa, is_strict)
        how: dict[str, Any] = {"accumulate": accumulate, "threads": settings.threads()}
        native.run(direction, problem, *arrays, **how, isa=isa, kernel=kernel, strict=is_strict)
        return Done(f"{kernel}_{isa}", precision)


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
