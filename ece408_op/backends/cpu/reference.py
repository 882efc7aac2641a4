"""Textbook loops with float64 sums, for every convolution."""

from __future__ import annotations

from ... import settings
from ...problem import ConvProblem
from .. import Backend, Done
from . import native


class ReferenceBackend(Backend):
    """A backend for every problem: any stride, pad, dilate, groups and dtype; slow and simple.

    `strict` only changes how the log of op times names the precision. `settings.threads` sets the
    number of threads and does not affect results.
    """

    name = "reference"

    def __init__(self, strict: bool = False) -> None:
        self._precision = "strict" if strict else "float32"

    def supports(self, problem: ConvProblem, direction: str) -> str | None:
        return None

    def forward(
        self, problem: ConvProblem, x: int, w: int, bias: int | None, y: int, accumulate: bool
    ) -> Done:
        self.require_bias(problem, bias)
        return self._run("forward", problem, x, w, bias, y, accumulate=accumulate)

    def backward_data(
        self, problem: ConvProblem, w: int, dy: int, dx: int, accumulate: bool
    ) -> Done:
        return self._run("backward_data", problem, w, dy, dx, accumulate=accumulate)

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
        done = Done(ReferenceBackend.name, self._exactness("backward_weight"))
        if dbias is not None:
            done = self._run("backward_bias", problem, dy, dbias, accumulate=accumulate_bias)
        if dw is not None:
            done = self._run("backward_weight", problem, x, dy, dw, accumulate=accumulate_w)
        return done

    def _exactness(self, direction: str) -> str:
        """Return the precision that the log of op times names."""
        return self._precision

    def _run(
        self, direction: str, problem: ConvProblem, *arrays: int | None, accumulate: bool
    ) -> Done:
        name, threads = f"reference_{direction}", settings.threads()
        native.run(name, problem, *arrays, accumulate=accumulate, threads=threads)
        return Done(ReferenceBackend.name, self._exactness(direction))
