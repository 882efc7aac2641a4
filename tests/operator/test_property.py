"""Any convolution against MXNet's own and the oracle: whole numbers, exactly equal."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ece408_op.bench import oracle
from ece408_op.errors import InvalidProblem, surfaced
from ece408_op.problem import ConvProblem

REQUESTS = ("write", "add", "null")


@dataclass(frozen=True)
class Case:
    """A problem, one-dimensional if it has no height, and the requests for gradients."""

    problem: ConvProblem
    one_dimensional: bool
    backend: str | None
    requests: tuple[str, str, str]
    seed: int

    def attributes(self):
        axes = slice(1, 2) if self.one_dimensional else slice(0, 2)
        pairs = {name: getattr(self.problem, name)[axes] for name in ("kernel", "stride", "pad")}
        return {
            **pairs,
            "dilate": self.problem.dilate[axes],
            "num_filter": self.problem.filters,
            "num_group": self.problem.groups,
            "no_bias": not self.problem.bias,
        }

    def shape(self, full):
        return (*full[:2], *full[3:]) if self.one_dimensional and len(full) == 4 else full


@st.composite
def cases(draw):
    one_dimensional = draw(st.sampled_from([False, False, True]))
    groups = draw(st.sampled_from([1, 1, 2, 3, 5]))

    def pair(low, high, alone):
        return (alone if one_dimensional else draw(st.integers(low, high)),
                draw(st.integers(low, high)))  # fmt: skip

    try:
        problem = ConvProblem(
            batch=draw(st.integers(1, 3)),
            channels=groups * draw(st.integers(1, 4)),
            height=1 if one_dimensional else draw(st.integers(1, 13)),
            width=draw(st.integers(1, 21)),
            filters=groups * draw(st.integers(1, 5)),
            kernel=pair(1, 5, 1),
            stride=pair(1, 3, 1),
            pad=pair(0, 3, 0),
            dilate=pair(1, 3, 1),
            groups=groups,
            bias=draw(st.booleans()),
            dtype=draw(st.sampled_from(["float32", "float32", "float64", "float16"])),
        )
    except InvalidProblem:
        assume(False)
    requests = tuple(draw(st.sampled_from(REQUESTS)) for _ in range(3))
    backend = draw(st.sampled_from([None, "cpu", "reference"]))
    return Case(problem, one_dimensional, backend, requests, draw(st.integers(0, 2**16)))


def _run(mx, symbol, case, arrays, dy):
    """Return output and gradients through an executor; gradients start from the values they add
    to."""
    names = symbol.list_arguments()
    grad_req = dict(zip(names, case.requests))
    executor = symbol.simple_bind(
        mx.cpu(),
        grad_req=grad_req,
        type_dict=dict.fromkeys(names, case.problem.dtype),
        data=case.shape(case.problem.x_shape),
    )
    for name, array in zip(names, arrays):
        executor.arg_dict[name][:] = array
        if executor.grad_dict[name] is not None:
            executor.grad_dict[name][:] = 7
    executor.forward(is_train=True)
    executor.backward(mx.nd.array(dy, dtype=case.problem.dtype))
    found = [executor.outputs[0], *(executor.grad_dict[name] for name in names)]
    return [None if array is None else array.asnumpy() for array in found]


def _native_does_not_add(case):
    """MXNet 1.9.1 overwrites the gradient for data of a float64 1x1 convolution instead of
    adding."""
    plain = (case.problem.kernel, case.problem.stride, case.problem.pad) == ((1, 1), (1, 1), (0, 0))
    return plain and case.problem.dtype == "float64" and case.requests[0] == "add"


def _check(mx, case):
    problem = case.problem
    rng = np.random.default_rng(case.seed)
    shapes = [problem.x_shape, problem.w_shape, problem.bias_shape]
    x, w, bias = (rng.integers(-3, 4, shape) for shape in shapes)
    bias = bias if problem.bias else np.zeros_like(bias)
    dy = rng.integers(-3, 4, problem.y_shape)
    given_arrays = [
        a.reshape(case.shape(a.shape)) for a in (x, w, bias)[: 3 if problem.bias else 2]
    ]
    data = mx.sym.Variable("data")
    symbol = mx.sym.Custom(
        data, op_type="ece408_conv", name="c", backend=case.backend, **case.attributes()
    )
    flat_dy = dy.reshape(case.shape(dy.shape))
    with surfaced():
        ours = _run(mx, symbol, case, given_arrays, flat_dy)
    expected = []
    exact = oracle.every_direction(problem, x, w, bias, dy).values()
    for request, array in zip(("write", *case.requests), exact):
        total = array + 7 if request == "add" else array
        rounded = total.astype(problem.dtype).reshape(case.shape(total.shape))
        expected.append(None if request == "null" else rounded)
    references = [expected[: len(ours)]]
    if problem.dtype != "float16":
        native = mx.sym.Convolution(data, name="c", **case.attributes())
        references.append(_run(mx, native, case, given_arrays, flat_dy))
        if _native_does_not_add(case):
            references[1][1] = ours[1]
    for reference in references:
        for found, wanted in zip(ours, reference):
            assert (found is None) == (wanted is None)
            if wanted is not None:
                assert found.dtype == problem.dtype
                np.testing.assert_array_equal(found, wanted)


def _property(examples):
    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck),
        derandomize=bool(os.environ.get("CI")),
    )  # fmt: skip
    @given(case=cases())
    def check(mx, case):
        _check(mx, case)

    return check


test_any_convolution = _property(100)
test_any_convolution_at_length = pytest.mark.slow(_property(2000))
