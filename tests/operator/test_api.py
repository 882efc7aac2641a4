import numpy as np
import pytest

import ece408_op
from ece408_op import errors

SHAPE = (2, 3, 9, 8)


@pytest.fixture
def arrays(mx, rng):
    shapes = {"data": SHAPE, "weight": (4, 3, 3, 2), "bias": (4,)}
    return {name: mx.nd.array(rng.integers(-3, 4, shape)) for name, shape in shapes.items()}


def test_positional_arguments_and_out(mx, arrays):
    out = mx.nd.zeros((2, 4, 7, 7))
    given = (arrays["data"], arrays["weight"], arrays["bias"], (3, 2))
    ece408_op.Convolution(*given, num_filter=4, out=out)
    native = mx.nd.Convolution(*given, num_filter=4)
    np.testing.assert_array_equal(out.asnumpy(), native.asnumpy())


def test_results_and_gradients_of_ndarrays(mx, arrays):
    found = []
    for convolution in (ece408_op.Convolution, mx.nd.Convolution):
        for array in arrays.values():
            array.attach_grad()
        with mx.autograd.record():
            result = convolution(**arrays, kernel=(3, 2), num_filter=4)
        result.backward(mx.nd.arange(result.size).reshape(result.shape) % 5)
        gradients = [array.grad.asnumpy() for array in arrays.values()]
        found.append([result.asnumpy(), *gradients])
    np.testing.assert_equal(*found)


def test_symbol_has_the_names_and_shapes_of_mxnets(mx):
    made = []
    for convolution in (ece408_op.Convolution, mx.sym.Convolution):
        with mx.name.NameManager():
            first = convolution(mx.sym.Variable("data"), kernel=(3, 2), num_filter=4)
            made.append(convolution(first, kernel=(3, 3), num_filter=5, no_bias=True, name="b"))
    ours, native = made
    assert ours.list_arguments() == native.list_arguments()
    assert ours.list_outputs() == native.list_outputs()
    assert ours.infer_shape(data=SHAPE) == native.infer_shape(data=SHAPE)
    assert ours.infer_shape_partial() is not None


def test_a_name_prefix_is_applied_once(mx):
    with mx.name.Prefix("net_"):
        symbol = ece408_op.Convolution(mx.sym.Variable("x"), kernel=(3, 2), num_filter=4, name="c")
    assert symbol.list_arguments()[1:] == ["net_c_weight", "net_c_bias"]
    assert symbol.list_outputs() == ["net_c_output"]


def test_op_times_name_the_layer(mx, arrays):
    symbol = ece408_op.Convolution(
        mx.sym.Variable("data"), kernel=(3, 2), num_filter=4, name="first", no_bias=True
    )
    executor = symbol.bind(mx.cpu(), {"data": arrays["data"], "first_weight": arrays["weight"]})
    with ece408_op.op_times() as log:
        executor.forward()[0].wait_to_read()
        ece408_op.Convolution(
            arrays["data"], arrays["weight"], kernel=(3, 2), num_filter=4, no_bias=True,
            name="second", backend="reference",
        ).wait_to_read()  # fmt: skip
    assert [entry.layer for entry in log] == ["first", "second"]
    assert log[1].backend == "reference"
    assert all(entry.seconds > 0 for entry in log)


@pytest.mark.parametrize(
    ("changes", "keywords", "error", "message"),
    [
        ({"weight": None}, {}, errors.InvalidProblem, "weight is not given"),
        ({"bias": None}, {}, errors.InvalidProblem, "bias is not given"),
        ({}, {"no_bias": True}, errors.InvalidProblem, "bias is given although no_bias is True"),
        ({"data": [1, 2]}, {}, errors.InvalidProblem, "data is a list; expected an NDArray"),
        ({}, {"kernel": (10, 2)}, errors.InvalidProblem, "more than the padded input's 9x8"),
        ({}, {"num_group": 2}, errors.InvalidProblem, "num_group 2 must divide both the 3 input"),
        ({}, {"num_filter": 5}, errors.InvalidProblem, r"weight has shape \(4, 3, 3, 2\), but"),
        ({}, {"layout": "NHWC"}, errors.UnsupportedProblem, "layout NHWC is not supported"),
        ({}, {"kernel": (2, 3, 2)}, errors.UnsupportedProblem, "3 dimensions is not"),
        ({"data": lambda mx: mx.nd.ones((3, 9, 8))}, {}, errors.InvalidProblem,
         "a 2-D convolution needs 4 dimensions"),
        ({"data": lambda mx: mx.nd.ones((2, 5, 9, 8))}, {}, errors.InvalidProblem,
         r"weight has shape .* need \(4, 5, 3, 2\)"),
        ({"weight": lambda mx: mx.nd.ones((4, 18)).tostype("row_sparse")}, {},
         errors.UnsupportedProblem, "weight has storage type row_sparse"),
        ({"weight": lambda mx: mx.nd.ones((4, 3, 3, 2), dtype="float64")}, {},
         errors.InvalidProblem, "data float32, weight float64, bias float32"),
    ],
)  # fmt: skip
def test_wrong_calls_fail_at_once(mx, arrays, changes, keywords, error, message):
    changes = {name: each(mx) if callable(each) else each for name, each in changes.items()}
    with pytest.raises(error, match=message):
        ece408_op.Convolution(
            **{**arrays, **changes}, **{"kernel": (3, 2), "num_filter": 4, **keywords}
        )
