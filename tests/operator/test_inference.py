import pytest

from ece408_op.errors import InvalidProblem, UnsupportedProblem
from ece408_op.operator.conv_attributes import ConvAttributes
from ece408_op.operator.inference import infer_shapes, infer_storage, infer_types

PLAIN = ConvAttributes((5, 3), 8)
GROUPED = ConvAttributes((3, 3), 8, stride=(2, 1), pad=(1, 0), num_group=2, no_bias=True)


LINE = ConvAttributes((1, 3), 8, stride=(1, 2), num_group=2, spatial=1)


@pytest.mark.parametrize(
    ("attributes", "given", "inputs", "output"),
    [
        (PLAIN, [[2, 6, 20, 21], [], []], [[2, 6, 20, 21], [8, 6, 5, 3], [8]], [2, 8, 16, 19]),
        (GROUPED, [[2, 6, 20, 21], []], [[2, 6, 20, 21], [8, 3, 3, 3]], [2, 8, 10, 19]),
        # Channels of the data from the weight.
        (GROUPED, [[-1, -1, 20, -1], [8, 3, 3, 3]], [[-1, 6, 20, -1], [8, 3, 3, 3]],
         [-1, 8, 10, -1]),
        # From the attributes alone.
        (PLAIN, [[], [], []], [[-1, -1, -1, -1], [8, -1, 5, 3], [8]], [-1, 8, -1, -1]),
        # Unknown sizes may be zero.
        (PLAIN, [[0, 6, 0, 21], [8, 0, 5, 3], []], [[-1, 6, -1, 21], [8, 6, 5, 3], [8]],
         [-1, 8, -1, 19]),
        (LINE, [[2, 6, 21], [], []], [[2, 6, 21], [8, 3, 3], [8]], [2, 8, 10]),
        (LINE, [[], [8, 3, 3], []], [[-1, 6, -1], [8, 3, 3], [8]], [-1, 8, -1]),
    ],
)  # fmt: skip
def test_shapes(attributes, given, inputs, output):
    assert infer_shapes(attributes, given) == (inputs, output)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[2, 6, 20], [], []], r"data has shape \(2, 6, 20\); a 2-D convolution needs 4"),
        ([[2, 6, 4, 21], [], []], r"covers 5x3 pixels, more than the padded input's 4x21"),
        ([[2, 6, 9, 9], [8, 5, 5, 3], []], r"weight has shape \(8, 5, 5, 3\), but .* \(8, 6, 5, 3"),
        ([[2, 6, 9, 9], [8, 6], []], r"weight has shape \(8, 6\)"),
        ([[2, 6, 9, 9], [], [7]], r"bias has shape \(7,\), but .* need \(8,\)"),
    ],
)
def test_contradictions(given, message):
    with pytest.raises(InvalidProblem, match=message):
        infer_shapes(PLAIN, given)


def test_channels_that_groups_do_not_divide():
    with pytest.raises(InvalidProblem, match="num_group 2 must divide both the 5 input channels"):
        infer_shapes(GROUPED, [[2, 5, 20, 21], []])


def test_an_output_larger_than_mxnets_arrays():
    attributes = ConvAttributes((1, 1), 1 << 12, no_bias=True)
    with pytest.raises(UnsupportedProblem, match="has 2147483648 elements, and MXNet's arrays end"):
        infer_shapes(attributes, [[1, 1, 1 << 10, 1 << 9], []])


def test_storage():
    infer_storage(("data", "weight"), ["default", "undefined"])
    with pytest.raises(UnsupportedProblem, match="weight has storage type row_sparse"):
        infer_storage(("data", "weight"), ["default", "row_sparse"])


def test_types():
    names = ("data", "weight")
    assert infer_types(names, [None, "float32"]) == "float32"
    assert infer_types(names, [None, None]) is None
    with pytest.raises(InvalidProblem, match=r"\(data float32, weight float16\); cast them"):
        infer_types(names, ["float32", "float16"])
