"""The CPU kernel `winograd`, forward and the gradient for x, on every instruction set of this CPU.

It is called by name, since a cost model decides whether it is used. Arrays end at forbidden pages
(`guarded`); outputs hold NaN initially (`harness`).
"""

from __future__ import annotations

import itertools

import harness
import numpy as np
import pytest
from cases import every
from harness import forward, inputs, real_inputs

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.bench import oracle
from ece408_op.errors import UnsupportedProblem
from ece408_op.problem import ConvProblem

KERNELS = list(itertools.product((3, 5, 7), repeat=2))


class Winograd(CpuBackend):
    """A backend that computes everything with this kernel."""

    def forward(self, problem, x, w, bias, y, accumulate):
        return self._run("forward", problem, x, w, bias, y, accumulate=accumulate)

    def backward_data(self, problem, w, dy, dx, accumulate):
        return self._run("backward_data", problem, w, dy, dx, accumulate=accumulate)

    @staticmethod
    def _run(direction, problem, *arrays, accumulate):
        native.run(
            direction,
            problem,
            *arrays,
            accumulate=accumulate,
            threads=settings.threads(),
            isa=settings.isa() or native.isas()[0],
            kernel="winograd",
        )
        return "winograd"


winograd = Winograd()


def check_exact(problem, rng, accumulate=False, side="end"):
    """Check both directions; the gradient if padding is smaller than the kernel."""
    fits = all(pad < kernel for pad, kernel in zip(problem.pad, problem.kernel))
    harness.check_exact(winograd, problem, rng, accumulate, side, gradient=fits)


@every(kernel=KERNELS, side=["start", "end"])
def test_every_width_up_to_40(isa, kernel, side, rng):
    for width in range(kernel[1], 41):
        height = kernel[0] + width * 7 % 9
        pad = (width % 3, width % 2)
        problem = ConvProblem(2, 2, height, width, 3, kernel, pad=pad, bias=bool(width % 2))
        check_exact(problem, rng, accumulate=width % 5 == 0, side=side)


@every(kernel=[(3, 3), (5, 5), (7, 7)])
def test_every_height_up_to_30(isa, kernel, rng):
    for height in range(kernel[0], 31):
        check_exact(ConvProblem(1, 2, height, 50 - height, 5, kernel), rng)


@every(bias=[False, True])
def test_every_number_of_filters_up_to_30(isa, bias, rng):
    for filters in range(1, 31):
        check_exact(ConvProblem(2, 3, 8, 21, filters, (3, 5), bias=bias), rng)
        check_exact(ConvProblem(1, 1, 7, 9, filters, (5, 3), bias=bias), rng, accumulate=True)


@every(text=["b1,c40,h40,w66,m9,k3,p1x1", "b2,c64,h31,w33,m3,k7,p3x3"])
def test_images_that_are_taken_in_stretches(isa, text, rng):
    """The transformed images exceed the cache; several threads split them into bands."""
    problem = ConvProblem.parse(text)
    for threads in (1, 2, 5):
        with settings.override(threads=threads):
            check_exact(problem, rng, accumulate=threads == 2)


def test_many_images_at_a_time(isa, rng):
    """Each thread takes several images and prefetches the next; the last one has no next."""
    with settings.override(threads=2):
        check_exact(ConvProblem(300, 2, 9, 11, 3, (5, 5)), rng)


@every(pad=[3, 4, 20])
def test_more_border_than_kernel(isa, pad, rng):
    check_exact(ConvProblem(2, 2, 3, 4, 3, (3, 3), pad=(pad, pad + 1)), rng)


@every(text=["b2,c12,h33,w33,m24,k7", "b1,c9,h40,w41,m7,k3,p1x1"])
def test_results_do_not_depend_on_threads(isa, text, rng):
    harness.check_threads(winograd, ConvProblem.parse(text), rng)


@every(kernel=[(3, 3), (5, 3), (3, 7), (7, 5)], row=range(3, 9))
def test_infinities_and_nans_stay_where_they_belong(isa, kernel, row, rng):
    """A pixel must not affect outputs that do not read it, not even times zero."""
    problem = ConvProblem(2, 3, 13, 27, 5, kernel, pad=(1, 2))
    x, w = real_inputs(problem, rng)
    x[0, 0, row, row + 5], x[0, 1, 12, 26], x[1, 2, 0, 0] = np.inf, np.nan, -np.inf
    expected = np.isfinite(oracle.forward(problem, x, w, None))
    np.testing.assert_array_equal(np.isfinite(forward(winograd, problem, x, w)), expected)


@every(
    case=[
        ("b2,c12,h33,w33,m24,k7", 5e-7),
        ("b2,c6,h22,w22,m16,k5", 3e-7),
        ("b1,c256,h14,w14,m9,k3,p1x1", 1e-6),
    ]
)
def test_error_against_float64(isa, case, rng):
    text, most = case
    assert harness.error(winograd, ConvProblem.parse(text), rng) <= most


@every(
    text=[
        *("b1,c1,h9,w9,m1,k4", "b1,c1,h9,w9,m1,k3x4", "b1,c1,h9,w9,m1,k1x3", "b1,c1,h9,w9,m1,k9"),
        *("b1,c1,h9,w9,m1,k3,s2x1", "b1,c1,h9,w9,m1,k3,d1x2", "b1,c2,h9,w9,m2,k3,g2"),
    ]
)
def test_refuses_what_it_does_not_do(isa, text, rng):
    problem = ConvProblem.parse(text)
    x, w, _ = inputs(problem, rng)
    with pytest.raises(UnsupportedProblem, match="by winograd failed"):
        forward(winograd, problem, x, w)
