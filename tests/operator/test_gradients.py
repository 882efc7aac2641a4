"""Gradients against finite differences."""

import numpy as np
import pytest

import ece408_op


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel": (3, 2)},
        {"kernel": (2, 3), "stride": (2, 1), "pad": (1, 2), "dilate": (2, 1)},
        {"kernel": (3, 3), "num_group": 2, "pad": (1, 1), "no_bias": True},
    ],
    ids=["plain", "strided", "grouped"],
)
def test_numerical_gradients(mx, backend, attributes):
    symbol = mx.sym.Custom(
        mx.sym.Variable("data"), op_type="ece408_conv", num_filter=4, name="c",
        backend=backend, **attributes,
    )  # fmt: skip
    shapes, _, _ = symbol.infer_shape(data=(2, 4, 6, 5))
    rng = np.random.default_rng(2)
    location = [rng.standard_normal(shape) for shape in shapes]
    with ece408_op.errors.surfaced():
        mx.test_utils.check_numeric_gradient(
            symbol, location, numeric_eps=1e-5, rtol=1e-5, atol=1e-7, dtype=np.float64
        )
