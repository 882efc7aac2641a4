"""NDArrays in page-locked memory, which is freed with MXNet's last array in it.

Used for results of calls on arrays, if the backend lends memory for them, and for arrays that users
copy with `page_locked`. Intermediate arrays of graphs are in memory that MXNet plans.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import settings
from ..backends import Backend, HostMemory
from ..errors import InvalidProblem
from ..problem import ITEM_BYTES, ConvProblem
from . import fork_safety, native_handles
from .loading import load_mxnet

_ON_CPU = 1
_FLOAT = 2


class _Tensor(ctypes.Structure):
    """DLPack's `DLManagedTensor`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *[(name, ctypes.c_int) for name in ("device", "device_id", "ndim")],
        *[("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)],
        *[(name, ctypes.POINTER(ctypes.c_int64)) for name in ("shape", "strides")],
        ("byte_offset", ctypes.c_uint64),
        *[(name, ctypes.c_void_p) for name in ("manager", "deleter")],
    ]


def page_locked(array: Any) -> Any:
    """Copy an NDArray or NumPy array of float32, float64 or float16 on the CPU to page-locked
    memory, which GPUs access directly: staged calls and whole networks copy it faster.

    The memory is freed with the copy. After a fork of the process it is ordinary memory. Raises
    `InvalidProblem` for an array of another type, without elements or on a GPU, `NoUsableGpu`,
    `NotEnoughMemory` for more than a quarter of the free memory, and `GpuFailed` if the machine
    cannot lock memory.
    """
    mx = load_mxnet()
    _check(array)
    # Imported only if used, like all GPU code.
    from ..backends.cuda.runtime import device
    from ..backends.cuda.runtime import page_locked as memory_of

    shape, dtype = tuple(array.shape), np.dtype(array.dtype).name
    gpu = device.get(settings.devices()[0])
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    made = _array(mx, memory_of.pool.take(nbytes, gpu, settings.threads()), shape, dtype)
    if isinstance(array, mx.np.ndarray):
        made[:] = array.as_nd_ndarray()
        return made.as_np_ndarray()
    made[:] = array
    return made


def _check(array: Any) -> None:
    dtype, context = np.dtype(array.dtype).name, getattr(array, "context", None)
    if dtype not in ITEM_BYTES:
        raise InvalidProblem(f"dtype {dtype} is not supported; use one of {', '.join(ITEM_BYTES)}")
    if not array.shape or 0 in array.shape:
        raise InvalidProblem(f"an array of shape {array.shape} holds no images; give a larger one")
    if context is not None and context.device_type != "cpu":
        raise InvalidProblem(f"the array is on {context}; copy it to mx.cpu() first")


def result(mxnet: Any, backend: Backend, problem: ConvProblem, shape: Sequence[int]) -> Any:
    """Return an NDArray for a result of this shape in memory that the backend lends, or `None` if
    it lends none. Raises what its `prepare` raises."""
    memory = backend.result_memory(problem)
    return None if memory is None else _array(mxnet, memory, shape, problem.dtype)


def _array(mxnet: Any, memory: HostMemory, shape: Sequence[int], dtype: str) -> Any:
    # The whole tensor, not a view: MXNet's gradient of max pooling is wrong for views.
    fork_safety.do_before_forks(memory.before_fork)
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    deleter = ctypes.cast(native_handles.library().ece408_memory_is_free, ctypes.c_void_p)
    tensor = _Tensor(
        *(memory.address, _ON_CPU, 0, len(shape), _FLOAT, 8 * ITEM_BYTES[dtype], 1, sizes, None, 0),
        *(ctypes.addressof(memory.busy), deleter),
    )
    base, handle = mxnet.base, mxnet.base.NDArrayHandle()
    take = base._LIB.MXNDArrayFromDLPackEx
    is_copied = True  # MXNet may need the tensor's description until after Python's end
    base.check_call(take(ctypes.byref(tensor), is_copied, ctypes.byref(handle)))
    return mxnet.nd.NDArray(handle)
