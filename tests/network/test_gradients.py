"""Gradients of networks on the CPU, against MXNet's autograd and finite differences."""

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
from gradient_symbols import BELOW, SHAPE, compare, layers, others, small, whole

from ece408_op import settings
from ece408_op.backends.cpu.program import Kind
from ece408_op.errors import Ece408Error, InvalidProblem, UnsupportedProblem
from ece408_op.network.gradients import RULES
from ece408_op.network.training import Training

# A factor over MXNet's own error in float32, and sums that are only rounding.
FACTOR, LEAST = 8, 1.0


def test_a_rule_gives_mxnets_gradient(mx):
    """Also where whole numbers are equal, or at a kink."""
    symbols, seen = {**layers(mx.sym), **others(mx.sym)}, set()
    wrong = []
    for name, symbol in symbols.items():
        for case in (TrainingCase(symbol, data=SHAPE), whole(TrainingCase(symbol, data=SHAPE))):
            try:
                compare(case.found(), case.expected())
            except AssertionError as difference:
                wrong.append(f"{name}: {difference}")
        seen |= {node["op"] for node in json.loads(symbol.tojson())["nodes"]}
    assert not wrong
    assert len(seen & set(RULES)) >= 60


def test_inference_has_gradients_too(mx):
    """By moving averages, which stay."""
    for name in ("norm", "norm_fixed", "norm_last", "norm_sum_relu", "convolution"):
        case = TrainingCase(layers(mx.sym)[name], train=False, data=SHAPE)
        outputs, gradients, averages = case.found()
        compare((outputs, gradients), case.expected())
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
                compare(case.found(), case.expected())


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
        case = TrainingCase(symbol, data=SHAPE)
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


@pytest.mark.slow
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


def _arrays(results):
    """Return gradients and moving averages as bytes."""
    return [each.tobytes() for found in results for each in found.values()]


def test_results_do_not_depend_on_the_number_of_threads(mx):
    case = TrainingCase(small(mx.sym), data=(7, 3, 23, 19))
    found = []
    for threads in (1, 3):
        with settings.override(threads=threads):
            outputs, *results = case.found()
        found.append([outputs[0].tobytes(), *_arrays(results)])
    assert found[0] == found[1]


def test_a_backward_pass_belongs_to_its_forward_pass(mx):
    """Another forward pass may come between them, and it may run again."""
    case = TrainingCase(small(mx.sym), data=(2, 3, 13, 11))
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
        case = whole(TrainingCase(symbol, wanted, data=(2, 4, 7, 5)))
        found, expected = case.found()[1], case.expected()[1]
        assert all(np.array_equal(found[each], expected[each]) for each in found), name
    case = TrainingCase(symbols["added"], data=(2, 4, 7, 5))
    steps = case.record(case.training()).program.steps.for_images
    added = [step.plan.kind for step in steps if "onto" in step.arrays]
    assert sorted(added) == [Kind.DATA_GRADIENT, Kind.WEIGHT_GRADIENT]


def test_two_variables_of_one_name_are_one_array(mx):
    data = mx.sym.Variable("data")
    case = TrainingCase(data * data, data=SHAPE)
    twins = (mx.sym.Variable("twin") * data).tojson().replace('"twin"', '"data"')
    assert np.array_equal(case.found(twins)[1]["data"], case.found()[1]["data"])


def test_only_wanted_gradients_are_computed(mx):
    def kinds(wanted):
        case = TrainingCase(small(mx.sym), wanted, data=(2, 3, 13, 11))
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
    case = TrainingCase(x * 2 + mx.sym.BlockGrad(y), data=SHAPE)
    assert not case.found()[1]["y"].any()


def test_data_of_other_types(mx):
    case = TrainingCase(small(mx.sym), ["first_weight"], data=(2, 3, 13, 11))
    for dtype in (np.float16, np.uint8):
        case.arrays["data"] = np.abs(40 * case.arrays["data"]).astype(dtype)
        narrow = case.found()[1]["first_weight"]
        case.arrays["data"] = case.arrays["data"].astype(np.float32)
        assert np.array_equal(narrow, case.found()[1]["first_weight"])


def test_strict_gradients_sum_in_float64(mx):
    case = TrainingCase(layers(mx.sym)["convolution"], data=(2, 4, 9, 8))
    exact = case.expected("float64")[1]
    with settings.override(precision="strict"):
        found = case.found()[1]
    for name in case.wanted:
        assert error(found[name], exact[name]) < 1e-7, name


def test_our_own_convolution_has_the_same_gradients(mx):
    case = TrainingCase(small(mx.sym), data=(2, 3, 13, 11))
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
            TrainingCase(symbol, data=SHAPE).found()
        assert "\n" not in str(raised.value)


def test_it_refuses_other_names_and_arrays(mx):
    case = TrainingCase(mx.sym.Variable("data") * 2, data=SHAPE)
    text = case.symbol.tojson()
    with pytest.raises(UnsupportedProblem, match="takes no weight"):
        Training(text, ["data"], ["weight"])
    training = case.training()
    with pytest.raises(InvalidProblem, match="takes 1 arrays, not 0"):
        training.program([])
    with pytest.raises(UnsupportedProblem, match="data is of type uint8"):
        training.program([array(np.zeros(SHAPE, np.uint8))])
    program = case.record(training).program
    with pytest.raises(InvalidProblem, match="this program takes"):
        program.forward([array(np.zeros((3, 4), np.float32))], [], 0)
