"""Plans for callers that launch kernels without Python. PyCUDA does not expose function handles, so
the driver loads the code a second time, for the life of the process."""

from __future__ import annotations

import ctypes
import struct
import threading

from ... import NativeLaunch
from .. import gpu_limits
from ..kernel_plan import Defines, Launch, Plan
from . import driver
from .device import Gpu
from .launcher import grid_of, machine_code

# CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_MOST_DYNAMIC_SHARED_BYTES = 8

_lock = threading.Lock()
# Modules by GPU, source and macros; functions by module and name; and a function's shared memory
# limit.
_modules: dict[tuple[int, str, Defines], int] = {}
_functions: dict[tuple[int, str], int] = {}
_shared_bytes: dict[int, int] = {}


def launches(plan: Plan, gpu: Gpu) -> list[NativeLaunch]:
    """Return the launches of a plan without constants; its code is compiled and loaded on the GPU,
    whose context must be current. Raises what `compile_plan` raises, and `GpuFailed`."""
    code = machine_code(plan, gpu.capability)
    with _lock:
        key = (gpu.index, plan.kernel.source, plan.macros)
        if key not in _modules:
            _modules[key] = _made("cuModuleLoadData", code)
        return [_native(launch, _modules[key], gpu) for launch in plan.launches]


def _native(launch: Launch, module: int, gpu: Gpu) -> NativeLaunch:
    key = (module, launch.function)
    if key not in _functions:
        name = launch.function.encode()
        _functions[key] = _made("cuModuleGetFunction", ctypes.c_void_p(module), name)
    function = _functions[key]
    if launch.shared_bytes > _shared_bytes.get(function, gpu_limits.STATIC_SHARED_BYTES):
        limit = ctypes.c_void_p(function), _MOST_DYNAMIC_SHARED_BYTES, launch.shared_bytes
        driver.call("cuFuncSetAttribute", *limit)
        _shared_bytes[function] = launch.shared_bytes
    grid = grid_of(launch, gpu.processors)
    arguments, slots = _in_memory(launch.arguments)
    return NativeLaunch(function, grid, launch.block, launch.shared_bytes, arguments, slots)


def _made(name: str, *arguments: object) -> int:
    """Return the handle that a driver function creates."""
    handle = ctypes.c_void_p()
    driver.call(name, ctypes.byref(handle), *arguments)
    return handle.value or 0


def _in_memory(arguments: tuple[str | int, ...]) -> tuple[bytes, tuple[tuple[int, str], ...]]:
    """Return the arguments' memory layout, and the positions and names of addresses in it."""
    memory, slots = b"", []
    for argument in arguments:
        if isinstance(argument, str):
            memory += bytes(-len(memory) % 8)
            slots.append((len(memory), argument))
            memory += bytes(8)
        else:
            memory += struct.pack("i", argument)
    return memory, tuple(slots)
