"""Gradients of networks on the CPU, against MXNet's autograd and finite differences."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import numpy as np
import operator_draws
import operator_fuzz
import pytest
import random_graphs
from gpu_networks import array, error
from gradient_cases import Recorded, TrainingCase

from ece408_op import settings
from ece408_op.backends.cpu.program import Kind
from ece408_op.errors import Ece408Error, InvalidProblem, UnsupportedProblem
from ece408_op.network.gradients import RULES
from ece408_op.network.training import Training

BELOW = 1e-5
# A factor over MXNet's own error in float32, and sums that are only rounding.
FACTOR, LEAST = 8, 1.0
_SHAPE = (3, 4, 5, 7)


def _layers(sym):
    """Return symbols of layers by name, on "data" of `_SHAPE`."""
    x, other = sym.Variable("data"), sym.Variable("other", shape=_SHAPE)
    small = sym.Reshape(x, shape=(0, 0, -1))

    def norm(x, name, **options):
        return sym.BatchNorm(x, name=name, fix_gamma=False, eps=1e-3, **options)

    def pool(x, *windows, **options):
        kernel, stride, pad = windows
        return sym.Pooling(x, kernel=kernel, stride=stride, pad=pad, **options)

    convolved = {"kernel": (3, 2), "stride": (2, 1), "pad": (1, 0), "num_group": 2}
    scaled = norm(x, "c")
    return {
        "convolution": sym.Convolution(x, num_filter=6, dilate=(1, 2), **convolved, name="conv"),
        "rows": sym.Convolution(small, num_filter=5, kernel=(3,), no_bias=True, name="conv"),
        "deconvolution": sym.Deconvolution(
            *(x,), num_filter=6, adj=(1, 0), **convolved, no_bias=False, name="d"
        ),
        "dense": sym.FullyConnected(x, num_hidden=9, name="fc"),
        "dense_rows": sym.FullyConnected(x, num_hidden=3, flatten=False, name="fc"),
        "norm": norm(x, "a"),
        "norm_fixed": sym.BatchNorm(x, name="a", momentum=0.7),
        "norm_last": norm(x, "a", axis=-1),
        "norm_global": norm(x, "a", use_global_stats=True, axis=2),
        "norm_global_fixed": sym.BatchNorm(x, name="a", use_global_stats=True),
        "norm_relu": sym.relu(norm(x, "a")),
        "norm_sum_relu": sym.Activation(other + norm(x, "a"), act_type="relu"),
        "norms_sum_relu": sym.relu(norm(x, "a") + sym.BatchNorm(other, name="b")),
        # The normalisation has another use.
        "norm_relu_twice": sym.broadcast_mul(sym.relu(scaled), scaled),
        "pool_max": pool(x, (2, 3), (2, 1), (1, 1)),
        "pool_max_apart": pool(x, (2, 2), (3, 3), (0, 0)),
        "pool_max_full": pool(x, (3, 3), (2, 2), (0, 1), pooling_convention="full"),
        # The last window has no element.
        "pool_max_none": pool(x, (2, 1), (1, 4), (0, 0), pooling_convention="full"),
        "pool_rows": pool(small, (3,), (2,), (1,)),
        "pool_avg": pool(x, (3, 3), (1, 2), (1, 0), pool_type="avg"),
        "pool_avg_inside": pool(
            *(x, (3, 2), (2, 2), (1, 1)), pool_type="avg", count_include_pad=False
        ),
        "pool_sum": pool(x, (2, 2), (1, 1), (0, 1), pool_type="sum"),
        "global": sym.Group(
            [
                sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type=kind)
                for kind in ("avg", "max", "sum")
            ]
        ),
    }


def _others(sym):
    """Return symbols of other operators by name."""
    x, label = sym.Variable("data"), sym.Variable("label")
    channels = sym.Variable("channels", shape=(1, 4, 1, 1))
    internal = sym._internal
    apart = 3 + channels
    positive = sym.square(x) + 1

    def act(kind):
        return sym.Activation(x, act_type=kind)

    def leaky(kind, **attributes):
        return sym.LeakyReLU(x, act_type=kind, **attributes)

    turned = sym.SwapAxis(x, dim1=1, dim2=3)
    squeezed = sym.split(sym.expand_dims(x, 1), num_outputs=1, axis=1, squeeze_axis=True)
    parts = sym.SliceChannel(x, num_outputs=5, axis=2, squeeze_axis=True)
    return {
        "activations": act("relu") + 2 * act("tanh") + 3 * act("sigmoid"),
        "soft": act("softrelu") - act("softsign") + sym.softsign(x) * sym.sigmoid(x),
        "functions": sym.exp(x) - sym.abs(x) * sym.tanh(x) + sym.negative(x) * sym.erf(x),
        "roots": sym.log(positive) / sym.sqrt(positive) + sym.relu(x),
        "clips": sym.clip(x, -0.5, 0.25) - sym.hard_sigmoid(x, alpha=0.4) + sym.clip(x, 1, -1),
        "leaky": leaky("leaky", slope=0.3) + 2 * leaky("elu", slope=0.7) + leaky("gelu"),
        "prelu": sym.LeakyReLU(x, sym.Variable("gamma", shape=(4,)), act_type="prelu"),
        "prelu_one": sym.LeakyReLU(x, sym.Variable("gamma", shape=(1,)), act_type="prelu"),
        "scalars": (1 - x) / 3 + 2 * x - 0.5 + 1 / positive + (x - -0.5) * (positive**1.5),
        "bounds": internal._maximum_scalar(x, scalar=0.3) * internal._minimum_scalar(x, scalar=0.1),
        "arithmetic": (x + x * x) / (positive - x) + sym.add_n(x, 2 * x),
        "elementwise": sym.elemwise_div(
            sym.elemwise_mul(x, x), sym.elemwise_sub(positive, sym.elemwise_add(x, x) / 4)
        ),
        "spread": sym.broadcast_div(
            sym.broadcast_mul(sym.broadcast_add(x, channels), sym.broadcast_sub(channels, x)), apart
        ),
        "spread_names": sym.broadcast_plus(x, channels) * sym.broadcast_minus(x, channels),
        "constants": x * sym.BlockGrad(x) + sym.Cast(x, dtype="float32") * sym.ones_like(x),
        "reductions": sym.broadcast_mul(
            sym.mean(x, axis=(0, 2), keepdims=True), sym.max(x, axis=(1, 3), keepdims=True)
        ),
        "sums": sym.Group([sym.sum(x, axis=(1, 3)), sym.sum(x)]),
        "adaptive": sym.contrib.AdaptiveAvgPooling2D(x),
        "softmax": sym.softmax(x, axis=1, temperature=2) * sym.log_softmax(x),
        "softmax_channels": sym.SoftmaxActivation(x, mode="channel"),
        "softmax_rows": sym.SoftmaxActivation(sym.reshape(x, shape=(0, -1))),
        "softmax_output": sym.SoftmaxOutput(sym.Flatten(x), label, name="softmax"),
        "views": sym.Flatten(sym.reshape(x, shape=(0, -3, -1))) + sym.reshape_like(
            sym.Reshape(x, shape=(-1,)), sym.Flatten(x)
        ),
        "axes": sym.squeeze(sym.expand_dims(sym.transpose(x, axes=(0, 2, 3, 1)), 1)) * 2,
        "turns": sym.transpose(x) * sym.transpose(sym.swapaxes(turned, dim1=3, dim2=1)),
        "slices": sym.slice_axis(x, axis=-1, begin=-3, end=None) * 2,
        "slice_like": sym.slice_like(x, sym.Variable("like", shape=(2, 4, 3, 9)), axes=(0, 2)),
        "broadcast_like": sym.broadcast_like(channels, x) * x,
        "concat": sym.concat(x, x * 2, sym.slice_axis(x, axis=1, begin=1, end=3), dim=1) * 3,
        "concat_last": sym.Concat(x, sym.tanh(x), dim=-1) * 3,
        "split": sym.split(x, num_outputs=2, axis=1)[1] * 3,
        "splits": sym.Group([squeezed, parts[3] * parts[1]]),
        "scaled": sym.UpSampling(x, scale=3, sample_type="nearest"),
    }  # fmt: skip


def _compare(found, expected):
    for number, (y, right) in enumerate(zip(found[0], expected[0])):
        assert error(y, right) < BELOW, number
    for made, right in zip(found[1:], expected[1:]):
        for name in made:
            assert error(made[name], right[name]) < BELOW, name


def _whole(case):
    """Make all numbers whole and small."""
    for name, values in case.arrays.items():
        case.arrays[name] = np.round(3 * values / np.abs(values).max()).astype(np.float32)
    case.heads = [np.round(2 * each) for each in case.heads]
    return case


def test_a_rule_gives_mxnets_gradient(mx):
    """Also where whole numbers are equal, or at a kink."""
    symbols, seen = {**_layers(mx.sym), **_others(mx.sym)}, set()
    wrong = []
    for name, symbol in symbols.items():
        for case in (TrainingCase(symbol, data=_SHAPE), _whole(TrainingCase(symbol, data=_SHAPE))):
            try:
                _compare(case.found(), case.expected())
            except AssertionError as difference:
                wrong.append(f"{name}: {difference}")
        seen |= {node["op"] for node in json.loads(symbol.tojson())["nodes"]}
    assert not wrong
    assert len(seen & set(RULES)) >= 60


def test_inference_has_gradients_too(mx):
    """By moving averages, which stay."""
    for name in ("norm", "norm_fixed", "norm_last", "norm_sum_relu", "convolution"):
        case = TrainingCase(_layers(mx.sym)[name], train=False, data=_SHAPE)
        outputs, gradients, averages = case.found()
        _compare((outputs, gradients), case.expected())
        assert not averages


def test_softmax_output_scales_and_ignores_as_mxnet_does(mx):
    x, label = mx.sym.Variable("data"), mx.sym.Variable("label")
    forms = [({}, (5, 7), (5,)), ({"multi_output": True}, (3, 4, 5), (3, 5))]
    forms += [({"preserve_shape": True}, (3, 4, 5, 6), (3, 4, 5)), ({}, (5, 7), (5, 7))]
    for form, data, labels in forms:
        for how in ("null", "batch", "valid"):
            for ignored in (False, True):
                options = {"normalization": how, "use_ignore": ignored, "ignore_label": 2}
                symbol = mx.sym.SoftmaxOutput(x, label, grad_scale=0.5, **form, **options, name="s")
                case = TrainingCase(symbol, data=data, label=labels)
                _compare(case.found(), case.expected())


def test_a_loss_has_its_gradient_whatever_reads_it(mx):
    loss = mx.sym.SoftmaxOutput(mx.sym.Variable("data") * 3, name="loss")
    for symbol in (mx.sym.BlockGrad(loss), mx.sym.zeros_like(loss)):
        case = TrainingCase(symbol, data=(4, 5))
        expected = case.expected()[1]["data"]
        assert np.abs(expected).max() > 0.1
        assert error(case.found()[1]["data"], expected) < BELOW


@pytest.mark.parametrize("op", ["clip", "_maximum_scalar", "_minimum_scalar"])
def test_gradients_of_bounds(mx, op):
    """At the bounds, and of NaN."""
    given = {"a_min": 0, "a_max": 0} if op == "clip" else {"scalar": 0}
    function = getattr(mx.sym, op, None) or getattr(mx.sym._internal, op)
    case = TrainingCase(function(mx.sym.Variable("data"), **given), data=(2, 5))
    case.arrays["data"][:] = np.nan, -1, 0, 1, np.inf
    np.testing.assert_array_equal(case.found()[1]["data"], case.expected()[1]["data"])


def test_where_mxnet_is_odd_finite_differences_decide(mx):
    sym, x = mx.sym, mx.sym.Variable("data")
    gamma = sym.Variable("gamma", shape=(4,))
    rows = {"kernel": (3,), "stride": (2,), "pad": (1,), "pooling_convention": "full"}
    odd = {
        # MXNet's has another formula.
        "selu": sym.LeakyReLU(x, act_type="selu"),
        # It reads data that it has overwritten.
        "prelu": sym.LeakyReLU(x * 2, gamma, act_type="prelu"),
        "cut": sym.Pooling(sym.reshape(x, shape=(0, 0, -1)), pool_type="avg", **rows),
    }
    for name, symbol in odd.items():
        case = TrainingCase(symbol, data=_SHAPE)
        # Away from the kinks at 0.
        case.arrays["data"] = np.round(4 * case.arrays["data"]) / 4 + np.float32(0.125)
        assert _slopes_are_right(case, case.found()[1], 1e-3), name


def _slopes_are_right(case, gradients, step=1e-5):
    rng = np.random.default_rng(1)
    for name, found in gradients.items():
        direction = rng.standard_normal(found.shape)
        mine = (found.astype(np.float64) * direction).sum()
        size = max(LEAST, np.linalg.norm(found))
        if not abs(case.slope(name, direction, step) - mine) < 1e-3 * size:
            return False
    return True


def _random_case(mx, seed):
    rng = random.Random(seed)
    chain = operator_fuzz.chain(mx, rng, rng.choice(sorted(operator_draws.NODES)))
    # Roots and logarithms are of positive numbers in half of the cases.
    return TrainingCase(chain.symbol, seed=seed, lowest=(-2, 0.3)[seed % 2], **chain.shapes)


def _is_mxnets(case, found, below=BELOW):
    """Return whether all gradients are MXNet's, but for rounding."""
    right, exact = case.expected(), case.expected("float64")
    for name, made in found[1].items():
        own = np.abs(right[1][name] - exact[1][name]).max()
        bound = max(below * max(LEAST, np.abs(exact[1][name]).max()), FACTOR * own)
        if not np.abs(made - exact[1][name]).max() <= bound:
            return False
    return True


def test_random_chains_of_operators(mx):
    """MXNet's gradients, or finite differences: it fails with two equal inputs of Concat, and
    LeakyReLU and others give wrong ones."""
    computed, wrong = 0, []
    for seed in range(30):
        case = _random_case(mx, seed)
        try:
            found = case.found()
        except Ece408Error:
            continue
        nodes = json.loads(case.symbol.tojson())["nodes"]
        joins = [node["inputs"] for node in nodes if node["op"] in ("Concat", "concat")]
        crashes = any(inputs.count(each) > 1 for inputs in joins for each in inputs)
        if (crashes or not _is_mxnets(case, found)) and not _slopes_are_right(case, found[1]):
            wrong.append(seed)
        computed += 1
    assert not wrong
    assert computed >= 20


def test_random_networks(mx):
    """Networks around convolutions, as they are run in MXNet's own ways."""
    computed = 0
    for seed in range(30):
        network = random_graphs.Generator(seed).make()
        network.adds = False
        values = random_graphs.Values(network)
        symbol = network.symbol(mx, lambda F: F.Convolution)
        given = {"data": values.data[0], **values.parameters, **values.averages}
        wanted = symbol.list_arguments()
        arrays = {name: given[name] for name in (*wanted, *symbol.list_auxiliary_states())}
        case = SimpleNamespace(arrays=arrays, heads=values.heads, wanted=wanted)
        try:
            training = Training(symbol.tojson(), list(arrays), wanted)
            recorded = Recorded(case, training, [array(each) for each in arrays.values()])
        except UnsupportedProblem:
            continue
        results = random_graphs.Results([], recorded.outputs, *recorded.backward())
        expected = random_graphs.Expected(mx, network, values)
        assert not expected.failures(lambda _, found=results: found, None), seed
        computed += 1
    assert computed > 8


def test_networks_of_the_zoo(mx):
    for name in ("resnet18_v1", "mobilenetv2_1.0"):
        net = mx.gluon.model_zoo.vision.get_model(name, classes=10)
        text = net(mx.sym.Variable("data")).tojson()
        # At the bounds of 50 layers' clip rounding decides about gradients.
        text = text.replace('"a_max": "6"', '"a_max": "1e9"').replace(
            '"a_min": "0"', '"a_min": "-1e9"'
        )
        case = TrainingCase(mx.sym.load_json(text), data=(3, 3, 64, 64))
        assert _is_mxnets(case, case.found(), 1e-3), name


def _small(sym):
    """Return a network with shared weights, a residual unit, pooling and a concatenation."""
    weight = sym.Variable("shared_weight")

    def shared(x):
        options = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 6, "no_bias": True}
        return sym.Convolution(x, weight, **options)

    x = sym.Convolution(sym.Variable("data"), kernel=(3, 3), num_filter=6, name="first")
    x = sym.relu(sym.BatchNorm(shared(x), name="a") + x)
    x = sym.concat(shared(x), sym.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type="max"))
    x = sym.BatchNorm(sym.Pooling(x, kernel=(3, 3), stride=(2, 2), pool_type="avg"), name="b")
    return sym.SoftmaxOutput(sym.FullyConnected(x, num_hidden=5, name="fc"), name="softmax")


def _arrays(results):
    """Return gradients and moving averages as bytes."""
    return [each.tobytes() for found in results for each in found.values()]


def test_results_do_not_depend_on_the_number_of_threads(mx):
    case = TrainingCase(_small(mx.sym), data=(7, 3, 23, 19))
    found = []
    for threads in (1, 3):
        with settings.override(threads=threads):
            outputs, *results = case.found()
        found.append([outputs[0].tobytes(), *_arrays(results)])
    assert found[0] == found[1]


def test_a_backward_pass_belongs_to_its_forward_pass(mx):
    """Another forward pass may come between them, and it may run again."""
    case = TrainingCase(_small(mx.sym), data=(2, 3, 13, 11))
    training = case.training()
    first = case.record(training)
    right = _arrays(first.backward())
    case.arrays["data"] = case.arrays["data"][::-1].copy()
    second = case.record(training)
    assert _arrays(first.backward()) == right
    other = _arrays(second.backward())
    assert other != right
    assert _arrays(first.backward()) == right
    assert _arrays(second.backward()) == other


def test_sums_of_gradients_are_exact_on_whole_numbers(mx):
    """Gradients of a weight and of data that are used twice are added where the first one is."""
    sym, data, weight = mx.sym, mx.sym.Variable("data"), mx.sym.Variable("shared_weight")
    options = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 4, "no_bias": True}

    def shared(x):
        return sym.Convolution(x, weight, **options)

    symbols = {
        "added": shared(shared(data)) + sym.Convolution(data, **options, name="a"),
        # Both gradients are equal.
        "same": shared(data) + shared(data),
        # An output is an input.
        "outputs": sym.Group([data, data * 2, data * data]),
    }
    for name, symbol in symbols.items():
        wanted = ["shared_weight"] if name == "same" else None
        case = _whole(TrainingCase(symbol, wanted, data=(2, 4, 7, 5)))
        found, expected = case.found()[1], case.expected()[1]
        assert all(np.array_equal(found[each], expected[each]) for each in found), name
    case = TrainingCase(symbols["added"], data=(2, 4, 7, 5))
    steps = case.record(case.training()).program.steps.for_images
    added = [step.plan.kind for step in steps if "onto" in step.arrays]
    assert sorted(added) == [Kind.DATA_GRADIENT, Kind.WEIGHT_GRADIENT]


def test_two_variables_of_one_name_are_one_array(mx):
    data = mx.sym.Variable("data")
    case = TrainingCase(data * data, data=_SHAPE)
    twins = (mx.sym.Variable("twin") * data).tojson().replace('"twin"', '"data"')
    assert np.array_equal(case.found(twins)[1]["data"], case.found()[1]["data"])


def test_only_wanted_gradients_are_computed(mx):
    def kinds(wanted):
        case = TrainingCase(_small(mx.sym), wanted, data=(2, 3, 13, 11))
        recorded = case.record(case.training())
        gradients = recorded.backward()[0]
        for name, right in case.expected()[1].items():
            assert error(gradients[name], right) < BELOW, name
        return [step.plan.kind for step in recorded.program.steps.for_images]

    data = kinds(["data"])
    assert Kind.WEIGHT_GRADIENT not in data
    assert data.count(Kind.DATA_GRADIENT) == 3
    # That of a fully connected layer's weights is another convolution's for data.
    last = kinds(["fc_weight"])
    assert last.count(Kind.DATA_GRADIENT) == 1
    assert not {Kind.WEIGHT_GRADIENT, Kind.NORM_GRADIENT, Kind.POOL_GRADIENT} & set(last)


def test_a_variable_that_changes_nothing_has_a_zero_gradient(mx):
    x, y = mx.sym.Variable("data"), mx.sym.Variable("y")
    case = TrainingCase(x * 2 + mx.sym.BlockGrad(y), data=_SHAPE)
    assert not case.found()[1]["y"].any()


def test_data_of_other_types(mx):
    case = TrainingCase(_small(mx.sym), ["first_weight"], data=(2, 3, 13, 11))
    for dtype in (np.float16, np.uint8):
        case.arrays["data"] = np.abs(40 * case.arrays["data"]).astype(dtype)
        narrow = case.found()[1]["first_weight"]
        case.arrays["data"] = case.arrays["data"].astype(np.float32)
        assert np.array_equal(narrow, case.found()[1]["first_weight"])


def test_strict_gradients_sum_in_float64(mx):
    case = TrainingCase(_layers(mx.sym)["convolution"], data=(2, 4, 9, 8))
    exact = case.expected("float64")[1]
    with settings.override(precision="strict"):
        found = case.found()[1]
    for name in case.wanted:
        assert error(found[name], exact[name]) < 1e-7, name


def test_our_own_convolution_has_the_same_gradients(mx):
    case = TrainingCase(_small(mx.sym), data=(2, 3, 13, 11))
    text = case.symbol.tojson().replace('"op": "Convolution"', '"op": "ece408_conv"')
    outputs, *results = case.found()
    own, *others = case.found(text)
    assert np.array_equal(outputs[0], own[0])
    assert _arrays(results) == _arrays(others)


def test_what_is_not_computed_is_one_line(mx):
    sym, x = mx.sym, mx.sym.Variable("data")
    statistics = sym.BatchNorm(x, output_mean_var=True, name="a")
    refused = {
        "LRN .*: its gradient is not computed": sym.LRN(x, nsize=3),
        "dropout is not computed in training": sym.Dropout(x),
        "the gradient of rrelu is not computed": sym.LeakyReLU(x, act_type="rrelu")[0],
        "output_mean_var is not computed": sym.Group([sym.relu(statistics[0]), statistics[1]]),
        "out_grad is not computed": sym.SoftmaxOutput(x, out_grad=True, multi_output=True),
        "multi_output or preserve_shape only": sym.SoftmaxOutput(x),
    }
    for message, symbol in refused.items():
        with pytest.raises(UnsupportedProblem, match=message) as raised:
            TrainingCase(symbol, data=_SHAPE).found()
        assert "\n" not in str(raised.value)


def test_it_refuses_other_names_and_arrays(mx):
    case = TrainingCase(mx.sym.Variable("data") * 2, data=_SHAPE)
    text = case.symbol.tojson()
    with pytest.raises(UnsupportedProblem, match="takes no weight"):
        Training(text, ["data"], ["weight"])
    training = case.training()
    with pytest.raises(InvalidProblem, match="takes 1 arrays, not 0"):
        training.program([])
    with pytest.raises(UnsupportedProblem, match="data is of type uint8"):
        training.program([array(np.zeros(_SHAPE, np.uint8))])
    program = case.record(training).program
    with pytest.raises(InvalidProblem, match="this program takes"):
        program.forward([array(np.zeros((3, 4), np.float32))], [], 0)
