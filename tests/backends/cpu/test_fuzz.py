"""Every CPU kernel on random problems (`studies.cpu_fuzz`), with and without infinities and NaN."""

import dataclasses

import numpy as np
import pytest
from cases import every, first
from studies import cpu_fuzz
from studies.cpu_fuzz import Case

from ece408_op.backends.cpu import native
from ece408_op.errors import InvalidSetting
from ece408_op.problem import ConvProblem


def check(case):
    _, failures = cpu_fuzz.run(case)
    assert not failures, str(case)


def test_random_problems():
    for case in cpu_fuzz.cases(120, seed=408):
        check(case)


@pytest.mark.slow
def test_random_problems_at_length():
    for case in cpu_fuzz.cases(20000, seed=409):
        check(case)


@every(
    accumulate=[False, True],
    text=[
        *("b2,c3,h13,w27,m5,k3,p1x1,bias", "b2,c3,h13,w27,m5,k7x5,p2x3", "b1,c3,h9,w40,m4,k5"),
        *("b2,c4,h13,w20,m4,k3,p1x1,g4,bias", "b2,c20,h13,w20,m33,k3,p1x1", "b2,c3,h9,w30,m5,k1"),
        *("b2,c20,h9,w9,m20,k3,s2x2,p1x1", "b2,c3,h21,w21,m7,k9,s9x9", "b9,c2,h6,w7,m5,k6x7"),
        *("b2,c3,h12,w20,m9,k4x3,s3x2,p2x2,d1x2", "b2,c3,h9,w10,m5,k9x10,float16"),
        *("b2,c12,h9,w12,m40,k3,p1x1,float16", "b3,c4,h9,w9,m10,k3,s2x2,g2,float64"),
        *("b2,c17,h12,w20,m9,k1,s2x2", "b2,c34,h7,w6,m9,k1x3,p0x1"),
        *("b1,c26,h12,w24,m2,k5x3", "b1,c26,h9,w24,m2,k4x3", "b1,c26,h14,w24,m40,k3x3,p1x1"),
        # Row pairs that are not adjacent, with a stride, and of even height.
        *("b1,c26,h24,w24,m40,k3x3,p2x2,d2x2", "b1,c4,h40,w40,m20,k7x5,s2x2,p3x2"),
        *("b1,c26,h24,w24,m40,k4x4,p1x1", "b2,c3,h13,w27,m5,k5x3,p1x2", "b2,c3,h13,w27,m5,k3x7"),
        *(
            f"b1,c3,h31,w45,m3,k{kernel},{steps},p2x2,g3"
            for kernel in (3, 5)
            for steps in ("s1x1", "s2x2", "d2x2", "d3x1")
        ),
    ],
)
def test_infinities_and_nans_are_where_the_textbook_has_them(isa, text, accumulate):
    problem, seed = ConvProblem.parse(text), int(accumulate)
    check(Case(problem, isa, 2, "end", accumulate, special=True, seed=seed))


# The batches exceed what a kernel transposes, or spreads among zeros, at a time.
BATCHES = ("b5,c48,h90,w80,m40,k1", "b3,c70,h121,w143,m16,k1,s1x2", "b3,c40,h80,w92,m40,k1x3")


@pytest.mark.parametrize(
    ("isa", "text"), first(1, [(isa, text) for isa in native.isas() for text in BATCHES])
)
def test_batches_of_which_some_images_are_laid_out_at_a_time(isa, text):
    check(Case(ConvProblem.parse(text), isa, 2, "end", accumulate=False, special=False, seed=1))


def test_inputs_too_large_to_add_up_give_no_nan(isa):
    """`winograd` adds pixels before it multiplies; these sums overflow although each product is
    small."""
    problem = ConvProblem.parse("b1,c2,h9,w40,m3,k3")
    x = np.full(problem.x_shape, 3e38, np.float32)
    w = np.zeros(problem.w_shape, np.float32)
    w[:, :, 1, 1] = 0.25
    for kernel in ("winograd", "direct"):
        y = np.full(problem.y_shape, np.nan, np.float32)
        at = (x.ctypes.data, w.ctypes.data, None, y.ctypes.data)
        native.run("forward", problem, *at, accumulate=False, threads=1, isa=isa, kernel=kernel)
        np.testing.assert_array_equal(y, np.float32(1.5e38), err_msg=kernel)


def test_strides_far_beyond_the_image(isa):
    for strides in ("s1000000x1", "s1x1000000", "s3000000x2000000"):
        for kernel in ("k3x3", "k5x6"):
            problem = ConvProblem.parse(f"b2,c3,h5,w6,m9,{kernel},{strides}")
            check(Case(problem, isa, 2, "end", accumulate=False, special=False, seed=1))


def test_a_wrong_result_is_noticed(monkeypatch):
    case = next(cpu_fuzz.cases(1, seed=1))
    case = dataclasses.replace(case, special=False)
    run = native.run

    def off_by_one(function, problem, *arrays, **options):
        run(function, problem, *arrays, **options)
        if options.get("kernel") == "conv_bwd_w_dot":
            (ctypes_float(problem.dtype) * 1).from_address(arrays[-1])[0] += 1

    def ctypes_float(dtype):
        return np.ctypeslib.as_ctypes_type(dtype)

    case = dataclasses.replace(case, problem=ConvProblem.parse("b1,c1,h4,w4,m1,k3"))
    monkeypatch.setattr(native, "run", off_by_one)
    _, failures = cpu_fuzz.run(case)
    assert [failure[:2] for failure in failures] == [
        ("conv_bwd_w_dot", "backward_weight"),
        ("conv_bwd_w_dot, strict", "backward_weight"),
    ]
    for failure in failures:
        assert failure[2].startswith("1 of 9 elements are wrong; the first, (0, 0, 0, 0), is ")


def test_a_case_is_made_again_from_its_line():
    for case in cpu_fuzz.cases(30, seed=7):
        assert Case.parse(str(case)) == case


@pytest.mark.parametrize("text", ["", "b1,c1,h4,w4,m1,k3", "b1,c1,h4,w4,m1,k3 avx2 end seed=1"])
def test_refuses_what_is_no_case(text):
    with pytest.raises(InvalidSetting, match="a case looks like"):
        Case.parse(text)
