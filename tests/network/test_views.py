"""Layers whose results are reshaped, in every precision, for every kind of GPU."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
from gpu_networks import NETWORKS, Case, array, check_together, error, small

from ece408_op import settings
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.errors import UnsupportedProblem
from ece408_op.network import Array, network_program, values
from ece408_op.network.builder import Builder
from ece408_op.network.graph import Graph
from ece408_op.network.inputs import Calls
from ece408_op.network.machines.gpu_steps import GpuSteps
from ece408_op.network.node_attributes import Attributes
from ece408_op.network.operators import elementwise

BELOW = 3e-6


def _views(sym):
    """Return symbols on "data" of shape (3, 6, 8), by name."""
    x = sym.Variable("data")

    def dense(name, outputs=6):
        return sym.FullyConnected(x, num_hidden=outputs, flatten=False, name=name)

    def conv(name, shape):
        images = sym.Reshape(x, shape=(0, 6, 4, 2))
        y = sym.Convolution(images, kernel=(1, 1), num_filter=6, name=name)
        return sym.Reshape(y, shape=shape)

    def norm(y, **options):
        return sym.BatchNorm(y, fix_gamma=False, name="norm", **options)

    return {
        "concat of dense layers": sym.concat(dense("a"), dense("b"), dim=1),
        "concat of one dense layer": sym.concat(dense("a"), dim=1),
        "concat of units": sym.concat(dense("a"), dense("b"), dim=2),
        "concat of images taken apart": sym.concat(
            conv("a", (-1, 2, 4, 2)), conv("b", (-1, 2, 4, 2)), dim=1
        ),
        "concat of images put together": sym.concat(
            conv("a", (1, -1, 4, 2)), conv("b", (1, -1, 4, 2)), dim=1
        ),
        "norm of as many rows as units": norm(dense("a")),
        "norm of rows": norm(dense("a", 5)),
        "norm of units": norm(dense("a", 5), axis=-1),
        "norm of images taken apart": norm(conv("a", (9, 2, 4, 2))),
        "norm of other images": norm(conv("a", (2, 6, 12))),
        "norm of channels with more axes": norm(conv("a", (0, 0, 2, 2, 2))),
        "mean of axes apart": sym.mean(conv("a", (0, 0, 4, 2)), axis=(0, 2)),
        "sum of axes apart": sym.sum(conv("a", (0, 0, 4, 2)), axis=(1, 3), keepdims=True),
        "rows of a part of a split": 2 * sym.Reshape(sym.split(x, num_outputs=2)[0], shape=(-1, 4)),
        "pooling of five axes": sym.Pooling(
            conv("a", (0, 0, 2, 2, 2)), global_pool=True, pool_type="avg"
        ),
    }


@pytest.mark.usefixtures("emulated")
def test_layers_seen_in_another_shape(mx):
    cases = {name: Case(symbol, data=(3, 6, 8)) for name, symbol in _views(mx.sym).items()}
    part = mx.sym.split(mx.sym.Variable("data") * 2, axis=1, num_outputs=1)
    part = mx.sym.Reshape(part, shape=(-1,))
    cases["the one part of a split"] = Case(part, whole=True, data=(3, 22))
    labelled = mx.sym.SoftmaxOutput(mx.sym.Variable("data"), mx.sym.Variable("label"))
    for axes in ((4, 5), (4, 5, 6, 7, 2)):
        case = Case(labelled, data=(3, *axes), label=(3, *axes[:-1]))
        cases[f"softmax with a label of {len(axes)} axes"] = case
    check_together(cases, BELOW)


@pytest.mark.usefixtures("emulated")
def test_a_chain_before_a_dense_layer_of_one_image(mx):
    """The array has one element for each channel, like its factors."""
    x, y = mx.sym.Variable("data"), mx.sym.Variable("scale", shape=(1, 24))
    for chain in (x, x * y, x * y + x):
        case = Case(mx.sym.FullyConnected(chain, num_hidden=5, name="fc"), data=(1, 24))
        for precision in ("strict", "float32", "tf32", "float16"):
            with settings.override(precision=precision):
                (found,) = case.run(case.network())
            assert error(found, case.expected()[0]) < BELOW


CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


def _built(case, capability):
    """Plan a network's steps for a GPU, which need not exist."""
    inputs = [array(each) for each in case.arrays.values()]
    weights = frozenset(case.arrays) - case.shapes.keys()
    outputs = [Array(0, shape, "float32", 0) for shape in case.output_shapes]
    call = Calls(list(case.arrays), weights).call(inputs, outputs, True)
    gpu = SimpleNamespace(name="a GPU", capability=capability, driver=13000)
    machine = SimpleNamespace(lowering=functools.partial(GpuSteps, gpu))
    return network_program.build(Graph.parse(case.symbol.tojson()), call.inputs, machine)[0]


@pytest.mark.parametrize("precision", ["strict", "float32", "tf32", "float16"])
def test_steps_for_every_gpu_and_precision(mx, precision):
    for name in NETWORKS:
        for batch in (1, 40):
            case = small(mx, name)
            case = Case(case.symbol, data=(batch, *case.shapes["data"][1:]))
            for capability in CAPABILITIES:
                with settings.override(precision=precision):
                    steps = _built(case, capability)
                assert [each.shape for each in steps.outputs] == case.output_shapes, name
                for step in (*steps.for_weights, *steps.for_images):
                    for value in step.arrays.values():
                        assert value.end <= value.buffer.nbytes, (name, capability, step.node)


def test_kernels_that_store_halves(mx):
    """Of 1x1 layers on whole planes of a multiple of four pixels, and of others; with a sum, and
    with a normalisation before."""
    x, made = mx.sym.Variable("data"), {}
    for name, filters, kernel in (("a", 24, 1), ("b", 24, 3), ("c", 24, 1), ("d", 16, 1)):
        stride = (2, 2) if name == "d" else (1, 1)
        options = {"kernel": (kernel, kernel), "pad": (kernel // 2,) * 2, "stride": stride}
        if name == "c":
            x = mx.sym.relu(mx.sym.BatchNorm(x, name="norm", fix_gamma=False))
        x = made[name] = mx.sym.Convolution(x, num_filter=filters, name=name, **options)
    symbol = mx.sym.Group([made["d"], made["a"] + made["c"]])
    with settings.override(precision="float16"):
        for batch, stored in ((40, "float16"), (1, "float32")):
            steps = _built(Case(symbol, data=(batch, 16, 6, 6)), (9, 0))
            found = {step.node: step for step in steps.for_images if step.problem}
            assert {found[name].arrays["y"].dtype for name in "ab"} == {stored}
            if batch > 1:
                by = {name: found[name].plan.name for name in "abcd"}
                assert [name for name in by if by[name] == "pointwise_half"] == ["a", "c"]
                assert all(catalog.get(each).family.stores for each in by.values())
                assert ("VECTOR", 4) in found["a"].plan.defines


def test_a_step_that_would_write_beyond_its_array_is_refused(mx, monkeypatch):
    """A planted error: an array that claims too many images."""
    empty = Builder.empty

    def short(self, shape, constant, dtype="float32"):
        made = empty(self, shape, constant, dtype)
        return dataclasses.replace(made, buffer=values.Buffer(made.buffer.kind, 4))

    monkeypatch.setattr(Builder, "empty", short)
    with pytest.raises(UnsupportedProblem, match=r"conv1: .* would reach byte 9600 of y, which"):
        _built(small(mx, "lenet"), (7, 5))


def test_dropout_that_is_always_random_is_not_computed():
    why_not = elementwise.OPERATORS["Dropout"].why_not
    assert why_not(Attributes("Dropout", {"mode": "always"})) == "mode always is not computed"
    assert why_not(Attributes("Dropout", {"mode": "training"})) is None
