"""`ece408_convolution`, the compiled form of `ece408_conv`: the CPU, and forward on MXNet's GPU
arrays, without Python.

A custom operator in Python costs MXNet at least 0.1 ms per call, needs guards (see graphs.guards)
and holds the GIL. This one is compiled, from kernels/mxnet/convolution_operator.cpp, and MXNet runs
it like its own operators. It replaces `ece408_conv` in the graphs that MXNet runs (see
graphs.executors, graphs.cached_ops); users' graphs keep `ece408_conv`.

Once per layer, direction, shape and type the operator calls Python for the kernel and the number of
threads or, on a GPU, for the launches. The answer stays valid until a setting changes. If another
backend is to compute, the operator passes the arrays to Python instead. While op times are
collected, the operator runs as usual and reports the time of each kernel call to Python.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import dispatch, errors, op_log, settings
from ..backends import DIRECTIONS, Backend, Done, NativeFunction, NativeLaunch
from ..backends.cpu import native
from ..backends.cpu.cpu_backend import chosen_isa
from ..problem import ConvProblem
from . import autograd_state, gpu_support
from .conv_attributes import OWN, ConvAttributes, problem_of

NAME = "ece408_convolution"
LIBRARY = Path(__file__).resolve().with_name("libece408_mxnet.so")
# MXNet's codes for types.
_TYPES = ("float32", "float64", "float16")


class _Plan(ctypes.Structure):
    """The header's `ece408_plan`."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *[(name, ctypes.c_int) for name in ("threads", "isa", "kernel")],
        ("bias_gradient", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int),
    ]


class _Slot(ctypes.Structure):
    """The header's `ece408_slot`."""

    _fields_ = [("offset", ctypes.c_int), ("array", ctypes.c_int)]


class _Launch(ctypes.Structure):
    """The header's `ece408_launch`."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        *[(name, ctypes.c_int) for name in ("argument_bytes", "slot_count")],
        ("arguments", ctypes.c_char_p),
        ("slots", ctypes.POINTER(_Slot)),
    ]


# The numbers of arrays in slots.
_ARRAYS = ("x", "w", "bias", "y", "workspace")
# The functions of the header's `ece408_driver`.
_DRIVER = (
    *("cuLaunchKernel", "cuStreamSynchronize", "cuEventCreate", "cuEventRecord"),
    *("cuEventElapsedTime", "cuEventDestroy_v2"),
)


class _Call(ctypes.Structure):
    """The header's `ece408_call`."""

    _fields_ = [
        ("layer", ctypes.c_char_p),
        *[(name, ctypes.c_int) for name in ("direction", "gpu", "type")],
        ("sizes", ctypes.c_int64 * 4),
    ]


_CALL, _PLAN = ctypes.POINTER(_Call), ctypes.POINTER(_Plan)
_Ask = ctypes.CFUNCTYPE(ctypes.c_int, _CALL, _PLAN)
_Compute = ctypes.CFUNCTYPE(ctypes.c_int, _CALL, ctypes.POINTER(ctypes.c_void_p))
_Report = ctypes.CFUNCTYPE(ctypes.c_int, _CALL, _PLAN, ctypes.c_double, ctypes.c_double)

# Nodes of these operators have this key as an attribute. A graph with another key is refused:
# addresses in a file are not trusted.
KEY = secrets.token_hex(16)
_missing: str | None = "MXNet is not imported yet"
_library: Any = None
# Backend and `Done`, as op times name them, by a plan's function, instruction set and kernel; a
# plan with launches has no function, and its kernel is an index into `_launched`.
_names: dict[tuple[int | None, int, int], tuple[str, Done]] = {}
_launched: list[Done] = []


def install(mxnet: Any) -> None:
    """Load the operator into MXNet. If that fails, `missing` returns why, and nothing uses it."""
    global _missing
    _missing = _load(mxnet.base)


def missing() -> str | None:
    """Return in one line why the operator is unavailable, or `None` if it is available."""
    return _missing


def runs_on_gpu(context: Any) -> bool:
    """Return whether a context is a GPU on which the operator runs for this thread.

    MXNet allocates random states for each thread that calls a library's operator and never frees
    them: so other threads than the main one use Python.
    """
    if getattr(context, "device_type", None) != "gpu" or _missing is not None:
        return False
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and gpu_support.has_random_states(context.device_id)


def _load(base: Any) -> str | None:
    global _library
    if not LIBRARY.is_file():
        return f"{LIBRARY} is not there; run `pip install .` in the checkout"
    try:
        base.check_call(base._LIB.MXLoadLib(str(LIBRARY).encode(), 0))
        library = ctypes.CDLL(str(LIBRARY))
        kernels = native.library()
        functions = (_ask, _compute, _report, kernels.ece408_run, kernels.ece408_use_workers)
        addresses = (ctypes.cast(each, ctypes.c_void_p) for each in functions)
        # The header's `ece408_forward_functions`.
        given = (ctypes.c_void_p * len(functions))(*addresses)
        library.ece408_forward_use(given, KEY.encode())
    except (base.MXNetError, OSError, AttributeError, errors.KernelsMissing) as error:
        return f"{LIBRARY} does not load ({str(error).splitlines()[0]})"
    _library = library
    settings.watch(library.ece408_forward_forget)
    op_log.watch(library.ece408_forward_log)
    return None


def call(mxnet: Any, layer: ConvAttributes, arrays: list[Any], out: Any = None) -> Any:
    """Compute the convolution of NDArrays, on a GPU without recording; return y, or `out`."""
    from mxnet.ndarray._internal import _imperative_invoke

    given = node_attributes(layer)
    if mxnet.autograd.is_recording():
        wanted = [autograd_state.has_gradient(array) for array in arrays]
        given["gradients"] = gradients(wanted)
        if autograd_state.may_add():
            # MXNet does not tell this operator that the gradient is to be added.
            arrays = [mxnet.nd.identity(a) if has else a for a, has in zip(arrays, wanted)]
    return _imperative_invoke(
        _handle(mxnet.base), arrays, list(given), list(given.values()), out, False, False
    )


@functools.lru_cache(maxsize=1)
def _handle(base: Any) -> int:
    handle = base.OpHandle()
    base.check_call(base._LIB.NNGetOpHandle(base.c_str(NAME), ctypes.byref(handle)))
    return handle.value


_PAIRS = ("kernel", "stride", "pad", "dilate")


@functools.lru_cache(maxsize=1024)
def _description(layer: ConvAttributes) -> str:
    """Return a layer, without its name, as one line, which the compiled operator and `_layer`
    parse."""
    sizes = [layer.spatial, int(not layer.no_bias), layer.num_filter, layer.num_group]
    numbers = [*sizes, *(number for name in _PAIRS for number in getattr(layer, name))]
    own = json.dumps({name: getattr(layer, name) for name in OWN if name != "layer"})
    return " ".join(map(str, [*numbers, own]))


@functools.lru_cache(maxsize=1024)
def _layer(description: bytes) -> ConvAttributes:
    """Parse the output of `_description`."""
    *texts, own = description.decode().split(" ", 12)
    spatial, has_bias, filters, groups, *rest = map(int, texts)
    given: dict[str, Any] = json.loads(own)
    given.update((name, (rest[2 * i], rest[2 * i + 1])) for i, name in enumerate(_PAIRS))
    given.update(num_filter=filters, num_group=groups, no_bias=not has_bias, spatial=spatial)
    return ConvAttributes(**given)


def gradients(wanted: Sequence[bool]) -> str:
    """Return the attribute that selects the gradients to compute: data, weight and bias."""
    names = ("data" if wanted[0] else "", "weight" if any(wanted[1:]) else "")
    return " ".join(filter(None, names))


def node_attributes(layer: ConvAttributes) -> dict[str, str]:
    """Return the attributes of a node that computes this layer in this process."""
    return {"key": KEY, "layer": f"{_description(layer)}\n{json.dumps(layer.layer)}"}


def _call(given: _Call) -> tuple[ConvProblem, dispatch.Layer, str]:
    """Return a call's problem, layer and direction."""
    description, _, name = given.layer.partition(b"\n")
    attributes = _layer(description)
    # One-dimensional arrays have no height.
    x_shape = (*given.sizes[:2], *given.sizes[4 - attributes.spatial :])
    layer = attributes.layer_on() if given.gpu < 0 else attributes.layer_on("gpu", given.gpu)
    layer = dataclasses.replace(layer, name=json.loads(name))
    problem = problem_of(attributes, x_shape, _TYPES[given.type])
    return problem, layer, DIRECTIONS[given.direction]


@_Ask
def _ask(call: Any, plan: Any) -> int:
    try:
        plan[0] = _Plan(None, settings.threads())
        if call[0].layer is None:
            plan[0].isa = native.ISA_CODES[chosen_isa()]
            return 1
        problem, layer, direction = _call(call[0])
        if call[0].gpu < 0:
            backend = dispatch.prepare(problem, layer, direction)
            _plan_function(backend, backend.native_function(problem, direction), plan)
        else:
            backend = dispatch.select(problem, layer, direction)
            _plan_launches(backend, problem, direction, plan)
    except errors.Ece408Error:
        # `_compute` is called next, fails again, and can report the error.
        return 0
    return 1


def _plan_function(backend: Backend, function: NativeFunction | None, plan: Any) -> None:
    if function is not None:
        *numbers, name, precision, bias_gradient = function
        key = function.address, function.isa, function.kernel
        _names[key] = backend.name, Done(name, precision)
        plan[0] = _Plan(*numbers, bias_gradient)


def _plan_launches(backend: Backend, problem: ConvProblem, direction: str, plan: Any) -> None:
    _give_driver()
    found = backend.native_launches(problem, direction)
    if found is None:
        backend.prepare(problem, direction)
        return
    if found.done not in _launched:
        _launched.append(found.done)
    number = _launched.index(found.done)
    _names[None, 0, number] = backend.name, found.done
    plan[0].kernel, plan[0].workspace_bytes = number, found.workspace_bytes
    for launch in found.launches:
        _library.ece408_forward_launch(plan, ctypes.byref(_as_launch(launch)))


def _as_launch(launch: NativeLaunch) -> _Launch:
    slots = [_Slot(offset, _ARRAYS.index(role)) for offset, role in launch.slots]
    return _Launch(
        *(launch.function, launch.grid, launch.block, launch.shared_bytes),
        *(len(launch.arguments), len(slots), launch.arguments, (_Slot * len(slots))(*slots)),
    )


@functools.lru_cache(maxsize=1)
def _give_driver() -> None:
    """Give the library the addresses of CUDA's driver functions; a GPU backend requires a
    driver."""
    # Imported only if used, like all GPU code.
    from ..backends.cuda.runtime import driver

    functions = (ctypes.c_void_p * len(_DRIVER))(*map(driver.address, _DRIVER))
    _library.ece408_forward_drive(functions)


@_Compute
def _compute(call: Any, arrays: Any) -> int:
    def compute() -> None:
        problem, layer, direction = _call(call[0])
        first, second, third, last = arrays[:4]
        if direction == "forward":
            dispatch.forward(problem, layer, first, second, third, last, False)
        elif direction == "backward_data":
            dispatch.backward_data(problem, layer, first, second, third, False)
        else:
            dispatch.backward_weight(problem, layer, first, second, third, last, False, False)

    return errors.remembered(compute)


@_Report
def _report(call: Any, plan: Any, seconds: float, gpu_seconds: float) -> int:
    def publish() -> None:
        problem, layer, direction = _call(call[0])
        backend, done = _names[plan[0].function, plan[0].isa, plan[0].kernel]
        of_gpu = None if call[0].gpu < 0 else op_log.GpuTime(gpu_seconds)
        op_log.publish(
            op_log.OpTime(
                *(layer.name, problem, direction, backend),
                *(done.kernel, seconds, of_gpu, done.precision),
            )
        )

    return errors.remembered(publish)
