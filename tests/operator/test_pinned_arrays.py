"""Page-locked arrays, with a driver that locks nothing, and a backend that allocates them."""

import copy
import gc
import multiprocessing
import pickle
import re
from pathlib import Path

import fake_gpu
import numpy as np
import pytest
from cases import first
from fake_gpu import FakeGpu

import ece408_op
from ece408_op import settings
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.backends.cuda.runtime import device
from ece408_op.errors import InvalidProblem, NoUsableGpu
from ece408_op.operator import array_memory

SHAPE = (20, 3, 66, 66)
OURS = {"kernel": (3, 3), "num_filter": 30, "no_bias": True, "backend": "lending"}


class Lending(CpuBackend):
    """A backend with page-locked memory for its results."""

    name = "lending"

    def __init__(self, pool):
        super().__init__()
        self._pool = pool

    def native_function(self, problem, direction):
        return None

    def result_memory(self, problem):
        size = 4 * np.prod(problem.y_shape)
        return self._pool.lend(int(size), FakeGpu(), 2)


@pytest.fixture
def arrays(mx, pool, rng, monkeypatch):
    ece408_op.register_backend("lending", Lending(pool))
    monkeypatch.setattr(device, "get", lambda index: FakeGpu())
    x, w = (rng.integers(-3, 4, shape) for shape in (SHAPE, (30, 3, 3, 3)))
    yield mx.nd.array(x), mx.nd.array(w)
    mx.nd.waitall()
    gc.collect()


def _address(array):
    array.wait_to_read()
    return array_memory.pointer(array)


def _is_lent(pool, array):
    return pool.covers(_address(array), 4)


def _expected(mx, x, w):
    return mx.nd.Convolution(x, w, kernel=(3, 3), num_filter=30, no_bias=True).asnumpy()


def test_results_come_to_lie_in_lent_memory(mx, pool, arrays):
    results = [ece408_op.Convolution(*arrays, **OURS) for _ in range(3)]
    assert [_is_lent(pool, each) for each in results] == [False, True, True]
    assert len({_address(each) for each in results}) == 3
    expected = _expected(mx, *arrays)
    for each in results:
        np.testing.assert_array_equal(each.asnumpy(), expected)


def test_memory_is_used_again_when_nobody_has_its_array(mx, pool, arrays):
    x, w = arrays
    ece408_op.Convolution(x, w, **OURS)
    first = ece408_op.Convolution(x, w, **OURS)
    address, view = _address(first), first[3:5]
    del first
    second = ece408_op.Convolution(2 * x, w, **OURS)
    assert _address(second) != address
    np.testing.assert_array_equal(view.asnumpy(), _expected(mx, x, w)[3:5])
    del view
    third = ece408_op.Convolution(3 * x, w, **OURS)
    assert _address(third) == address
    np.testing.assert_array_equal(second.asnumpy(), 2 * _expected(mx, x, w))
    np.testing.assert_array_equal(third.asnumpy(), 3 * _expected(mx, x, w))


def test_what_still_reads_an_array_keeps_its_memory(mx, pool, arrays):
    """MXNet computes later: Python may have deleted the array by then."""
    x, w = arrays
    ece408_op.Convolution(x, w, **OURS)
    sums = []
    for factor in range(12):
        sums.append(mx.nd.sum(ece408_op.Convolution(factor * x, w, **OURS), axis=(1, 2, 3)))
    expected = _expected(mx, x, w).sum(axis=(1, 2, 3))
    for factor, each in enumerate(sums):
        np.testing.assert_array_equal(each.asnumpy(), factor * expected)


def test_others_may_write_to_a_result(mx, pool, arrays):
    """MXNet's oneDNN writes a convolution of 30 filters in a layout padded to 32."""
    x, w = arrays
    ece408_op.Convolution(x, w, **OURS)
    y = ece408_op.Convolution(x, w, **OURS)
    address = _address(y)
    y += 1
    np.testing.assert_array_equal(y.asnumpy(), _expected(mx, x, w) + 1)
    mx.nd.Convolution(2 * x, w, kernel=(3, 3), num_filter=30, no_bias=True, out=y)
    np.testing.assert_array_equal(y.asnumpy(), 2 * _expected(mx, x, w))
    assert _address(y) == address


def test_a_result_is_a_nets_weight_like_any_other(mx, pool, arrays):
    """MXNet's inference converts weights to a layout of oneDNN's."""
    x, w = arrays
    ece408_op.Convolution(x, w, **OURS)
    weights = ece408_op.Convolution(x, w, **OURS).reshape((20 * 64, 30, 8, 8))
    data = mx.nd.ones((2, 30, 9, 9))
    given = {"kernel": (8, 8), "num_filter": 20 * 64, "no_bias": True}
    plain = mx.nd.Convolution(data, mx.nd.array(weights.asnumpy()), **given).asnumpy()
    for _ in range(2):
        np.testing.assert_array_equal(mx.nd.Convolution(data, weights, **given).asnumpy(), plain)
    again = weights.reshape((20, 30, 64, 64)).asnumpy()
    np.testing.assert_array_equal(again, _expected(mx, x, w))


def test_what_is_recorded_or_has_an_array_already_is_left_alone(mx, pool, arrays):
    ece408_op.Convolution(*arrays, **OURS)
    with mx.autograd.record():
        assert not _is_lent(pool, ece408_op.Convolution(*arrays, **OURS))
    y = mx.nd.zeros((20, 30, 64, 64))
    assert ece408_op.Convolution(*arrays, out=y, **OURS) is y
    np.testing.assert_array_equal(y.asnumpy(), _expected(mx, *arrays))


def test_interfaces_and_numbers_of_dimensions(mx, pool, arrays):
    x, w = arrays
    for _ in range(2):
        y = ece408_op.Convolution(x.as_np_ndarray(), w.as_np_ndarray(), **OURS)
    assert isinstance(y, mx.np.ndarray)
    assert _is_lent(pool, y)
    flat = {**OURS, "kernel": (3,)}
    x, w = x.reshape((20, 3, -1)), w[:, :, 0].reshape((30, 3, 3))
    lines = [ece408_op.Convolution(x, w, **flat) for _ in range(2)][1]
    assert lines.shape == (20, 30, 66 * 66 - 2)
    assert _is_lent(pool, lines)
    expected = mx.nd.Convolution(x, w, kernel=(3,), num_filter=30, no_bias=True)
    np.testing.assert_array_equal(lines.asnumpy(), expected.asnumpy())


def _sum(array, found):
    found.put(float(array.asnumpy().sum()))


def test_a_child_reads_a_result_and_the_parent_changes_it(mx, pool, fake_driver, arrays):
    ece408_op.Convolution(*arrays, **OURS)
    y = ece408_op.Convolution(*arrays, **OURS)
    expected = y.asnumpy()
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    child = context.Process(target=_sum, args=(y, found))
    child.start()
    assert not fake_driver.locked
    y += 1
    assert found.get(timeout=60) == expected.sum()
    child.join()
    again = ece408_op.Convolution(*arrays, **OURS)
    assert _is_lent(pool, again)
    np.testing.assert_array_equal(y.asnumpy(), expected + 1)
    np.testing.assert_array_equal(again.asnumpy(), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2 << 20,), (2, 3, 4, 5)])
def test_arrays_of_ones_own(mx, pool, arrays, rng, dtype, shape):
    given = rng.standard_normal(shape).astype(dtype)
    for array in (given, mx.nd.array(given, dtype=dtype), mx.np.array(given, dtype=dtype)):
        made = ece408_op.page_locked(array)
        assert type(made) is (mx.np.ndarray if isinstance(array, mx.np.ndarray) else mx.nd.NDArray)
        assert made.dtype == np.dtype(dtype)
        assert _is_lent(pool, made)
        np.testing.assert_array_equal(made.asnumpy(), given)


def test_arrays_that_cannot_be_page_locked(mx, pool, arrays):
    with pytest.raises(InvalidProblem, match=r"^dtype int32 is not supported; use one of"):
        ece408_op.page_locked(np.zeros(3, np.int32))
    for shape in ((), (3, 0)):
        with pytest.raises(InvalidProblem, match=rf"^an array of shape {re.escape(str(shape))} "):
            ece408_op.page_locked(np.zeros(shape, np.float32))


def test_a_gpu_that_is_not_there_locks_nothing(mx):
    message = r"no NVIDIA driver|PyCUDA is not installed|there is no GPU 99"
    with settings.override(devices="99"), pytest.raises(NoUsableGpu, match=message):
        ece408_op.page_locked(np.zeros(3, np.float32))


def test_weights_are_kept_beside_page_locked_arrays(mx, pool, arrays, monkeypatch):
    """Only MXNet and this package write to them, so MXNet's counts of writes are valid."""

    from ece408_op.operator import native_handles

    monkeypatch.setattr(
        native_handles.library(), "ece408_weights_are_shared", pytest.fail, raising=False
    )
    ece408_op.page_locked(arrays[0])


def _pooled(mx, a):
    return mx.nd.Pooling(a, kernel=(3, 3), stride=(2, 2), pool_type="max")


def _normalised(mx, a):
    vectors = [mx.nd.arange(1, 31) * factor for factor in (0.1, 0.2, 0.3, 0.4)]
    return mx.nd.BatchNorm(a, *vectors, fix_gamma=False)


def _convolved(mx, a):
    w = mx.nd.arange(5 * 30 * 9).reshape((5, 30, 3, 3)) * 1e-3
    return mx.nd.Convolution(a, w, kernel=(3, 3), num_filter=5, no_bias=True)


def _ours(mx, a):
    w = mx.nd.arange(5 * 30 * 9).reshape((5, 30, 3, 3)) * 1e-3
    return ece408_op.Convolution(a, w, kernel=(3, 3), num_filter=5, no_bias=True)


OPERATORS = {
    "pooling": _pooled,
    "normalisation": _normalised,
    "convolution": _convolved,
    "ours": _ours,
    "dense": lambda mx, a: mx.nd.FullyConnected(
        a, mx.nd.ones((3, 30 * 64 * 64)), no_bias=True, num_hidden=3
    ),
    "concatenation": lambda mx, a: mx.nd.concat(a, 2 * a, dim=1),
    "transposition": lambda mx, a: mx.nd.transpose(a, (1, 0, 3, 2)),
    "softmax": lambda mx, a: mx.nd.softmax(a, axis=1),
    "relu": lambda mx, a: mx.nd.relu(a),
    "a part": lambda mx, a: a[3:7, :, 5:9].copy() + a.slice_axis(0, 0, 1).sum(),
    "a product": lambda mx, a: mx.nd.dot(a.reshape((600, -1)), mx.nd.ones((4096, 2))),
}


@pytest.mark.parametrize("name", first(4, OPERATORS))
def test_operators_of_mxnet_take_such_an_array_like_any_other(mx, pool, arrays, rng, name):
    """And its gradient; again after oneDNN may have converted the array to a layout of its own."""
    ece408_op.Convolution(*arrays, **OURS)
    lent = ece408_op.Convolution(*arrays, **OURS)
    # Any of equal numbers may be the maximum.
    lent[:] = plain = mx.nd.array(rng.standard_normal(lent.shape))
    assert _is_lent(pool, lent)
    for _ in range(2):
        found = []
        for array in (lent, plain):
            array.attach_grad()
            with mx.autograd.record():
                result = OPERATORS[name](mx, array)
            result.backward()
            found.append((result.asnumpy(), array.grad.asnumpy(), array.asnumpy()))
        for ours, others in zip(*found):
            np.testing.assert_allclose(ours, others, rtol=1e-5, atol=1e-4)


def test_such_an_array_is_copied_saved_and_shared(mx, pool, arrays, tmp_path):
    ece408_op.Convolution(*arrays, **OURS)
    y = ece408_op.Convolution(*arrays, **OURS)
    expected = _expected(mx, *arrays)
    mx.nd.save(str(tmp_path / "y"), {"y": y})
    copies = [
        *(y.copy(), copy.deepcopy(y), pickle.loads(pickle.dumps(y))),
        *(y.astype("float64"), mx.nd.load(str(tmp_path / "y"))["y"], y.as_np_ndarray()),
    ]
    address = _address(y)
    del y
    # The last one shares its memory.
    assert _address(ece408_op.Convolution(2 * arrays[0], arrays[1], **OURS)) != address
    for each in copies:
        np.testing.assert_array_equal(each.asnumpy(), expected)


HELD = """
from fake_driver import FakeDriver
from fake_gpu import FakeGpu
from ece408_op.backends.cuda.runtime import device, page_locked
page_locked.driver, device.get = FakeDriver(), lambda index: FakeGpu()
import builtins
import ece408_op, mxnet as mx, numpy as np
held = [ece408_op.page_locked(np.ones((300, 1000 * n), np.float32)) for n in range(1, 9)]
shared = mx.nd.from_dlpack(held.pop().to_dlpack_for_read())
assert (shared.asnumpy() == 1).all()
builtins.held = held, shared, [mx.nd.sin(2 * each) for each in held]
"""


def test_a_program_ends_while_it_has_such_arrays(run_python):
    """MXNet frees them after Python has ended."""
    ended = run_python(HELD, PYTHONPATH=str(Path(fake_gpu.__file__).parent))
    assert (ended.returncode, ended.stderr) == (0, "")
