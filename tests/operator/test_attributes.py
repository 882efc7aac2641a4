import pytest

from ece408_op.errors import InvalidProblem, UnsupportedProblem
from ece408_op.operator.conv_attributes import ConvAttributes

REQUIRED = {"kernel": "(5, 3)", "num_filter": "7"}


def test_strings_as_mxnet_passes_them():
    given = {"stride": "(2, 1)", "dilate": "[1, 2]", "pad": "(0, 3)", "num_group": "1"}
    named = {"layer": "conv1", "backend": "reference"}
    parsed = ConvAttributes.parse({**REQUIRED, **given, "no_bias": "True", **named})
    assert parsed == ConvAttributes((5, 3), 7, (2, 1), (1, 2), (0, 3), 1, True, **named)
    # What is unset, or meaningless here, is ignored.
    unset = {"stride": "None", "pad": "()", "layout": "None", "__ctx_group__": "dev1"}
    unset |= {"workspace": "1024", "cudnn_tune": "off", "cudnn_off": "False"}
    assert ConvAttributes.parse({**REQUIRED, **unset}) == ConvAttributes((5, 3), 7)


@pytest.mark.parametrize(("text", "value"), [("1", True), ("false", False), ("0", False)])
def test_flags(text, value):
    assert ConvAttributes.parse({**REQUIRED, "no_bias": text}).no_bias is value


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_filter": "3"}, "required attribute kernel is not given"),
        ({"kernel": "(3, 3)"}, "required attribute num_filter is not given"),
        ({**REQUIRED, "strides": "(1, 1)"}, r"unknown attribute strides=\(1, 1\); there are: "),
        ({**REQUIRED, "num_filter": "many"}, "num_filter=many is not a number"),
        ({**REQUIRED, "num_filter": "2.5"}, "num_filter=2.5 is not a whole number"),
        ({**REQUIRED, "kernel": "(3, 'a')"}, "is not a tuple of whole numbers"),
        ({**REQUIRED, "stride": "(2,)"}, r"stride=\(2,\) has 1 numbers, but the kernel has 2"),
        ({**REQUIRED, "no_bias": "maybe"}, "no_bias=maybe is neither True nor False"),
    ],
)
def test_wrong_attributes(attributes, message):
    with pytest.raises(InvalidProblem, match=message):
        ConvAttributes.parse(attributes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layout", "NHWC", "layout NHWC is not supported for a 2-D convolution; use NCHW"),
        ("kernel", "(3, 3, 3)", "a kernel of 3 dimensions is not supported"),
    ],
)
def test_unsupported_attributes(name, value, message):
    with pytest.raises(UnsupportedProblem, match=message):
        ConvAttributes.parse({**REQUIRED, name: value})


def test_one_dimension_is_two_with_a_height_of_one():
    given = {"kernel": "(3,)", "num_filter": "4", "stride": "(2,)", "pad": "1", "dilate": "[2]"}
    parsed = ConvAttributes.parse({**given, "layout": "NCW"})
    assert parsed == ConvAttributes((1, 3), 4, (1, 2), (1, 2), (0, 1), spatial=1)
    problem = parsed.problem((2, 5, 20), "float32")
    assert str(problem) == "b2,c5,h1,w20,m4,k1x3,s1x2,p0x1,d1x2,bias"
