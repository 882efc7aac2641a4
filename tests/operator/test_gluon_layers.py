import numpy as np
import pytest

import ece408_op
from ece408_op import errors

SHAPE = (2, 3, 11, 12)
ARGUMENTS = {
    "channels": 6,
    "kernel_size": (3, 2),
    "strides": (2, 1),
    "padding": (1, 0),
    "dilation": (1, 2),
    "groups": 3,
    "activation": "relu",
}


@pytest.fixture
def pair(mx, tmp_path):
    """Return Gluon's layer and ours with the same parameters, through a parameter file."""
    native = mx.gluon.nn.Conv2D(**ARGUMENTS)
    native.initialize(mx.init.Normal(1))
    native(mx.nd.zeros(SHAPE))
    native.save_parameters(str(tmp_path / "layer.params"))
    ours = ece408_op.Conv2D(**ARGUMENTS)
    ours.load_parameters(str(tmp_path / "layer.params"))
    return native, ours


@pytest.mark.parametrize("hybridize", [False, True])
def test_same_parameters_same_answers_and_gradients(mx, rng, pair, hybridize):
    x = mx.nd.array(rng.standard_normal(SHAPE))
    results = []
    for layer in pair:
        if hybridize:
            layer.hybridize()
        with mx.autograd.record():
            y = layer(x)
        y.backward()
        gradients = [p.grad().asnumpy() for p in layer.collect_params().values()]
        results.append([y.asnumpy(), *gradients])
    for native, ours in zip(*results):
        np.testing.assert_allclose(ours, native, rtol=1e-4, atol=1e-4)


def test_shapes_are_deferred_as_in_gluon(mx):
    for hybridize in (False, True):
        layer = ece408_op.Conv2D(4, 3)
        layer.initialize()
        layer.hybridize(hybridize)
        assert layer(mx.nd.ones((1, 5, 6, 6))).shape == (1, 4, 4, 4)
        assert layer.weight.shape == (4, 5, 3, 3)


def test_one_dimension(mx, rng):
    native, ours = (
        layer(4, 3, strides=2, padding=1, in_channels=3)
        for layer in (mx.gluon.nn.Conv1D, ece408_op.Conv1D)
    )
    native.initialize(mx.init.Normal(1))
    ours.initialize()
    ours.weight.set_data(native.weight.data())
    x = mx.nd.array(rng.standard_normal((2, 3, 17)))
    np.testing.assert_allclose(ours(x).asnumpy(), native(x).asnumpy(), rtol=1e-4, atol=1e-5)


def test_arrays_of_the_numpy_interface(mx, rng):
    layer = ece408_op.Conv2D(4, 3, in_channels=3)
    layer.initialize(mx.init.Normal(1))
    x = mx.nd.array(rng.standard_normal(SHAPE))
    expected = layer(x).asnumpy()
    result = ece408_op.Convolution(
        x.as_np_ndarray(),
        layer.weight.data().as_np_ndarray(),
        layer.bias.data().as_np_ndarray(),
        kernel=(3, 3),
        num_filter=4,
    )
    assert isinstance(result, mx.np.ndarray)
    np.testing.assert_array_equal(result.asnumpy(), expected)


def test_the_backend_of_a_layer(mx):
    layer = ece408_op.Conv2D(4, 3, in_channels=3, backend="reference", prefix="mine_")
    layer.initialize()
    for _ in range(2):
        with ece408_op.op_times() as log:
            layer(mx.nd.ones(SHAPE)).wait_to_read()
        assert [(entry.layer, entry.backend) for entry in log] == [("mine_fwd", "reference")]
        layer.hybridize()


@pytest.mark.parametrize(
    ("keywords", "shape", "dtype", "message"),
    [
        ({}, (2, 3, 11), "float32", "a 2-D convolution needs 4 dimensions"),
        ({}, (2, 3, 2, 12), "float32", "more than the padded input's 2x12"),
        ({"groups": 2}, SHAPE, "float32", "num_group 2 must divide"),
        ({"in_channels": 5}, SHAPE, "float32", "weight has shape"),
        ({"in_channels": 3}, SHAPE, "float64", "data float64, weight float32"),
    ],
)
@pytest.mark.parametrize("hybridize", [False, True])
def test_errors_reach_the_user(mx, keywords, shape, dtype, message, hybridize):
    layer = ece408_op.Conv2D(4, 3, **keywords)
    layer.initialize()
    layer.hybridize(hybridize)
    with pytest.raises(errors.InvalidProblem, match=message), errors.surfaced():
        layer(mx.nd.ones(shape, dtype=dtype)).wait_to_read()


def test_layouts_that_are_not_supported(mx):
    with pytest.raises(errors.UnsupportedProblem, match="layout NHWC is not supported"):
        ece408_op.Conv2D(4, 3, layout="NHWC")
