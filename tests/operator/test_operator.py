import numpy as np
import pytest

import ece408_op
from ece408_op import dispatch, errors
from ece408_op.backends import Backend
from ece408_op.backends.cpu.reference import ReferenceBackend
from ece408_op.errors import surfaced

SHAPE = (2, 3, 9, 8)


def _custom(mx, data="data", **attributes):
    attributes = {"kernel": (3, 2), "num_filter": 4, "name": "c", **attributes}
    return mx.sym.Custom(mx.sym.Variable(data), op_type="ece408_conv", **attributes)


def _native(mx, **attributes):
    attributes = {"kernel": (3, 2), "num_filter": 4, "name": "c", **attributes}
    return mx.sym.Convolution(mx.sym.Variable("data"), **attributes)


def _bind(mx, symbol, rng, grad_req, **shapes):
    """Return an executor whose arguments hold small whole numbers, reproducible by `rng`."""
    executor = symbol.simple_bind(mx.cpu(), grad_req=grad_req, **shapes)
    for array in [*executor.arg_arrays, *[g for g in executor.grad_arrays if g is not None]]:
        array[:] = rng.integers(-3, 4, array.shape)
    return executor


@pytest.mark.parametrize("no_bias", [True, False])
def test_forward_and_gradients_equal_mxnets(mx, no_bias):
    """Exactly, on whole numbers, through an executor, with gradients written and added."""
    for grad_req in ("write", "add"):
        outputs = []
        for symbol in (_custom(mx, no_bias=no_bias), _native(mx, no_bias=no_bias)):
            rng = np.random.default_rng(1)
            executor = _bind(mx, symbol, rng, grad_req, data=SHAPE)
            executor.forward(is_train=True)
            head = rng.integers(-3, 4, executor.outputs[0].shape)
            executor.backward(mx.nd.array(head))
            outputs.append([a.asnumpy() for a in [*executor.outputs, *executor.grad_arrays]])
        np.testing.assert_equal(*outputs)


def test_an_executor_reshaped_to_another_batch(mx, rng):
    executor = _bind(mx, _custom(mx), rng, "write", data=SHAPE)
    native = _native(mx)
    for batch in (5, 1, 3):
        executor = executor.reshape(data=(batch, *SHAPE[1:]), allow_up_sizing=True)
        executor.arg_dict["data"][:] = rng.integers(-3, 4, (batch, *SHAPE[1:]))
        with surfaced():
            found = executor.forward()[0].asnumpy()
        expected = native.bind(mx.cpu(), executor.arg_dict).forward()[0].asnumpy()
        np.testing.assert_array_equal(found, expected)


def test_gradients_not_asked_for_are_not_computed(mx, rng):
    executor = _bind(mx, _custom(mx), rng, {"data": "null", "c_weight": "write", "c_bias": "null"},
                     data=SHAPE)  # fmt: skip
    with ece408_op.op_times() as log:
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones(executor.outputs[0].shape))
        executor.grad_dict["c_weight"].wait_to_read()
    assert [entry.direction for entry in log] == ["forward", "backward_weight"]


@pytest.mark.parametrize(("req", "expected"), [("write", 54), ("inplace", 54), ("add", 61)])
def test_forward_requests(mx, req, expected):
    op = _create(mx)
    x, w, y = mx.nd.ones(SHAPE), mx.nd.ones((4, 3, 3, 2)) * 3, mx.nd.ones((2, 4, 7, 7)) * 7
    mx.nd.waitall()
    op.forward(False, [req], [x, w], [y], [])
    assert np.all(y.asnumpy() == expected)


def test_a_null_request_touches_nothing(mx):
    op = _create(mx)
    y = mx.nd.ones((2, 4, 7, 7)) * 7
    mx.nd.waitall()
    op.forward(False, ["null"], [mx.nd.ones(SHAPE), mx.nd.ones((4, 3, 3, 2))], [y], [])
    assert np.all(y.asnumpy() == 7)


def _create(mx):
    from ece408_op.operator.python_operator import ConvolutionProp

    prop = ConvolutionProp(kernel="(3, 2)", num_filter="4", no_bias="True")
    return prop.create_operator(mx.cpu(), [SHAPE], [np.float32])


def test_shapes_are_inferred_both_ways(mx):
    symbol = _custom(mx)
    arguments, outputs, _ = symbol.infer_shape(data=SHAPE)
    assert arguments == [SHAPE, (4, 3, 3, 2), (4,)]
    assert outputs == [(2, 4, 7, 7)]
    arguments, outputs, _ = symbol.infer_shape_partial(data=(0, 0, 9, 8), c_weight=(4, 3, 3, 2))
    assert arguments == [(0, 3, 9, 8), (4, 3, 3, 2), (4,)]
    assert outputs == [(0, 4, 7, 7)]


def test_types_are_inferred_both_ways(mx):
    for known in ("data", "c_weight", "c_bias"):
        arguments, outputs, _ = _custom(mx).infer_type(**{known: np.float64})
        assert arguments == [np.float64] * 3
        assert outputs == [np.float64]


def test_attributes_of_an_attribute_scope_are_accepted(mx):
    with mx.AttrScope(ctx_group="dev1", __mine__="x"):
        symbol = _custom(mx)
    assert symbol.infer_shape(data=SHAPE)[1] == [(2, 4, 7, 7)]


def test_is_registered_when_mxnet_is_imported_later_and_no_attribute_crashes(run_python):
    """Not even one that crashes Python's own parser."""
    code = (
        "import sys, ece408_op; assert 'mxnet' not in sys.modules; import mxnet as mx\n"
        "x, known = mx.sym.Variable('data'), dict(op_type='ece408_conv', num_filter=4)\n"
        "s = mx.sym.Custom(x, kernel=(3, 3), name='c', **known)\n"
        "print(s.infer_shape(data=(2, 3, 9, 9))[1])\n"
        "s = mx.sym.Custom(x, kernel=(3, 3), colour='red', **known)\n"
        "try:\n"
        "    with ece408_op.errors.surfaced():\n"
        "        s.infer_shape_partial(data=(1, 1, 5, 5))\n"
        "except ece408_op.errors.InvalidProblem as error:\n"
        "    print('caught', error)\n"
        "from ece408_op.operator.python_operator import ConvolutionProp\n"
        "for kernel in ('(' * 100000, '\\0', 'None', '(3, 3) * 2', '-', '9' * 5000):\n"
        "    prop = ConvolutionProp(kernel=kernel, num_filter='4')\n"
        "    try:\n"
        "        prop.infer_shape([[1, 1, 9, 9], [], []])\n"
        "    except Exception as error:\n"
        "        print(type(error).__name__)\n"
    )
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    shapes, caught, *others = result.stdout.splitlines()
    assert shapes == "[(2, 4, 7, 7)]"
    assert caught.startswith("caught unknown attribute colour=red; there are: kernel")
    assert others == ["InvalidProblem"] * 6


@pytest.mark.parametrize("entry", ["custom", "entry"])
@pytest.mark.parametrize(
    ("attributes", "bind", "message"),
    [
        ({}, {"data": (2, 3, 9)}, "a 2-D convolution needs 4 dimensions"),
        ({}, {"data": (2, 3, 2, 8)}, "more than the padded input's 2x8"),
        ({"num_group": 2}, {"data": SHAPE}, "num_group 2 must divide"),
        ({}, {"data": SHAPE, "c_weight": (4, 5, 3, 2)}, r"weight has shape \(4, 5, 3, 2\), but"),
        (
            {},
            {"data": SHAPE, "type_dict": {"data": "float32", "c_weight": "float64"}},
            "data float32, weight float64",
        ),
        ({}, {"data": SHAPE, "type_dict": {"data": "int32"}}, "dtype int32 is not supported"),
    ],
    ids=["rank", "kernel", "groups", "weight", "types", "dtype"],
)
def test_a_bind_that_cannot_be_says_why_and_keeps_stdout_clean(
    mx, capfd, entry, attributes, bind, message
):
    if entry == "custom":
        symbol = _custom(mx, **attributes)
    else:
        symbol = ece408_op.Convolution(
            mx.sym.Variable("data"), kernel=(3, 2), num_filter=4, name="c", **attributes
        )
    with pytest.raises(errors.InvalidProblem, match=message), surfaced():
        symbol.simple_bind(mx.cpu(), **bind).forward()
    assert "InvalidProblem" not in capfd.readouterr().out


class _Failing(Backend):
    name = "failing"

    def supports(self, problem, direction):
        return None

    def forward(self, problem, x, w, bias, y, accumulate):
        raise ZeroDivisionError("deep inside a kernel")


def test_a_failure_while_running_surfaces_and_later_calls_work(mx, monkeypatch, capfd, rng):
    executor = _bind(mx, _custom(mx), rng, "null", data=SHAPE)
    with monkeypatch.context() as patch:
        patch.setitem(dispatch._BACKENDS["cpu"], "failing", lambda layer: _Failing())
        patch.setenv("ECE408_BACKEND", "failing")
        with pytest.raises(errors.OperatorFailed, match="inside a kernel") as caught, surfaced():
            executor.forward()[0].asnumpy()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert capfd.readouterr().out == ""
    with surfaced():
        assert np.isfinite(executor.forward()[0].asnumpy()).all()


def test_a_failure_in_the_backward_pass_surfaces_too(mx, monkeypatch, capfd, rng):
    executor = _bind(mx, _custom(mx), rng, "write", data=SHAPE)
    head = mx.nd.ones(executor.forward(is_train=True)[0].shape)
    mx.nd.waitall()

    class NoRoom(ReferenceBackend):
        name = "no room"

        def backward_data(self, *arguments):
            raise MemoryError("no room for gradients")

    def step():
        with surfaced():
            executor.forward(is_train=True)
            executor.backward(head)
            return executor.grad_arrays[0].asnumpy()

    with monkeypatch.context() as patch:
        patch.setitem(dispatch._BACKENDS["cpu"], "no room", lambda layer: NoRoom())
        patch.setenv("ECE408_BACKEND", "no room")
        with pytest.raises(errors.OperatorFailed, match="no room for gradients") as caught:
            step()
    assert isinstance(caught.value.__cause__, MemoryError)
    assert "Traceback" not in capfd.readouterr().out
    assert np.isfinite(step()).all()


def test_the_backend_asked_for_computes(mx, rng):
    for backend in ("reference", "cpu"):
        executor = _bind(mx, _custom(mx, backend=backend), rng, "null", data=SHAPE)
        with surfaced(), ece408_op.op_times() as log:
            executor.forward()[0].wait_to_read()
        assert [entry.backend for entry in log] == [backend]


class _Forwardless(_Failing):
    name = "forwardless"

    def supports(self, problem, direction):
        return f"stride {problem.stride}: not in this backend"


def test_a_backend_that_cannot_is_an_error_that_says_so(mx, rng, monkeypatch):
    monkeypatch.setitem(dispatch._BACKENDS["cpu"], "forwardless", lambda layer: _Forwardless())
    symbol = _custom(mx, backend="forwardless", stride=(2, 2))
    executor = _bind(mx, symbol, rng, "null", data=SHAPE)
    message = r"cannot compute forward of b2,.*; backend forwardless: stride \(2, 2\): not in"
    with pytest.raises(errors.UnsupportedProblem, match=message), surfaced():
        executor.forward()[0].wait_to_read()


def test_a_gradient_that_a_backend_lacks_goes_to_another_visibly(mx, rng, monkeypatch):
    class NoGradients(ReferenceBackend):
        name = "no gradients"

        def supports(self, problem, direction):
            return None if direction == "forward" else "forward only"

    monkeypatch.setitem(dispatch._BACKENDS["cpu"], "no gradients", lambda layer: NoGradients())
    executor = _bind(mx, _custom(mx, backend="no gradients"), rng, "write", data=SHAPE)
    with surfaced(), ece408_op.op_times() as log:
        executor.forward(is_train=True)
        executor.backward(mx.nd.ones(executor.outputs[0].shape))
        mx.nd.waitall()
    assert [entry.backend for entry in log] == ["no gradients", "cpu", "cpu"]


def test_unknown_backend(mx, rng):
    with pytest.raises(errors.InvalidSetting, match="'quantum'; choose one of"), surfaced():
        _bind(mx, _custom(mx, backend="quantum"), rng, "null", data=SHAPE)
