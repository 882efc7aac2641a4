"""Executors run graphs without guards, and right."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ece408_op
from ece408_op import bare_graphs

ATTRIBUTES = {"kernel": (3, 3), "num_filter": 16, "pad": (1, 1)}


def _operators(symbol):
    return [node["op"] for node in json.loads(symbol.tojson())["nodes"] if node["op"] != "null"]


def _network(mx, convolution=ece408_op.Convolution):
    """Native, `convolution` twice, native; the second one is an output of its own."""
    y = mx.sym.Convolution(mx.sym.Variable("data"), name="first", **ATTRIBUTES)
    y = convolution(y, name="second", **ATTRIBUTES)
    z = convolution(mx.sym.Activation(y, act_type="relu"), name="third", **ATTRIBUTES)
    return mx.sym.Group([mx.sym.Convolution(z, name="fourth", **ATTRIBUTES), z])


def test_guards_are_removed_and_names_stay(mx):
    symbol = _network(mx)
    assert _operators(symbol).count("clip") == 2
    assert _operators(symbol).count("_contrib_gradientmultiplier") == 4
    found = bare_graphs.bare(symbol)
    assert _operators(found) == ["Convolution", "Custom", "Activation", "Custom", "Convolution"]
    assert found.list_arguments() == symbol.list_arguments()
    assert found.list_outputs() == symbol.list_outputs()
    assert bare_graphs.bare(found) is found


def test_weights_that_are_computed_have_guards_that_do_not_work_in_place(mx):
    weight = mx.sym.Variable("w", shape=(16, 16, 3, 3)) + 1
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), weight, **ATTRIBUTES)
    assert _operators(symbol).count("clip") == 2
    assert _operators(bare_graphs.bare(symbol)) == ["_plus_scalar", "Custom"]


def test_other_clips_and_graphs_stay(mx):
    x = mx.sym.Variable("data")
    unbounded = mx.sym.clip(x, -float("inf"), float("inf"))
    assert bare_graphs.bare(unbounded) is unbounded
    clipped = mx.sym.clip(ece408_op.Convolution(x, **ATTRIBUTES), 0, 6)
    far = mx.sym.clip(mx.sym.Activation(clipped, act_type="relu"), -float("inf"), float("inf"))
    assert _operators(bare_graphs.bare(far)) == ["Custom", "clip", "Activation", "clip"]


def test_graphs_of_control_flow_stay(mx):
    def body(x, states):
        return ece408_op.Convolution(x, states[0], states[1], **ATTRIBUTES), states

    states = [mx.sym.Variable("w"), mx.sym.Variable("b")]
    symbol, _ = mx.sym.contrib.foreach(body, mx.sym.Variable("data"), states)
    assert bare_graphs.bare(symbol) is symbol


def _arrays(mx, symbol, rng):
    shapes, _, _ = symbol.infer_shape(data=(2, 16, 9, 9))
    return {
        name: mx.nd.array(rng.integers(-2, 3, shape))
        for name, shape in zip(symbol.list_arguments(), shapes)
    }


@pytest.mark.parametrize("simple", [False, True])
def test_executors_are_right_forward_and_backward(mx, rng, simple):
    """On weights that native convolutions have used before, call after call."""
    symbol = _network(mx)
    native = _network(mx, mx.sym.Convolution)
    wrong = 0
    for _ in range(60):
        arrays = _arrays(mx, symbol, rng)
        results = []
        for each in (native, symbol):
            if simple:
                executor = each.simple_bind(mx.cpu(), data=(2, 16, 9, 9))
                executor.copy_params_from(arrays)
            else:
                gradients = {name: array.zeros_like() for name, array in arrays.items()}
                executor = each.bind(mx.cpu(), arrays, args_grad=gradients)
            # Inference first: it leaves the native weights in a blocked layout.
            outputs = [y.asnumpy() for y in executor.forward(is_train=False)]
            executor.forward(is_train=True)
            executor.backward([mx.nd.ones(y.shape) for y in outputs])
            results.append(outputs + [g.asnumpy() for g in executor.grad_arrays])
        wrong += not all(np.array_equal(a, b) for a, b in zip(*results))
    assert wrong == 0
