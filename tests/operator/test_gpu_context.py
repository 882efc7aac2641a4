"""The operator on MXNet's own GPU arrays: needs a GPU and MXNet's CUDA build."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ece408_op
from ece408_op import errors
from ece408_op.backends.cpu.backend import CpuBackend
from ece408_op.backends.cuda.runtime import device
from ece408_op.files import resources
from ece408_op.operator import gpu_support
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


def _case(mx, text, rng):
    problem = ConvProblem.parse(text)
    x = rng.integers(-3, 4, problem.x_shape).astype(problem.dtype)
    w = rng.integers(-3, 4, problem.w_shape).astype(problem.dtype)
    y = np.empty(problem.y_shape, problem.dtype)
    CpuBackend().forward(problem, x.ctypes.data, w.ctypes.data, None, y.ctypes.data, False)
    options = {
        "kernel": problem.kernel,
        "num_filter": problem.filters,
        "stride": problem.stride,
        "pad": problem.pad,
        "num_group": problem.groups,
        "no_bias": True,
    }
    on_gpu = [mx.nd.array(a, ctx=mx.gpu(), dtype=problem.dtype) for a in (x, w)]
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
    ],
)
def test_zero_copy_equals_the_cpu(mx, rng, text):
    arrays, options, expected = _case(mx, text, rng)
    with errors.surfaced(), ece408_op.op_times() as log:
        y = ece408_op.Convolution(*arrays, **options)
        assert y.context == mx.gpu(0)
        np.testing.assert_array_equal(y.asnumpy(), expected)
    (entry,) = log
    assert (entry.backend, entry.gpu.copy_seconds) == ("cuda", 0)
    assert 0 < entry.gpu.kernel_seconds < entry.seconds


def test_a_backend_that_does_not_reach_the_gpu(mx, rng):
    arrays, options, _ = _case(mx, "b2,c1,h9,w9,m3,k3", rng)
    message = r"backend cpu does not reach arrays on gpu\(0\)"
    with pytest.raises(errors.UnsupportedProblem, match=message), errors.surfaced():
        ece408_op.Convolution(*arrays, backend="cpu", **options).wait_to_read()


def test_forwards_on_two_threads_leave_nothing_behind(mx, rng):
    texts = ("b8,c1,h28,w28,m50,k5", "b8,c12,h33,w33,m24,k5", "b3,c6,h17,w13,m9,k3x2")
    cases = [_case(mx, text, rng) for text in texts]
    wrong, gpu = [], device.get(0)

    def forwards(first):
        for n in range(100):
            arrays, options, expected = cases[(first + n) % len(cases)]
            found = ece408_op.Convolution(*arrays, **options).asnumpy()
            if not np.array_equal(found, expected):
                wrong.append(n)

    def both():
        threads = [threading.Thread(target=forwards, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with gpu.active():
            return gpu.free_bytes()

    with errors.surfaced():
        after_warm_up, after = both(), both()
    assert not wrong
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
