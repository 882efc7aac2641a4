"""Training by the compiled operators, in executors, hybridized blocks and recorded calls, beside
MXNet's own."""

import json

import numpy as np
import pooling
import pytest
from cases import every

import ece408_op
from ece408_op import errors
from ece408_op.operator import autograd_state
from ece408_op.operator.graphs import graph_json, training_parts
from ece408_op.operator.python_operator import ConvolutionOp

SHAPE = (3, 4, 9, 7)
COMMON = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 8}


@pytest.fixture(autouse=True)
def _no_call_in_python(mx, monkeypatch):
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")
    monkeypatch.setattr(ConvolutionOp, "forward", _never)
    monkeypatch.setattr(ConvolutionOp, "backward", _never)


def _never(*arguments, **keywords):
    raise AssertionError("the operator in Python was called")


def _network(mx, ours, fix_gamma=False, **norm):
    """Return a net with normalisation alone, before relu, before a sum and relu, and of two that
    are added."""
    convolution = ece408_op.Convolution if ours else mx.sym.Convolution

    def normal(x, name):
        return mx.sym.BatchNorm(x, name=name, fix_gamma=fix_gamma, **norm)

    first = convolution(mx.sym.Variable("data"), name="first", **COMMON)
    x = mx.sym.relu(normal(first, "norm1"))
    y = normal(convolution(x, name="second", no_bias=True, **COMMON), "norm2")
    x = mx.sym.Activation(mx.sym.elemwise_add(y, x), act_type="relu")
    other = normal(convolution(x, name="third", no_bias=True, **COMMON), "norm3")
    y = normal(convolution(x, name="fourth", no_bias=True, **COMMON), "norm4")
    x = normal(mx.sym.elemwise_add(y, other), "norm5")
    x = mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max", name="most")
    return convolution(x, name="last", **COMMON)


def _values(rng, symbol):
    shapes, _, states = symbol.infer_shape(data=SHAPE)
    values = {n: rng.normal(0, 0.3, s) for n, s in zip(symbol.list_arguments(), shapes)}
    for name, shape in zip(symbol.list_auxiliary_states(), states):
        values[name] = rng.uniform(0.5, 1, shape)
    return values


def _bound(mx, symbol, values, requests):
    arrays = {name: mx.nd.array(value) for name, value in values.items()}
    arguments = {name: arrays[name] for name in symbol.list_arguments()}
    states = {name: arrays[name] for name in symbol.list_auxiliary_states()}
    gradients = {name: mx.nd.ones(array.shape) for name, array in arguments.items()}
    return symbol.bind(mx.cpu(), arguments, gradients, requests, states)


def _agree(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        array = array.asnumpy()
        # Gradients that normalisation cancels consist of rounding errors.
        scale = max(np.abs(array).max(), 1.0)
        np.testing.assert_allclose(
            found[name].asnumpy(), array, rtol=0, atol=1e-4 * scale, err_msg=name
        )


def _results(mx, executor):
    # MXNet's executors do not tell readers of moving averages that an update is pending.
    mx.nd.waitall()
    arrays = {f"gradient of {name}": array for name, array in executor.grad_dict.items()}
    outputs = {f"output {number}": array for number, array in enumerate(executor.outputs)}
    return {**arrays, **outputs, **executor.aux_dict, **executor.arg_dict}


def _check(mx, rng, make, requests="write", gradient=None, **given):
    """Compare a training step of a graph that `make` returns for a convolution. `gradient` is a
    function of the output; without it the graph ends in a loss."""
    executors, values = [], None
    for convolution in (mx.sym.Convolution, ece408_op.Convolution):
        symbol = make(convolution)
        values = values or {**_values(rng, symbol), **given}
        executors.append(_bound(mx, symbol, values, requests))
    for executor in executors:
        output = executor.forward(True)[0]
        executor.backward(*([] if gradient is None else [gradient(output)]))
    _agree(*(_results(mx, each) for each in reversed(executors)))


@pytest.mark.parametrize("requests", ["write", "add", "mixed"])
@pytest.mark.parametrize("fix_gamma", [False, True])
def test_executors(mx, rng, requests, fix_gamma):
    norm = {"eps": 1e-4, "momentum": 0.7}
    symbols = [_network(mx, ours, fix_gamma, **norm) for ours in (False, True)]
    values = _values(rng, symbols[0])
    if requests == "mixed":
        without = ("second_weight", "norm2_gamma", "data")
        kinds = {**dict.fromkeys(without, "null"), "third_weight": "add"}
        requests = {name: kinds.get(name, "write") for name in symbols[0].list_arguments()}
    executors = [_bound(mx, symbol, values, requests) for symbol in symbols]
    for _ in range(3):
        x = rng.normal(0, 1, SHAPE).astype(np.float32)
        head = None
        for executor in executors:
            output = executor.forward(True, data=x)[0]
            head = rng.normal(0, 1, output.shape) if head is None else head
            executor.backward(mx.nd.array(head))
        native, ours = executors
        _agree(_results(mx, ours), _results(mx, native))
        # Prediction in between updates nothing.
        for executor in executors:
            executor.forward(False, data=x)
        _agree(_results(mx, ours), _results(mx, native))
        # Copies are for gradients that are added.
        assert set(_operators(ours)) - {"null", "_copy"} == {"ece408_part"}


def _operators(executor):
    taken = vars(executor)["_ece408"].of(executor, True)
    return [node["op"] for node in json.loads(taken._symbol.tojson())["nodes"]]


def _pooling(mx, ours, between=lambda x: x, **window):
    """Return pooling, after a function, between identity convolutions."""
    convolution = ece408_op.Convolution if ours else mx.sym.Convolution
    alike = {"kernel": (1, 1), "num_filter": 4, "num_group": 4, "no_bias": True}
    x = between(convolution(mx.sym.Variable("data"), name="first", **alike))
    return convolution(mx.sym.Pooling(x, name="pool", **window), name="last", **alike)


def _gradients_of_pooling(mx, rng, x, **given):
    """Return the gradient for `x` and the output, MXNet's and ours, and our executor."""
    found, gradient = [], None
    for ours in (False, True):
        symbol = _pooling(mx, ours, **given)
        values = dict.fromkeys(("first_weight", "last_weight"), np.ones((4, 1, 1, 1)))
        executor = _bound(mx, symbol, {"data": x, **values}, "write")
        y = executor.forward(True)[0]
        if gradient is None:
            gradient = mx.nd.array(rng.integers(-9, 10, y.shape))
        executor.backward(gradient)
        found.append((executor.grad_dict["data"].asnumpy(), y.asnumpy()))
    return (*found, executor)


@every(**pooling.AXES)
@pytest.mark.slow
def test_pooling_agrees_with_mxnets_own(mx, kind, convention, window, rng):
    # MXNet's gradient for averages of truncated windows differs.
    is_ours = (kind, convention) != ("avg", "full")
    for height, width, given in pooling.layers(window, kind, convention):
        # Small whole numbers: the maximum of a window occurs several times.
        x = rng.integers(-2, 3, (2, 4, height, width))
        native, ours, executor = _gradients_of_pooling(mx, rng, x, **given)
        assert ("Pooling" not in _operators(executor)) == is_ours
        for found, expected in zip(ours, native):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
            if kind == "max":
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_pooling_of_whole_planes(mx, rng, kind):
    x = rng.integers(-9, 10, (3, 4, 7, 9))
    given = {"kernel": (1, 1), "global_pool": True, "pool_type": kind}
    native, ours, executor = _gradients_of_pooling(mx, rng, x, **given)
    assert "Pooling" not in _operators(executor)
    for found, expected in zip(ours, native):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_gradients_of_infinite_and_undefined_numbers(mx, rng):
    x = rng.integers(-9, 10, (2, 4, 8, 8)).astype(np.float32)
    x[0, 0, :4, :4], x[0, 1, 3, 3], x[1, 2, 2, 4] = -np.inf, np.inf, -np.inf
    window = {"kernel": (2, 2), "stride": (2, 2), "pool_type": "max"}
    native, ours, _ = _gradients_of_pooling(mx, rng, x, **window)
    np.testing.assert_array_equal(ours[0], native[0])
    # NaN is never the maximum, and has no gradient unless everything is NaN.
    x[1, 3, 4, 4] = x[0, 2, 1, 1] = x[0, 3, 2:6, 2:6] = np.nan
    native, ours, _ = _gradients_of_pooling(mx, rng, x, **window)
    np.testing.assert_equal(ours, native)


@pytest.mark.parametrize("kind", ["tanh", "sigmoid", "relu", "softrelu"])
def test_functions_before_pooling(mx, rng, kind):
    """Some are computed after it."""

    def between(x):
        return mx.sym.Activation(x, act_type=kind, name="function")

    window = {"kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}
    x = rng.normal(0, 1, (3, 4, 9, 11))
    native, ours, _ = _gradients_of_pooling(mx, rng, x, between=between, **window)
    for found, expected in zip(ours, native):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_a_users_operator_between_parts(mx, rng):

    class Negative(mx.operator.CustomOp):
        def forward(self, is_train, req, in_data, out_data, aux):
            self.assign(out_data[0], req[0], -in_data[0])

        def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
            self.assign(in_grad[0], req[0], -out_grad[0])

    @mx.operator.register("ece408_test_negative")
    class _NegativeProp(mx.operator.CustomOpProp):
        def __init__(self, act_type):
            super().__init__(need_top_grad=True)

        def create_operator(self, ctx, shapes, dtypes):
            return Negative()

    def between(x):
        return mx.sym.Custom(x, op_type="ece408_test_negative", act_type="tanh")

    x = rng.integers(-9, 10, (2, 4, 6, 8))
    native, ours, executor = _gradients_of_pooling(
        mx, rng, x, between=between, kernel=(2, 2), stride=(2, 2)
    )
    assert _operators(executor).count("ece408_part") == 2
    np.testing.assert_equal(ours, native)


def test_averages_move_in_the_backward_pass(mx, rng):
    symbol = _network(mx, True)
    executor = _bound(mx, symbol, _values(rng, symbol), "write")
    before = {name: array.asnumpy() for name, array in executor.aux_dict.items()}
    for _ in range(2):
        output = executor.forward(True)[0]
    for name, array in executor.aux_dict.items():
        np.testing.assert_array_equal(array.asnumpy(), before[name])
    executor.backward(output)
    mx.nd.waitall()
    for name, array in executor.aux_dict.items():
        assert not np.array_equal(array.asnumpy(), before[name])


@pytest.mark.parametrize("to_predict", ["forward", "backward"])
def test_gradients_of_what_was_run_to_predict(mx, rng, monkeypatch, to_predict):
    monkeypatch.undo()
    monkeypatch.setenv("MXNET_SUBGRAPH_BACKEND", "NONE")
    # MXNet's own gradients of normalisation differ each time.
    executors, values = [], None
    for convolution in (mx.sym.Convolution, ece408_op.Convolution):
        first = mx.sym.relu(convolution(mx.sym.Variable("data"), name="first", **COMMON))
        symbol = convolution(first, name="second", **COMMON)
        values = values or _values(rng, symbol)
        executors.append(_bound(mx, symbol, values, "write"))
    for executor in executors:
        output = executor.forward(to_predict == "backward")[0]
        executor.backward(mx.nd.ones(output.shape), is_train=to_predict == "forward")
    _agree(_results(mx, executors[1]), _results(mx, executors[0]))


def _net(mx, ours, **hybrid):
    nn = mx.gluon.nn

    class Block(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            with self.name_scope():
                self.body = nn.HybridSequential()
                self.body.add(nn.Conv2D(8, 3, padding=1, use_bias=False), nn.BatchNorm())

        def hybrid_forward(self, F, x):
            return F.Activation(self.body(x) + x, act_type="relu")

    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(8, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"))
        net.add(Block(), nn.MaxPool2D(), nn.BatchNorm(scale=False), nn.Dense(3))
    mx.random.seed(7)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    net(mx.nd.ones(SHAPE))
    if ours:
        ece408_op.swap(net)
    if hybrid.pop("active", True):
        net.hybridize(**hybrid)
    return net


STATIC = [{}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}]


def _parameters(net):
    prefix = len(net.prefix)
    return {name[prefix:]: each for name, each in net.collect_params().items()}


def _gradients(net):
    parameters = _parameters(net).items()
    return {
        f"for {name}": each.grad().copy() for name, each in parameters if each.grad_req != "null"
    }


@pytest.mark.parametrize("request_of_all", ["write", "add"])
@pytest.mark.parametrize("hybrid", [*STATIC, {"active": False}])
def test_blocks(mx, rng, hybrid, request_of_all):
    nets = [_net(mx, ours, **hybrid) for ours in (False, True)]
    for net in nets:
        for parameter in net.collect_params().values():
            if parameter.grad_req != "null":
                parameter.grad_req = request_of_all
        net.collect_params("net_conv0_weight").setattr("grad_req", "null")
    rate = {"learning_rate": 0.05}
    trainers = [mx.gluon.Trainer(net.collect_params(), "sgd", rate) for net in nets]
    for step in range(4):
        pixels = rng.normal(0, 1, (SHAPE[0] + step % 2, *SHAPE[1:]))
        found = []
        for net, trainer in zip(nets, trainers):
            x = mx.nd.array(pixels)
            if step > 1:
                # From now on the data has a gradient as well.
                x.attach_grad(request_of_all)
            with mx.autograd.record():
                loss = (net(x) ** 2).sum()
            loss.backward()
            trainer.step(SHAPE[0])
            results = {name: each.data() for name, each in _parameters(net).items()}
            results.update(_gradients(net))
            results.update({"for x": x.grad} if step > 1 else {}, output=net(x))
            found.append(results)
            if step == 2:
                net.collect_params("net_conv0_weight").setattr("grad_req", request_of_all)
        _agree(found[1], found[0])


def test_only_gradients_that_are_wanted_are_computed(mx, rng):
    net = _net(mx, True)
    x = mx.nd.array(rng.normal(0, 1, SHAPE))

    def directions():
        with ece408_op.op_times() as log:
            with mx.autograd.record():
                loss = net(x).sum()
            loss.backward()
            mx.nd.waitall()
        return [entry.direction for entry in log if entry.direction != "forward"]

    # The same array twice: a read of it does not request its gradient.
    for _ in range(2):
        assert directions() == ["backward_data", "backward_weight", "backward_weight"]
    x.attach_grad()
    assert directions() == ["backward_data", "backward_weight"] * 2
    net.collect_params(".*conv.*weight").setattr("grad_req", "null")
    assert directions() == ["backward_data", "backward_data"]


def test_arrays_that_have_gradients(mx):
    with_place, read = mx.nd.ones(3), mx.nd.ones(3)
    with_place.attach_grad()
    with mx.autograd.record():
        result = with_place * read
    found = [autograd_state.has_gradient(a) for a in (with_place, result, read, result.detach())]
    assert found == [True, True, False, False]


def test_long_sums_of_gradients_are_left_to_python(mx):
    x = mx.sym.Variable("data")
    # No part computes them.
    strict = {**COMMON, "precision": "strict"}
    heads = [ece408_op.Convolution(x, name=f"c{n}", **strict) for n in range(8)]
    shapes = {"data": SHAPE}
    for count, is_compiled in ((7, True), (8, False)):
        symbol = mx.sym.Group(heads[:count])
        names = symbol.list_arguments()
        known = dict(zip(names, map(mx.nd.zeros, symbol.infer_shape(**shapes)[0])))
        graph = graph_json.read(symbol)
        found, _ = training_parts.compiled(symbol, graph, known, names, [])
        assert (found is not None) == is_compiled


@pytest.mark.parametrize("norm", [{"use_global_stats": True}, {"output_mean_var": True}])
def test_other_normalisation(mx, rng, norm):
    def make(convolution):
        x = convolution(mx.sym.Variable("data"), name="first", **COMMON)
        x = mx.sym.BatchNorm(x, name="norm", fix_gamma=False, **norm)[0]
        return convolution(mx.sym.relu(x), name="last", **COMMON)

    _check(mx, rng, make, gradient=lambda y: mx.nd.cos(mx.nd.arange(y.size)).reshape(y.shape))


def test_copies_once_a_gradient_is_to_be_added(mx, rng, monkeypatch):
    monkeypatch.setattr(autograd_state, "_may_add", False)
    made, compiled = [], training_parts.compiled

    def noted(*arguments, **keywords):
        made.append(compiled(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(training_parts, "compiled", noted)
    nets = [_net(mx, ours, static_alloc=True) for ours in (False, True)]
    x = mx.nd.array(rng.normal(0, 1, SHAPE))
    for request in ("write", "add"):
        for net in nets:
            for parameter in net.collect_params(".*(weight|beta)").values():
                parameter.grad_req = request
        found = []
        for net in nets:
            for _ in range(2):
                with mx.autograd.record():
                    loss = (net(x) ** 2).sum()
                loss.backward()
            parameters = net.collect_params(".*(weight|beta)").values()
            found.append({each.name: each.grad() for each in parameters})
        _agree(found[1], found[0])
        operators = {node["op"] for node in json.loads(made[-1][0].tojson())["nodes"]}
        assert ("_copy" in operators) == (request == "add")
    assert len(made) == 2


def test_recorded_calls_whose_gradients_are_added(mx, rng):
    x, w = (mx.nd.array(rng.normal(0, 1, shape)) for shape in (SHAPE, (8, 4, 3, 3)))
    for request in ("write", "add"):
        found = []
        for convolution in (mx.nd.Convolution, ece408_op.Convolution):
            for array in (x, w):
                array.attach_grad(request)
            for _ in range(2):
                with mx.autograd.record():
                    # The gradients of a sum's terms are the same array as its own.
                    y = convolution(mx.nd.elemwise_add(x, x), w, no_bias=True, **COMMON)
                y.backward()
            found.append({"x": x.grad, "w": w.grad})
        _agree(found[1], found[0])


@pytest.mark.parametrize("hybrid", STATIC)
def test_calls_recorded_before_their_gradients(mx, rng, hybrid):
    """Each call has activations of its own, and its gradients can be computed twice."""
    found = []
    pixels = [mx.nd.array(rng.normal(0, 1, SHAPE)) for _ in range(2)]
    for net in (_net(mx, ours, **hybrid) for ours in (False, True)):
        with mx.autograd.record():
            first, second = (net(x) for x in pixels)
            losses = [(first * first).sum(), (second**3).sum()]
        results = {}
        for number in (1, 0, 1):
            losses[number].backward(retain_graph=True)
            results.update((f"{len(results)} {name}", g) for name, g in _gradients(net).items())
        results.update({name: each.data() for name, each in _parameters(net).items()})
        found.append(results)
    _agree(found[1], found[0])


def test_a_loss_needs_no_gradient_for_its_result(mx, rng):
    def make(convolution):
        x = convolution(mx.sym.Variable("data"), name="first", **COMMON)
        x = mx.sym.FullyConnected(mx.sym.relu(x), num_hidden=5, name="dense")
        return mx.sym.SoftmaxOutput(x, name="softmax")

    _check(mx, rng, make, softmax_label=rng.integers(0, 5, SHAPE[0]))


@pytest.mark.parametrize("hybrid", STATIC)
def test_frozen_parameters(mx, rng, hybrid):
    """No average before them moves."""
    nets = [_net(mx, ours, **hybrid) for ours in (False, True)]
    x = mx.nd.array(rng.normal(0, 1, SHAPE))
    for request in ("write", "null", "write"):
        found = []
        for net in nets:
            net.collect_params(".*(conv|gamma|beta).*").setattr("grad_req", request)
            with mx.autograd.record():
                loss = (net(x) ** 2).sum()
            loss.backward()
            # Static graphs do not declare that they write averages.
            mx.nd.waitall()
            found.append({n: each.data().copy() for n, each in _parameters(net).items()})
            found[-1].update(_gradients(net))
        _agree(found[1], found[0])


@pytest.mark.parametrize("hybrid", STATIC)
def test_gradients_of_a_call_before_others_were_wanted(mx, rng, hybrid):
    found = []
    pixels = [mx.nd.array(rng.normal(0, 1, SHAPE)) for _ in range(2)]
    for net in (_net(mx, ours, **hybrid) for ours in (False, True)):
        with mx.autograd.record():
            first = (net(pixels[0]) ** 2).sum()
        pixels[1].attach_grad()
        with mx.autograd.record():
            second = (net(pixels[1]) ** 2).sum()
        second.backward(retain_graph=True)
        of_data = pixels[1].grad.copy()
        first.backward(retain_graph=True)
        found.append({**_gradients(net), "for data": of_data})
        pixels[1] = pixels[1].copy()
    _agree(found[1], found[0])


def test_gradients_of_prediction(mx, rng):
    """Those of a call that was recorded in training are refused, as it moves averages."""
    nets = [_net(mx, ours) for ours in (False, True)]
    x = mx.nd.array(rng.normal(0, 1, SHAPE))
    with mx.autograd.record():
        loss = nets[1](x).sum()
    with pytest.raises(errors.UnsupportedProblem, match="record it with train_mode=False"):
        loss.backward(train_mode=False)
    found = []
    for net in nets:
        with mx.autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        found.append(_gradients(net))
    _agree(found[1], found[0])


@pytest.mark.parametrize("request_of_all", ["write", "add"])
def test_a_fixed_gamma_is_1_in_training(mx, rng, request_of_all):
    def make(convolution):
        x = convolution(mx.sym.Variable("data"), name="first", **COMMON)
        return mx.sym.BatchNorm(x, name="norm", use_global_stats=True)

    _check(mx, rng, make, request_of_all, mx.nd.ones_like)
