"""Executors of graphs with our operator, without training and monitors."""

import numpy as np
import pytest

import ece408_op

SHAPE = (2, 3, 9, 8)


def _network(mx, ours):
    """Return a net with convolutions, normalisation, a sum, pooling, a concatenation, and two
    outputs."""
    convolution = ece408_op.Convolution if ours else mx.sym.Convolution
    pooling = {"kernel": (2, 2), "stride": (2, 2)}
    common = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 8}
    first = convolution(mx.sym.Variable("data"), name="first", **common)
    normal = mx.sym.BatchNorm(first, name="norm", fix_gamma=False)
    second = convolution(mx.sym.relu(normal, name="relu"), name="second", **common)
    total = mx.sym.relu(mx.sym.elemwise_add(second, first, name="sum"), name="bounded")
    pooled = mx.sym.Pooling(total, pool_type="max", name="most", **pooling)
    mean = mx.sym.Pooling(total, pool_type="avg", name="mean", **pooling)
    both = mx.sym.concat(pooled, mean, dim=1, name="both")
    return mx.sym.Group([both, mx.sym.FullyConnected(pooled, num_hidden=5, name="dense")])


@pytest.fixture
def executors(mx, rng, monkeypatch):
    """Return MXNet's own executor and ours, with the same parameters."""
    # MXNet's fusion for oneDNN mistakes this network's sum for another.
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")
    found = []
    for ours in (False, True):
        found.append(_network(mx, ours).simple_bind(mx.cpu(), grad_req="null", data=SHAPE))
    for name, array in [*found[0].arg_dict.items(), *found[0].aux_dict.items()]:
        values = rng.uniform(0.5 if "var" in name else -0.5, 1, array.shape)
        for each in found:
            {**each.arg_dict, **each.aux_dict}[name][:] = values
    return found


def _agree(executors, rng, is_train=False):
    x = rng.uniform(-1, 1, executors[0].arg_dict["data"].shape).astype("float32")
    native, ours = ([y.asnumpy() for y in e.forward(is_train, data=x)] for e in executors)
    for found, expected in zip(ours, native):
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * np.abs(expected).max())


def test_inference_and_training_in_turns(executors, rng):
    for is_train in (False, True, False, False, True, False):
        _agree(executors, rng, is_train)
    # Both have the same moving averages.
    for name, expected in executors[0].aux_dict.items():
        found = executors[1].aux_dict[name].asnumpy()
        np.testing.assert_allclose(found, expected.asnumpy(), rtol=1e-4, atol=1e-5)


def test_outputs_that_were_asked_for_before(executors):
    ours = executors[1]
    before = ours.outputs
    now = ours.forward(data=np.ones(SHAPE, "float32"))
    for kept, found in zip(before, now):
        np.testing.assert_array_equal(kept.asnumpy(), found.asnumpy())


def test_parameters_changed_in_place(executors, mx, rng):
    _agree(executors, rng)
    for name in ("first_weight", "norm_gamma", "second_bias"):
        values = rng.uniform(-1, 1, executors[0].arg_dict[name].shape)
        for each in executors:
            each.arg_dict[name][:] = mx.nd.array(values)
    for each in executors:
        each.aux_dict["norm_moving_mean"][:] = 0.25
    _agree(executors, rng)


@pytest.mark.parametrize("early", [True, False])
def test_arrays_put_into_its_dictionaries_are_not_used(mx, rng, early):
    """As with MXNet's own: an executor uses the arrays that it was bound to."""
    values = {}
    found = []
    for ours in (False, True):
        executor = _network(mx, ours).simple_bind(mx.cpu(), data=SHAPE)
        for name, array in {**executor.arg_dict, **executor.aux_dict}.items():
            values.setdefault(name, rng.uniform(0.5, 1, array.shape))
            array[:] = values[name]
        gradients = [mx.nd.ones(each.shape) for each in executor.outputs]
        bound = dict(executor.grad_dict)
        if not early:
            executor.forward(is_train=True)
            executor.backward(gradients)
        for name in ("data", "first_weight", "norm_gamma"):
            executor.arg_dict[name] = mx.nd.zeros(executor.arg_dict[name].shape)
            executor.grad_dict[name] = mx.nd.full(executor.arg_dict[name].shape, 7)
        executor.aux_dict["norm_moving_mean"] = mx.nd.full((8,), 9)
        executor.arg_arrays[-1] = executor.grad_arrays[-1] = mx.nd.zeros((5,))
        # It is written to the array that nobody uses.
        executor.forward(is_train=True, data=mx.nd.full(SHAPE, 5))
        executor.backward(gradients)
        mx.nd.waitall()  # MXNet's executors do not report pending updates of averages
        larger = executor.reshape(allow_up_sizing=True, data=(5, *SHAPE[1:]))
        larger.forward(data=mx.nd.ones((5, *SHAPE[1:])))
        arrays = [*executor.forward(), *larger.outputs, *bound.values()]
        arrays += [*executor.arg_dict.values(), *executor.grad_dict.values()]
        found.append([array.asnumpy() for array in arrays])
    for its, ours in zip(*found):
        np.testing.assert_allclose(ours, its, rtol=0, atol=3e-5 * np.abs(its).max())


def test_reshaped(executors, rng):
    _agree(executors, rng)
    larger = [each.reshape(allow_up_sizing=True, data=(5, *SHAPE[1:])) for each in executors]
    _agree(larger, rng)
    _agree(executors, rng)


@pytest.mark.parametrize("is_reshaped", [False, True])
def test_a_monitor_hears_every_node(executors, rng, is_reshaped):
    if not is_reshaped:
        _agree(executors, rng)
    heard = ([], [])
    for each, names in zip(executors, heard):
        each.set_monitor_callback(lambda name, _, names=names: names.append(name.decode()))
    if is_reshaped:
        executors = [each.reshape(data=(1, *SHAPE[1:])) for each in executors]
    _agree(executors, rng)
    assert "norm_output" in heard[1]
    # MXNet's maximum pooling in blocked layout stores the positions, too.
    assert set(heard[0]) - {"most_workspace"} == set(heard[1]) - {"most_workspace"}


def test_wrong_inputs_are_errors_as_with_mxnets_own(executors, mx):
    for each in executors:
        each.forward()
        with pytest.raises(TypeError, match="Unknown argument other"):
            each.forward(other=mx.nd.ones(SHAPE))
        with pytest.raises(ValueError, match="Shape not match"):
            each.forward(data=mx.nd.ones((1, *SHAPE[1:])))


def test_what_follows_is_computed_within_the_convolution(executors):
    ours = executors[1]
    ours.forward()
    assert "BatchNorm" in ours.debug_str()
    fused = vars(ours)["_ece408"].last
    assert "BatchNorm" not in fused.debug_str()
    assert "Pooling" not in fused.debug_str()


def test_types_that_are_not_fused(mx, rng):
    found = []
    for ours in (False, True):
        symbol, types = _network(mx, ours), {"data": "float64"}
        found.append(symbol.simple_bind(mx.cpu(), "null", type_dict=types, data=SHAPE))
    for name, array in found[0].arg_dict.items():
        values = rng.uniform(-0.5, 1, array.shape)
        for each in found:
            each.arg_dict[name][:] = values
    _agree(found, rng)
