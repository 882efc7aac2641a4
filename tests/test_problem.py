"""`ConvProblem`: text form, validation, sizes and costs."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ece408_op.errors import Ece408Error, InvalidProblem
from ece408_op.problem import ITEM_BYTES, ConvProblem

PLAIN = ConvProblem(batch=100, channels=12, height=33, width=33, filters=24, kernel=(5, 5))


@st.composite
def problems(draw):
    def number(least, most):
        return draw(st.integers(least, most))

    def pair(least, most):
        return (number(least, most), number(least, most))

    kernel, dilate, pad, groups = pair(1, 7), pair(1, 3), pair(0, 4), number(1, 4)
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilate, pad)]
    return ConvProblem(
        batch=number(1, 9999),
        channels=groups * number(1, 9),
        height=least[0] + number(0, 40),
        width=least[1] + number(0, 40),
        filters=groups * number(1, 9),
        kernel=kernel,
        stride=pair(1, 4),
        pad=pad,
        dilate=dilate,
        groups=groups,
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(sorted(ITEM_BYTES))),
    )


@given(problems())
def test_text_form_reproduces_the_problem(problem):
    assert ConvProblem.parse(str(problem)) == problem
    assert hash(ConvProblem.parse(str(problem))) == hash(problem)
    assert " " not in str(problem)


@given(problems())
def test_output_size_counts_the_places_a_kernel_fits(problem):
    for axis, size, out in (
        (0, problem.height, problem.out_height),
        (1, problem.width, problem.out_width),
    ):
        last = size + 2 * problem.pad[axis] - 1
        reach = problem.dilate[axis] * (problem.kernel[axis] - 1)
        starts = range(0, last + 1, problem.stride[axis])
        assert out == sum(start + reach <= last for start in starts)


def test_text_forms():
    assert str(PLAIN) == "b100,c12,h33,w33,m24,k5x5"
    full = "b1,c4,h9,w8,m6,k3x2,s2x1,p1x0,d1x2,g2,bias,float64"
    assert str(ConvProblem.parse(full)) == full
    assert ConvProblem.parse("b100, c12, h33, w33, m24, k5") == PLAIN
    assert ConvProblem.parse("k5,s1,p0,m24,w33,h33,c12,b100,g1,float32") == PLAIN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read '' in ''"),
        ("b1,c1,h3,w3,m1,k3,z4", "cannot read 'z4'"),
        ("b1x2,c1,h3,w3,m1,k3", "cannot read 'b1x2'"),
        ("b1,c1,h3,w3,m1,k-3", "cannot read 'k-3'"),
        ("b1,c1,h3,w3,m1,k3x3x3", "cannot read 'k3x3x3'"),
        ("b1,c1,h3,w3,m1,k3,int8", "cannot read 'int8'"),
        ("b1,c1,h3,w3,m1,k3,b2", "'b2' gives batch a second time"),
        ("b1,c1,h3,w3,m1,k3,bias,bias", "'bias' gives bias a second time"),
        ("b1,c1,h3", "lacks width, filters, kernel; a problem looks like"),
        ("b1,c1,h3,w3,m1,k4", "covers 4x4 pixels"),
    ],
)
def test_text_that_is_no_problem(text, message):
    with pytest.raises(InvalidProblem) as caught:
        ConvProblem.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({name: 0}, f"{name} is 0; it must be at least 1 and at most 2147483647")
            for name in ("batch", "channels", "height", "width", "filters", "groups")
        ),
        ({"batch": -3}, "batch is -3; it must be at least 1 and at most 2147483647"),
        *(
            ({name: (1, 0)}, f"{name} is (1, 0); both numbers must be at least 1 and at most")
            for name in ("kernel", "stride", "dilate")
        ),
        ({"pad": (0, -1)}, "pad is (0, -1); both numbers must be at least 0 and at most"),
        *(
            ({name: (1, number)}, f"{name} is (1, {number}); both numbers must be at least")
            for name in ("kernel", "stride", "dilate", "pad")
            for number in (2**31, 2**63, 2**64 + 1)
        ),
        ({"batch": 2**64 + 1}, "batch is 18446744073709551617; it must be at least 1 and at most"),
        ({"groups": True}, "groups is True; it must be of whole numbers"),
        ({"stride": (True, 1)}, "stride is (True, 1); it must be of whole numbers"),
        ({"pad": 1}, "pad is 1; it must be two whole numbers"),
        ({"pad": (2**30, 2**30)}, "with its padding, has more than the 140737488355328 elements"),
        ({"dtype": "int8"}, "dtype int8 is not supported; use one of float16, float32, float64"),
        ({"groups": 5}, "num_group 5 must divide both the 12 input channels and the 24 filters"),
        ({"groups": 8}, "num_group 8 must divide"),
        ({"groups": 24, "channels": 12}, "num_group 24 must divide"),
        (
            {"kernel": (34, 5)},
            "kernel (34, 5) with dilate (1, 1) covers 34x5 pixels, "
            "more than the padded input's 33x33",
        ),
        (
            {"dilate": (1, 9), "pad": (0, 1)},
            "covers 5x37 pixels, more than the padded input's 33x35",
        ),
    ],
)
def test_problems_that_do_not_exist(change, message):
    fields = {name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__}
    with pytest.raises(InvalidProblem) as caught:
        ConvProblem(**{**fields, **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, (Ece408Error, ValueError))


def test_a_kernel_as_large_as_the_padded_input_has_one_output():
    problem = ConvProblem(2, 1, 4, 3, filters=5, kernel=(3, 5), pad=(1, 1), dilate=(2, 1))
    assert problem.y_shape == (2, 5, 2, 1)


def test_shapes():
    problem = ConvProblem.parse("b2,c4,h9,w8,m6,k3x2,g2")
    assert problem.x_shape == (2, 4, 9, 8)
    assert problem.w_shape == (6, 2, 3, 2)
    assert problem.bias_shape == (6,)
    assert problem.y_shape == (2, 6, 7, 7)


def test_costs_by_hand():
    """The fall 2019 course's second layer: 29x29 outputs, 24 filters of 12 channels, 5x5."""
    outputs, products = 100 * 24 * 29 * 29, 12 * 25
    assert PLAIN.flops == 2 * outputs * products == 1_211_040_000
    elements = 100 * 12 * 33 * 33 + 24 * products + outputs
    assert PLAIN.bytes == 4 * elements == 13_329_600
    half = ConvProblem.parse(f"{PLAIN},g2,bias,float16")
    assert half.flops == PLAIN.flops // 2
    assert half.bytes == 2 * (elements - 24 * products // 2 + 24)


@given(problems())
def test_bytes_are_those_of_the_arrays(problem):
    shapes = [problem.x_shape, problem.w_shape, problem.y_shape]
    shapes += [problem.bias_shape] if problem.bias else []
    item = np.dtype(problem.dtype).itemsize
    assert problem.bytes == sum(item * int(np.prod(shape, dtype=np.int64)) for shape in shapes)


def test_immutable():
    with pytest.raises(FrozenInstanceError):
        PLAIN.batch = 1  # type: ignore[misc]
