"""Our nodes that run as one, beside the same nodes separately."""

from __future__ import annotations

import json

import numpy as np
import pytest

import ece408_op
from ece408_op.operator import compiled_operator
from ece408_op.operator.graphs import fusion, graph_json, sequences
from ece408_op.operator.graphs.compiled_graphs import compiled

OURS, CONCAT, POOL = compiled_operator.NAME, compiled_operator.CONCAT, compiled_operator.POOL
SEQUENCE = compiled_operator.SEQUENCE
C = 8


def _convolution(x, name, filters=C, kernel=3):
    pad = kernel // 2
    return ece408_op.Convolution(
        x, name=name, kernel=(kernel, kernel), num_filter=filters, pad=(pad, pad)
    )


def _relu(mx, x):
    return mx.sym.Activation(x, act_type="relu")


def _operators(symbol):
    return [node["op"] for node in json.loads(symbol.tojson())["nodes"] if node["op"] != "null"]


def _shapes(symbol, shape):
    """Return the shapes of all inputs, by name."""
    arguments, _, states = symbol.infer_shape(data=shape)
    names = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    return dict(zip(names, [*arguments, *states]))


def _compiled(symbol, shape, fuse):
    return compiled(symbol, graph_json.read(symbol), _shapes(symbol, shape), fuse)


def _agrees(mx, symbol, shape, rng):
    """Check that the graph with sequences gives the same results as without; return its
    operators."""
    arrays = {
        name: mx.nd.array(rng.uniform(0.5, 1, size) if "var" in name else rng.normal(size=size))
        for name, size in _shapes(symbol, shape).items()
    }
    alone, joined = (_compiled(symbol, shape, fuse) for fuse in (fusion.fuse, sequences.fused))
    assert joined.list_outputs() == symbol.list_outputs()
    expected, found = (
        each.bind(mx.cpu(), arrays, grad_req="null").forward() for each in (alone, joined)
    )
    for a, b in zip(found, expected):
        np.testing.assert_array_equal(a.asnumpy(), b.asnumpy())
    return _operators(joined)


def test_all_nodes_are_one(mx, rng):
    y = mx.sym.BatchNorm(mx.sym.Variable("data"), name="before")
    for name in "abc":
        y = _relu(mx, mx.sym.BatchNorm(_convolution(y, name), name=f"{name}_norm", fix_gamma=False))
    y = mx.sym.Pooling(y, kernel=(1, 1), global_pool=True, pool_type="avg")
    assert _agrees(mx, _convolution(y, "last", 5, 1), (2, C, 7, 9), rng) == [SEQUENCE]


@pytest.mark.parametrize("images", [1, 3])
def test_arrays_side_by_side(mx, images, rng):
    """As in nested dense blocks; an array twice; one of which others read a part."""
    x = _convolution(mx.sym.Variable("data"), "first")
    for name in "abc":
        x = mx.sym.Concat(x, _relu(mx, _convolution(x, name, 4)), dim=1)
    twice = mx.sym.Concat(x, x, dim=1)
    other = mx.sym.Concat(_convolution(x, "d"), twice, _convolution(x, "e"), dim=1)
    y = _convolution(mx.sym.BatchNorm(other, name="norm", fix_gamma=False), "g") + _convolution(
        x, "h"
    )
    assert _agrees(mx, y, (images, C, 6, 5), rng) == [SEQUENCE]


def test_other_operators_end_a_sequence(mx, rng):
    data = mx.sym.Variable("data")
    a, b = (_convolution(data, name) for name in "ab")
    c = _convolution(_convolution(a, "first"), "c")
    between = mx.sym.tanh(c) + mx.sym.sigmoid(b) + mx.sym.tanh(a)
    y = _convolution(_convolution(_convolution(between, "d"), "short"), "e")
    symbol = mx.sym.Group([_convolution(y, "f"), b, mx.sym.Flatten(y)])
    operators = _agrees(mx, symbol, (2, C, 6, 5), rng)
    # a and c, which give two arrays, and d and e; outputs of the graph keep their names.
    assert operators.count(SEQUENCE) == operators.count(OURS) == 2
    others = {"Flatten", "tanh", "sigmoid", "elemwise_add"}
    assert set(operators) == {SEQUENCE, OURS} | others


@pytest.mark.parametrize("images", [1, 2])
def test_flatten_is_another_shape(mx, images, rng):
    data = mx.sym.Variable("data")
    parts = [mx.sym.Flatten(_convolution(data, name)) for name in "ab"]
    pooled = mx.sym.Pooling(_convolution(data, "c"), kernel=(2, 2))
    y = mx.sym.Concat(*parts, mx.sym.Flatten(pooled), dim=1)
    symbol = mx.sym.FullyConnected(y, num_hidden=3)
    assert _agrees(mx, symbol, (images, C, 6, 5), rng) == [SEQUENCE]


def test_dropout_is_left_out(mx, rng):
    a = _convolution(mx.sym.Variable("data"), "a")
    once = _relu(mx, mx.sym.Dropout(a, name="d"))
    assert _agrees(mx, _convolution(once, "b"), (2, C, 6, 5), rng) == [OURS, OURS]
    # Others read it as well, so that a relu after it is not a's.
    assert _agrees(mx, _convolution(once, "b") + a, (2, C, 6, 5), rng) == [OURS, "Activation", OURS]
    twice = mx.sym.Dropout(a, name="d")
    y = _convolution(_relu(mx, twice), "b") + _convolution(twice, "c")
    assert _operators(_compiled(y, (2, C, 6, 5), sequences.fused)).count("Activation") == 1
    always = mx.sym.Dropout(a, mode="always")
    assert "Dropout" in _operators(_compiled(_convolution(always, "b"), (2, C, 6, 5), fusion.fuse))
    head = mx.sym.Dropout(a, name="d")
    assert _compiled(head, (2, C, 6, 5), sequences.fused).list_outputs() == ["d_output"]


@pytest.mark.parametrize("static", [False, True])
def test_parameters_that_are_computed_are_not_kept(mx, static, rng):
    """Factors of a normalisation that depend on the data, in arrays that MXNet reuses."""
    data = mx.sym.Variable("data")
    gamma = mx.sym.slice_axis(mx.sym.mean(data, axis=(0, 2, 3)), axis=0, begin=0, end=C)
    y = mx.sym.BatchNorm(_convolution(data, "a"), gamma=gamma, name="n", fix_gamma=False)
    for symbol in (_convolution(_relu(mx, y), "b"), y):
        net = mx.gluon.SymbolBlock(symbol, data)
        net.initialize(mx.init.Uniform(1))
        batches = [mx.nd.array(rng.normal(size=(2, C, 6, 5))) for _ in range(4)]
        expected = [net(x).asnumpy() for x in batches]
        net.hybridize(static_alloc=static, static_shape=static)
        for x, y in zip(batches, expected):
            np.testing.assert_allclose(net(x).asnumpy(), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "nodes",
    [
        *("", "1:1", "9:999999999", "1:1" + "6:gibber" + "1:0" * 4),
        "1:1" + f"{len(POOL)}:{POOL}" + "1:0" + "1:1" + "1:7" + "1:1",
        "1:1" + f"{len(SEQUENCE)}:{SEQUENCE}" + "1:0" + "1:1" + "1:0" + "1:1",
    ],
)
def test_a_text_that_is_no_sequence_is_refused(mx, nodes):
    given = {"key": compiled_operator.KEY, "counts": "1 1", "nodes": nodes}
    graph = {
        "nodes": [
            {"op": "null", "name": "data", "inputs": []},
            {"op": SEQUENCE, "name": "s", "attrs": given, "inputs": [[0, 0, 0]]},
        ],
        "arg_nodes": [0],
        "heads": [[1, 0, 0]],
        "attrs": {"mxnet_version": ["int", 10901]},
    }
    symbol = mx.sym.load_json(json.dumps(graph))
    with pytest.raises(mx.MXNetError):
        symbol.infer_shape(data=(1, C, 6, 5))
