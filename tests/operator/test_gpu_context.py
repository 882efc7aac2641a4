"""The operator on MXNet's own GPU arrays: needs a GPU and MXNet's CUDA build."""

import numpy as np
import pytest
from harness import attributes
from programs import together

import ece408_op
from ece408_op import dispatch, errors
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.cuda_backend import ZeroCopyBackend
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import device
from ece408_op.files import resources
from ece408_op.operator import compiled_operator, gpu_support
from ece408_op.problem import ConvProblem

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _cuda_build(mx):
    if not mx.runtime.Features().is_enabled("CUDA"):
        pytest.skip("this MXNet is built for the CPU only")


@pytest.fixture
def _unfit(mx):
    if gpu_support.reason_against() is None:
        pytest.skip("this MXNet has code for this GPU")


@pytest.fixture
def python_calls(mx, noted):
    """Record the forward passes that Python computed."""
    assert compiled_operator.runs_on_gpu(mx.gpu(0))
    return noted(dispatch, "forward")


def _case(mx, text, rng):
    problem = ConvProblem.parse(text)
    x = rng.integers(-3, 4, problem.x_shape).astype(problem.dtype)
    w = rng.integers(-3, 4, problem.w_shape).astype(problem.dtype)
    bias = rng.integers(-3, 4, problem.bias_shape).astype(problem.dtype) if problem.bias else None
    y = np.empty(problem.y_shape, problem.dtype)
    at_bias = None if bias is None else bias.ctypes.data
    CpuBackend().forward(problem, x.ctypes.data, w.ctypes.data, at_bias, y.ctypes.data, False)
    options = attributes(problem)
    inputs = (x, w) if bias is None else (x, w, bias)
    on_gpu = [mx.nd.array(a, ctx=mx.gpu(), dtype=problem.dtype) for a in inputs]
    return on_gpu, options, y


@pytest.mark.parametrize(
    "text",
    [
        "b100,c1,h28,w28,m50,k5",
        "b50,c1,h70,w70,m12,k5",
        "b50,c12,h33,w33,m24,k5",
        "b50,c6,h22,w22,m16,k5",
        "b7,c6,h17,w13,m9,k3x2,s2x1,p1x2,g3",
        "b5,c3,h14,w15,m7,k3,p1,float64",
        "b5,c3,h14,w15,m7,k3,p1,float16",
        "b5,c3,h14,w15,m7,k3,p1,bias,float64",
        "b4,c64,h14,w14,m96,k3,p1,bias",
        "b1,c64,h14,w14,m96,k1",
        "b4,c32,h14,w14,m32,k3,p1,g32,bias",
    ],
)
def test_zero_copy_equals_the_cpu(mx, rng, python_calls, text):
    arrays, options, expected = _case(mx, text, rng)
    with errors.surfaced(), ece408_op.op_times() as log:
        y = ece408_op.Convolution(*arrays, **options)
        assert y.context == mx.gpu(0)
        np.testing.assert_array_equal(y.asnumpy(), expected)
    (entry,) = log
    assert (entry.backend, entry.gpu.copy_seconds) == ("cuda", 0)
    assert 0 < entry.gpu.kernel_seconds < entry.seconds
    with errors.surfaced():
        found = ece408_op.Convolution(*arrays, **options).asnumpy()
    np.testing.assert_array_equal(found, expected)
    assert python_calls == []


@pytest.mark.parametrize("text", ["b9,c1,h28,w28,m12,k5", "b9,c12,h33,w33,m24,k5,bias"])
def test_every_kernel_that_is_asked_for(mx, rng, python_calls, text):
    arrays, options, expected = _case(mx, text, rng)
    problem, gpu, ran = ConvProblem.parse(text), device.get(0), []
    for kernel in catalog.KERNELS:
        rounds = kernel.precision == "float16" and not kernel.float32_accurate
        if kernel.direction != "forward" or rounds or kernel.why_not(problem, gpu.capability):
            continue
        python_calls.clear()
        with errors.surfaced(), ece408_op.op_times() as log:
            y = ece408_op.Convolution(*arrays, cuda_kernel=kernel.name, **options).asnumpy()
        np.testing.assert_array_equal(y, expected, err_msg=kernel.name)
        assert [entry.kernel for entry in log] == [kernel.name]
        # Launches of one module on several streams would share its constants.
        plans = work.forward(problem, 0, 0, 0, 0, False, kernel.name).plans(gpu, problem.batch)
        assert len(python_calls) == any(plan.constants for plan in plans), kernel.name
        ran.append(kernel.name)
    assert {"1_naive", "2_constant_weights", "4_im2col", "6_register_tiles"} <= set(ran)


def _chain(mx, kernels):
    """Return consecutive convolutions, by kernels of these names, and their weights."""
    symbol, weights = mx.sym.Variable("data"), {}
    for number, kernel in enumerate(kernels):
        symbol = ece408_op.Convolution(
            symbol, name=f"c{number}", kernel=(3, 3), num_filter=6, no_bias=True, cuda_kernel=kernel
        )
        # Each filter copies one pixel of one channel, so that numbers stay small.
        weight = weights[f"c{number}_weight"] = np.zeros((6, 6, 3, 3), np.float32)
        for m in range(6):
            weight[m, (m + number) % 6, number % 3, m % 3] = m % 3 - 1 or 2
    return symbol, weights


@pytest.mark.parametrize("simple", [False, True])
@pytest.mark.parametrize("kernels", [(None,) * 4, (None, "2_constant_weights", None, None)])
def test_layers_that_need_one_another(mx, rng, python_calls, simple, kernels):
    """Also if Python computes one between others that are launched without it."""
    if simple and gpu_support.reason_against() is not None:
        pytest.skip("MXNet cannot fill the executor's arrays here")
    symbol, weights = _chain(mx, kernels)
    values = {"data": rng.integers(-3, 4, (7, 6, 20, 21)).astype(np.float32), **weights}
    on_cpu, _ = _chain(mx, (None,) * 4)
    arrays = {name: mx.nd.array(value) for name, value in values.items()}
    expected = on_cpu.bind(mx.cpu(), arrays).forward()[0].asnumpy()
    arrays = {name: mx.nd.array(value, ctx=mx.gpu()) for name, value in values.items()}
    python_calls.clear()
    with errors.surfaced():
        if simple:
            executor = symbol.simple_bind(mx.gpu(), grad_req="null", data=values["data"].shape)
            for name, array in arrays.items():
                array.copyto(executor.arg_dict[name])
        else:
            executor = symbol.bind(mx.gpu(), arrays)
        for _ in range(5):
            np.testing.assert_array_equal(executor.forward()[0].asnumpy(), expected)
    assert len(python_calls) == 5 * kernels.count("2_constant_weights")


def test_an_executor_with_gradients(mx, rng, python_calls):
    text = "b6,c12,h17,w13,m8,k3"
    arrays, options, expected = _case(mx, text, rng)
    symbol = ece408_op.Convolution(mx.sym.Variable("data"), name="c", **options)
    inputs = dict(zip(("data", "c_weight"), arrays))
    gradients = {name: mx.nd.empty(a.shape, ctx=mx.gpu()) for name, a in inputs.items()}
    executor = symbol.bind(mx.gpu(), inputs, gradients)
    dy = mx.nd.array(rng.integers(-2, 3, expected.shape), ctx=mx.gpu())
    with errors.surfaced():
        for _ in range(2):
            for is_train in (False, True):
                found = executor.forward(is_train)[0].asnumpy()
                np.testing.assert_array_equal(found, expected)
            executor.backward(dy)
            dw = gradients["c_weight"].asnumpy()
    assert len(python_calls) == 4
    x, dy, wanted = arrays[0].asnumpy(), dy.asnumpy(), np.empty_like(dw)
    CpuBackend().backward_weight(
        ConvProblem.parse(text),
        *(x.ctypes.data, dy.ctypes.data, wanted.ctypes.data, None),
        *(False, False),
    )
    np.testing.assert_array_equal(dw, wanted)


def test_a_hybridized_block_on_both_devices(mx, rng, python_calls):
    arrays, options, expected = _case(mx, "b6,c12,h17,w13,m8,k3,bias", rng)

    class Net(mx.gluon.HybridBlock):
        def hybrid_forward(self, F, x, weight, bias):
            return ece408_op.Convolution(x, weight, bias, **options)

    net = Net()
    net.hybridize()
    for number in range(4):
        given = arrays if number % 2 else [array.as_in_context(mx.cpu()) for array in arrays]
        with errors.surfaced():
            np.testing.assert_array_equal(net(*given).asnumpy(), expected)
    assert python_calls == []


def test_executors_on_several_threads(mx, rng, python_calls):
    texts = ("b8,c1,h28,w28,m50,k5", "b2,c12,h33,w33,m24,k5", "b4,c64,h14,w14,m96,k3,p1")
    executors = []
    for text in texts * 2:
        arrays, options, expected = _case(mx, text, rng)
        symbol = ece408_op.Convolution(mx.sym.Variable("data"), name="c", **options)
        inputs = dict(zip(symbol.list_arguments(), arrays))
        executors.append((symbol.bind(mx.gpu(), inputs, grad_req="null"), expected))

    def run(each):
        executor, expected = each
        for _ in range(100):
            np.testing.assert_array_equal(executor.forward()[0].asnumpy(), expected)

    with errors.surfaced():
        together(run, executors)
    assert python_calls == []


def test_a_launch_that_the_driver_refuses(mx, rng, monkeypatch, python_calls):
    arrays, options, expected = _case(mx, "b3,c5,h11,w19,m7,k3", rng)
    native_launches = ZeroCopyBackend.native_launches

    def without_blocks(self, *asked):
        found = native_launches(self, *asked)
        return found._replace(
            launches=tuple(each._replace(grid=(0, 1, 1)) for each in found.launches)
        )

    monkeypatch.setattr(ZeroCopyBackend, "native_launches", without_blocks)
    with errors.surfaced():
        found = ece408_op.Convolution(*arrays, **options).asnumpy()
    np.testing.assert_array_equal(found, expected)
    assert len(python_calls) == 1


_FAILS = """
import numpy as np, mxnet as mx, ece408_op
from ece408_op import errors
from ece408_op.backends.cuda.cuda_backend import ZeroCopyBackend
native_launches = ZeroCopyBackend.native_launches

def without_output(self, *asked):
    found = native_launches(self, *asked)
    launches = tuple(
        each._replace(slots=tuple(slot for slot in each.slots if slot[1] != "y"))
        for each in found.launches
    )
    return found._replace(launches=launches)

ZeroCopyBackend.native_launches = without_output
x = mx.nd.array(np.ones((4, 3, 9, 9), np.float32), ctx=mx.gpu())
w = mx.nd.array(np.ones((5, 3, 3, 3), np.float32), ctx=mx.gpu())
try:
    with errors.surfaced():
        ece408_op.Convolution(x, w, kernel=(3, 3), num_filter=5, no_bias=True).asnumpy()
    print("no error", flush=True)
except mx.MXNetError as error:
    print("illegal memory access" in str(error) or str(error), flush=True)
"""


def test_a_kernel_that_fails(run_python):
    """It writes to no array: MXNet finds the error when it waits for its stream."""
    result = run_python(_FAILS)
    assert result.stdout.splitlines()[:1] == ["True"], result.stderr


def test_a_backend_that_does_not_reach_the_gpu(mx, rng):
    arrays, options, _ = _case(mx, "b2,c1,h9,w9,m3,k3", rng)
    message = r"backend cpu does not reach arrays on gpu\(0\)"
    with pytest.raises(errors.UnsupportedProblem, match=message), errors.surfaced():
        ece408_op.Convolution(*arrays, backend="cpu", **options).wait_to_read()


@pytest.mark.alone
def test_forwards_on_two_threads_leave_nothing_behind(mx, rng):
    texts = ("b8,c1,h28,w28,m50,k5", "b8,c12,h33,w33,m24,k5", "b3,c6,h17,w13,m9,k3x2")
    cases = [_case(mx, text, rng) for text in texts]
    gpu = device.get(0)

    def forwards(first):
        for n in range(100):
            arrays, options, expected = cases[(first + n) % len(cases)]
            found = ece408_op.Convolution(*arrays, **options).asnumpy()
            np.testing.assert_array_equal(found, expected)

    def both():
        together(forwards, (0, 1))
        with gpu.active():
            return gpu.free_bytes()

    with errors.surfaced():
        after_warm_up, after = both(), both()
    # Other programs may have freed some meanwhile.
    assert after >= after_warm_up


@pytest.mark.usefixtures("_unfit")
def test_networks_under_gpu_are_refused_where_mxnet_has_no_code(mx):
    prefix = resources.models_dir() / "2019fa" / "baseline"
    symbol, _, _ = ece408_op.load_checkpoint(prefix, 6)
    message = r"no network can run under mx.gpu\(\) here: .*; keep the network on mx.cpu\(\)"
    with mx.gpu():
        with pytest.raises(errors.NoUsableGpu, match=message):
            ece408_op.load_checkpoint(prefix, 6)
        with pytest.raises(errors.NoUsableGpu, match=message):
            ece408_op.swap(symbol)


@pytest.mark.usefixtures("_unfit")
def test_milestones_where_mxnet_has_no_code(run_ece408, fashion_mnist):
    refused = run_ece408("m1.2", "100")
    assert refused.returncode == errors.NoUsableGpu.exit_code
    assert "this MXNet has machine code for sm_" in refused.stderr
    staged = run_ece408("m3.1", "100")
    assert staged.returncode == 0, staged.stderr
    assert staged.stderr.startswith("ece408: staged: convolutions run on ")
    assert staged.stdout.splitlines()[-1].startswith("Correctness: 0.89 ")
