"""`precision`: an attribute, an option and a setting that permits less exact kernels."""

import dataclasses
import json

import numpy as np
import pytest
from fake_gpu import FakeGpu
from harness import attributes

import ece408_op
from ece408_op import dispatch, settings
from ece408_op.backends import Backend
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cuda import cuda_backend as cuda_backend
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.bench import oracle
from ece408_op.bench.checker import random_cases
from ece408_op.bench.shapes import SHAPES
from ece408_op.errors import InvalidSetting
from ece408_op.op_log import GpuTime
from ece408_op.operator.conv_attributes import ConvAttributes
from ece408_op.problem import PRECISIONS, ConvProblem

UNKNOWN = r"unknown precision 'half'; choose one of strict, float32, tf32, float16"


@pytest.fixture
def symbol(mx):
    data = mx.sym.Variable("data")
    return mx.sym.Convolution(data, kernel=(3, 3), num_filter=2, name="conv1")


def _attributes(symbol):
    nodes = json.loads(symbol.tojson())["nodes"]
    return next(node["attrs"] for node in nodes if node["op"] == "Custom")


def test_each_precision_permits_what_the_stricter_ones_do():
    problem = ConvProblem.parse("b32,c64,h28,w28,m64,k3")
    for kernel in catalog.KERNELS:
        permitted = [kernel.permitted(name, problem) for name in PRECISIONS]
        assert permitted == sorted(permitted)
        assert permitted[0] == (kernel.precision == "strict")
        assert permitted[1] == kernel.float32_accurate
        assert permitted[-1]


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (12, 0)])
def test_nothing_less_exact_is_chosen_unless_it_is_permitted(capability):
    drawn = [case.problem for case in random_cases(catalog.get("6_register_tiles"), 60)]
    for problem in [*SHAPES.values(), *drawn]:
        for name in PRECISIONS:
            chosen = catalog.default(problem, "forward", capability, name)
            assert chosen.permitted(name, problem), (problem, name)
        assert catalog.default(problem, "forward", capability).float32_accurate


@pytest.mark.parametrize(
    ("accepted", "name"),
    [(1e-6, "strict"), ("9.9e-6", "strict"), (1e-5, "float32"), ("1e-3", "tf32"), (0.5, "float16")],
)
def test_a_number_is_the_largest_error_that_is_accepted(accepted, name):
    assert (
        ConvAttributes.parse(
            {"kernel": "(3,3)", "num_filter": "2", "precision": str(accepted)}
        ).precision
        == name
    )
    with settings.override(precision=str(accepted)):
        assert settings.precision() == name


@pytest.mark.parametrize("accepted", ["1e-7", "0", "-1", "nan"])
def test_a_number_that_no_precision_keeps(accepted):
    with (
        settings.override(precision=accepted),
        pytest.raises(
            InvalidSetting, match=f"no kernel keeps precision {accepted}; accept errors of 1e-06"
        ),
    ):
        settings.precision()


def test_permission_is_made_use_of_where_it_pays():
    problem = SHAPES["fa19_2"]
    assert catalog.default(problem, "forward", (9, 0), "tf32").precision == "tf32"
    assert catalog.default(problem, "forward", (9, 0), "float16").precision != "float32"
    # Lower precision is not faster here.
    assert catalog.default(problem, "forward", (7, 5), "tf32").float32_accurate
    assert catalog.default(problem, "backward_data", (9, 0), "float16").precision == "tf32"
    assert catalog.default(problem, "backward_data", (8, 0), "float16").float32_accurate


def test_work_is_as_exact_as_it_says():
    def asked(name, kernel=None):
        return work.forward(SHAPES["fa19_2"], 0, 0, None, 0, False, kernel, name)

    gpu = FakeGpu()

    def precision(*works):
        plans = [plan for each in works for plan in each.plans(gpu, 10)]
        return work.done(GpuTime(0.0), plans).precision

    assert precision(asked("float32")) == "float32"
    assert precision(asked("tf32")) == "tf32"
    assert precision(asked("float32", "9_half")) == "float16"
    assert precision(asked("float32"), asked("float32", "9_half")) == "float16"
    gradients = work.backward_weight(SHAPES["fa19_2"], 0, 0, 0, 0, False, False)
    assert precision(gradients) == "float32"


def test_the_attribute_wins_over_the_setting(monkeypatch):
    asked = []
    monkeypatch.setattr(
        cuda_backend, "ZeroCopyBackend", lambda index, kernel, *precisions: asked.append(precisions)
    )
    layers = [dispatch.Layer(device="gpu", precision=name) for name in (None, "float32", "tf32")]
    with settings.override(precision="float16"):
        for layer in layers:
            dispatch._BACKENDS["gpu"]["cuda"](layer)
    dispatch._BACKENDS["gpu"]["cuda"](layers[0])
    gradients = "float32"
    names = ("float16", "float32", "tf32", "float32")
    assert asked == [(name, gradients) for name in names]


def test_gradients_have_a_setting_and_an_attribute_of_their_own(monkeypatch):
    def asked(**layer):
        return dispatch._precisions(dispatch.Layer(**layer))

    assert asked() == ("float32", "float32")
    assert asked(precision="strict") == ("strict", "strict")
    assert asked(precision="float16") == ("float16", "float32")
    assert asked(precision="strict", gradient_precision="tf32") == ("strict", "tf32")
    with settings.override(precision="strict"):
        assert asked() == ("strict", "strict")
        assert asked(precision="float32") == ("float32", "float32")
    with settings.override(gradient_precision="tf32"):
        assert asked() == ("float32", "tf32")
        assert asked(gradient_precision="float32") == ("float32", "float32")
    monkeypatch.setenv("ECE408_GRADIENT_PRECISION", "double")
    with pytest.raises(
        InvalidSetting,
        match=r"unknown gradient precision 'double'; choose .*"
        r"\(attribute gradient_precision, ECE408_GRADIENT_PRECISION\)",
    ):
        dispatch.check_settings()


def test_the_setting_is_checked(monkeypatch):
    monkeypatch.setenv("ECE408_PRECISION", "half")
    with pytest.raises(InvalidSetting, match=UNKNOWN):
        dispatch.check_settings()
    monkeypatch.setenv("ECE408_PRECISION", "tf32")
    assert settings.precision() == "tf32"


def test_an_unknown_precision_is_refused_by_every_entry(mx, symbol):
    x, w = mx.nd.ones((1, 1, 9, 9)), mx.nd.ones((2, 1, 3, 3))
    own = {"kernel": (3, 3), "num_filter": 2, "no_bias": True, "precision": "half"}
    for call in (
        lambda: ece408_op.Convolution(x, w, **own),
        lambda: ece408_op.Convolution(mx.sym.Variable("data"), **own),
        lambda: ece408_op.Conv2D(2, 3, precision="half"),
        lambda: ece408_op.Conv1D(2, 3, precision="half"),
        lambda: ece408_op.swap(symbol, precision="half"),
        lambda: ConvAttributes.parse({name: str(value) for name, value in own.items()}),
    ):
        with pytest.raises(InvalidSetting, match=UNKNOWN):
            call()


def test_it_is_written_to_symbols_only_when_asked_for(mx, symbol):
    assert "precision" not in _attributes(ece408_op.swap(symbol))
    swapped = ece408_op.swap(symbol, precision="tf32")
    assert _attributes(swapped)["precision"] == "tf32"
    data = mx.sym.Variable("data")
    own = {"kernel": (3, 3), "num_filter": 2}
    assert "precision" not in _attributes(ece408_op.Convolution(data, **own))
    assert _attributes(ece408_op.Convolution(data, precision="tf32", **own))["precision"] == "tf32"


def test_it_survives_in_a_checkpoint_and_an_export(mx, symbol, tmp_path):
    shapes, _, _ = symbol.infer_shape(data=(1, 1, 9, 9))
    params = dict(zip(symbol.list_arguments(), map(mx.nd.ones, shapes)))
    params.pop("data")
    mx.model.save_checkpoint(str(tmp_path / "net"), 1, symbol, params, {})
    ece408_op.swap_checkpoint(tmp_path / "net", 1, tmp_path / "ours", precision="float16")
    loaded, _, _ = ece408_op.load_checkpoint(tmp_path / "ours", 1)
    assert _attributes(loaded)["precision"] == "float16"

    net = ece408_op.Conv2D(2, 3, in_channels=1, precision="tf32")
    net.initialize()
    net.hybridize()
    net(mx.nd.ones((1, 1, 9, 9))).wait_to_read()
    net.export(str(tmp_path / "gluon"))
    assert _attributes(mx.sym.load(str(tmp_path / "gluon-symbol.json")))["precision"] == "tf32"


STRICT = [
    "b2,c64,h15,w17,m33,k3,p1",  # winograd otherwise
    "b2,c3,h20,w21,m4,k5",  # direct
    "b1,c40,h9,w9,m48,k3,p1",
    "b3,c6,h12,w13,m6,k3,p1,g6",  # depthwise
    "b2,c8,h11,w10,m6,k3x2,s2x3,p1,d2,g2,bias",
    "b1,c700,h4,w4,m9,k2,bias",
    "b2,c17,h9,w40,m24,k1",
]


def _wide(rng, shape):
    """Return numbers whose magnitudes span 12 decades."""
    return (rng.choice([-1, 1], shape) * 10 ** rng.uniform(-6, 6, shape)).astype(np.float32)


def _positive(rng, shape):
    return rng.random(shape, np.float32)


def _lonely(rng, shape):
    """Return numbers, one of them 10^9 larger than the others."""
    array = rng.standard_normal(shape).astype(np.float32)
    array.ravel()[array.size // 2] = 1e9
    return array


def _every_direction(mx, problem, arrays, **own):
    """Compute y, dx, dw and dbias by the operator."""
    given = [mx.nd.array(array) for array in arrays]
    for array in given:
        array.attach_grad()
    x, w, dy, *bias = given
    with mx.autograd.record():
        y = ece408_op.Convolution(x, w, *bias, **attributes(problem), **own)
    y.backward(dy)
    return [y.asnumpy(), *(each.grad.asnumpy() for each in (x, w, *bias))]


@pytest.mark.parametrize("numbers", [_wide, _positive, _lonely])
@pytest.mark.parametrize("backend", ["cpu", "emulator"])
def test_strict_holds_for_every_element(mx, rng, backend, numbers):
    # The emulator compiles each problem.
    for text in STRICT if backend == "cpu" else STRICT[4:5]:
        problem = ConvProblem.parse(text)
        shapes = [problem.x_shape, problem.w_shape, problem.y_shape]
        shapes += [problem.bias_shape] if problem.bias else []
        arrays = [numbers(rng, shape) for shape in shapes]
        with ece408_op.op_times() as log:
            found = _every_direction(mx, problem, arrays, backend=backend, precision="strict")
        assert {(each.backend, each.precision) for each in log} == {(backend, "strict")}
        assert len(log) == 3
        exact, terms = (
            oracle.every_direction(problem, x, w, next(iter(bias), None), dy)
            for x, w, dy, *bias in (arrays, list(map(np.abs, arrays)))
        )
        for name, result in zip(exact, found):
            assert (np.abs(result - exact[name]) <= 1e-6 * terms[name]).all(), (text, name)


def test_strict_runs_without_python_too_and_a_change_is_noticed(mx, rng, monkeypatch):
    x, w = (mx.nd.array(_wide(rng, shape)) for shape in ((2, 64, 15, 17), (33, 64, 3, 3)))
    own = {"kernel": (3, 3), "num_filter": 33, "pad": (1, 1), "no_bias": True}
    found = []
    with ece408_op.op_times() as log:
        found.append(ece408_op.Convolution(x, w, **own).asnumpy())
        monkeypatch.setenv("ECE408_PRECISION", "strict")
        found.append(ece408_op.Convolution(x, w, **own).asnumpy())
        monkeypatch.delenv("ECE408_PRECISION")
        found.append(ece408_op.Convolution(x, w, **own).asnumpy())
    assert [each.precision for each in log] == ["float32", "strict", "float32"]
    problem = ConvProblem.parse("b2,c64,h15,w17,m33,k3,p1")
    given = x.asnumpy(), w.asnumpy()
    terms = oracle.forward(problem, *map(np.abs, given))
    errors = [np.max(np.abs(y - oracle.forward(problem, *given)) / terms) for y in found]
    # Winograd's sums include larger pixels than an element's own.
    assert errors[0] == errors[2] > 1e-6 > 1e-7 > errors[1]


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_strict_takes_every_type(mx, rng, dtype):
    x, w = (rng.standard_normal(shape).astype(dtype) for shape in ((2, 9, 8, 9), (17, 9, 3, 3)))
    own = {"kernel": (3, 3), "num_filter": 17, "no_bias": True, "precision": "strict"}
    given = (mx.nd.array(array, dtype=dtype) for array in (x, w))
    with ece408_op.op_times() as log:
        found = ece408_op.Convolution(*given, **own).asnumpy()
    exact = oracle.forward(ConvProblem.parse("b2,c9,h8,w9,m17,k3"), x, w)
    np.testing.assert_allclose(found, exact.astype(dtype), rtol=1e-14, atol=1e-14)
    assert [each.precision for each in log] == ["strict"]


def test_the_cpu_computes_in_float32_all_the_same(mx, rng):
    x = mx.nd.array(rng.standard_normal((2, 3, 20, 21)))
    w = mx.nd.array(rng.standard_normal((4, 3, 5, 5)))
    own = {"kernel": (5, 5), "num_filter": 4, "no_bias": True}
    with ece408_op.op_times() as log:
        exact = ece408_op.Convolution(x, w, **own).asnumpy()
        permitted = ece408_op.Convolution(x, w, precision="float16", **own).asnumpy()
    np.testing.assert_array_equal(exact, permitted)
    assert [(entry.backend, entry.precision) for entry in log] == [("cpu", "float32")] * 2


def test_what_a_backend_has_done_is_in_the_log(mx, monkeypatch):
    real = CpuBackend.forward

    def forward(self, *arguments):
        return dataclasses.replace(real(self, *arguments), precision="tf32", gpu=GpuTime(1.5))

    x, w = mx.nd.ones((1, 1, 9, 20)), mx.nd.ones((2, 1, 3, 3))
    own = {"kernel": (3, 3), "num_filter": 2, "no_bias": True}
    with ece408_op.op_times() as log:
        with monkeypatch.context() as patched, settings.override():
            patched.setattr(CpuBackend, "forward", forward)
            patched.setattr(CpuBackend, "native_function", Backend.native_function)
            ece408_op.Convolution(x, w, **own).wait_to_read()
        ece408_op.Convolution(x, w, **own).wait_to_read()
    assert [entry.precision for entry in log] == ["tf32", "float32"]
    assert [entry.gpu for entry in log] == [GpuTime(1.5), None]


ERRORS = {"strict": (0, 1e-7), "float32": (0, 1e-6), "tf32": (1e-6, 1e-3), "float16": (1e-6, 2e-3)}


@pytest.mark.gpu
@pytest.mark.parametrize("images", [64, 1000])
@pytest.mark.parametrize("name", PRECISIONS)
def test_errors_on_a_gpu_are_those_of_the_precision(mx, rng, name, images):
    # Calls are chunked; the fastest kernel for a chunk of 8 images may be more exact than
    # permitted.
    x = rng.standard_normal((images, 12, 33, 33)).astype(np.float32)
    w = rng.standard_normal((24, 12, 5, 5)).astype(np.float32)
    own = {"kernel": (5, 5), "num_filter": 24, "no_bias": True}
    some = x[:: images // 8]
    wide = (mx.nd.array(array, dtype="float64") for array in (some, w))
    exact = ece408_op.Convolution(*wide, backend="reference", **own).asnumpy()
    with ece408_op.op_times() as log:
        found = ece408_op.Convolution(
            mx.nd.array(x), mx.nd.array(w), backend="cuda", precision=name, **own
        ).asnumpy()[:: images // 8]
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    (entry,) = (each for each in log if each.backend == "cuda")
    least, most = ERRORS[entry.precision]
    assert least <= error <= most
    assert PRECISIONS.index(entry.precision) <= PRECISIONS.index(name)
