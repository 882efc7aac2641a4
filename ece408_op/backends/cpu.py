"""The fast CPU kernels: what `kernels/cpu/direct.cpp` computes, on the best instruction set."""

from __future__ import annotations

from .. import settings
from ..errors import InvalidSetting
from ..problem import ConvProblem
from . import Backend, native


class CpuBackend(Backend):
    """Forward passes in float32 with stride 1, no padding, dilation 1 and one group.

    `settings.isa` forces an instruction set and `settings.threads` gives the number of threads;
    no result depends on the latter.
    """

    name = "cpu"

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        if direction != "forward":
            return f"direction {direction}: the cpu kernels have forward only"
        if problem.dtype != "float32":
            return f"dtype {problem.dtype}: the cpu kernels have float32 only"
        for attribute, only in (
            ("stride", (1, 1)),
            ("pad", (0, 0)),
            ("dilate", (1, 1)),
            ("groups", 1),
        ):
            value = getattr(problem, attribute)
            if value != only:
                number = only if isinstance(only, int) else only[0]
                return f"{attribute} {value}: the cpu kernels have {attribute} {number} only"
        return None

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> str:
        """As `Backend.forward`; `InvalidSetting` for an instruction set this CPU lacks."""
        self.require(problem, "forward")
        self.require_bias(problem, bias)
        isa = _isa()
        native.run(
            "direct_forward",
            problem,
            *(x, w, bias, y),
            accumulate=accumulate,
            threads=settings.threads(),
            isa=isa,
        )
        return f"direct_{isa}"


def _isa() -> str:
    """The instruction set to compute with. Raises `InvalidSetting` if this CPU lacks it."""
    asked, available = settings.isa(), native.isas()
    if asked is None:
        return available[0]
    if asked not in available:
        raise InvalidSetting(f"this CPU has no {asked} (ECE408_ISA); it has {', '.join(available)}")
    return asked
