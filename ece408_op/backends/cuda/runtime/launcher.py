"""Kernel launcher: loads compiled code once and launches it through PyCUDA, checking every call."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .... import settings
from ....errors import GpuFailed
from .. import gpu_limits
from ..kernel_plan import Capability, Defines, Grid, Launch, Plan, Target, architecture
from .compiler import compile_plan

_modules: dict[tuple[str, str, Defines], _Module] = {}
_lock = threading.Lock()


@functools.lru_cache(maxsize=4096)
def load(gpu: Target, plan: Plan) -> LoadedPlan:
    """Load a plan's code on the GPU, whose context must be current.

    Code is compiled and loaded once per GPU, source and macros, and stays for the life of the
    process. Raises what `compile_plan` raises, and `GpuFailed`.
    """
    import pycuda.driver as cuda

    key = (cuda.Context.get_device().pci_bus_id(), plan.kernel.source, plan.macros)
    with _lock:
        module = _modules.setdefault(key, _Module())
    module.require(plan, gpu.capability)
    return LoadedPlan(plan, module)


def machine_code(plan: Plan, capability: Capability) -> bytes:
    """Return the plan's machine code for a GPU of this capability. Raises what `compile_plan`
    raises, and `GpuFailed` if the kernel does not support it."""
    name = architecture(plan.kernel.architectures, capability)
    if name is None:
        raise GpuFailed(
            f"kernel {plan.kernel.name} has no code for compute capability "
            f"{capability[0]}.{capability[1]}; choose another kernel"
        )
    return compile_plan(plan.kernel.source, plan.macros, name, cache_folder())


def grid_of(launch: Launch, processors: int) -> Grid:
    """Return the grid of a launch on a GPU with this number of multiprocessors."""
    if not launch.blocks_per_processor:
        return launch.grid
    most, height, depth = launch.grid
    at_once = launch.blocks_per_processor * processors
    return min(most, max(1, at_once // (height * depth))), height, depth


def cache_folder() -> Path:
    """Return the folder of compiled kernels, which may not exist yet."""
    return settings.cache() / "cuda-kernels"


class _Module:
    """One source compiled with its macros, loaded on one GPU."""

    def __init__(self) -> None:
        # Held from launch to completion by callers whose plan has constants.
        self.lock = threading.Lock()
        self._loading = threading.Lock()
        self._module: Any = None
        self._functions: dict[str, Any] = {}
        # By function: the dynamic shared memory that it may use.
        self._shared_bytes: dict[str, int] = {}
        self.processors = 0

    def require(self, plan: Plan, capability: Capability) -> None:
        """Compile and load, unless that has been done."""
        import pycuda.driver as cuda

        with self._loading:
            if self._module is not None:
                return
            binary = machine_code(plan, capability)
            try:
                module = cuda.module_from_buffer(binary)
            except cuda.Error as error:
                raise GpuFailed(f"kernel {plan.kernel.name} does not load: {error}") from error
            # PyCUDA would unload it at exit, when another thread's context may be current.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            device = cuda.Context.get_device()
            self.processors = device.get_attribute(cuda.device_attribute.MULTIPROCESSOR_COUNT)
            self._module = module

    def function(self, launch: Launch) -> Any:
        """Return the function, prepared for the launch's arguments and shared memory."""
        from pycuda.driver import function_attribute

        with self._loading:
            function = self._functions.get(launch.function)
            if function is None:
                function = self._module.get_function(launch.function)
                function.prepare(["P" if isinstance(a, str) else "i" for a in launch.arguments])
                self._functions[launch.function] = function
            if launch.shared_bytes > self._shared_bytes.get(
                launch.function, gpu_limits.STATIC_SHARED_BYTES
            ):
                attribute = function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
                function.set_attribute(attribute, launch.shared_bytes)
                self._shared_bytes[launch.function] = launch.shared_bytes
        return function

    def address(self, symbol: str) -> int:
        """Return the address of a global variable of the source on the GPU."""
        pointer, _ = self._module.get_global(symbol)
        return int(pointer)


class LoadedPlan:
    """A plan that can be launched.

    If `plan.constants` is not empty, hold `lock` from `launch` until the stream is done: all
    launches of one module share its constants.
    """

    def __init__(self, plan: Plan, module: _Module) -> None:
        self.plan = plan
        self.lock = module.lock
        self._module = module

    def launch(self, pointers: Mapping[str, int], stream: Any) -> None:
        """Enqueue copies and launches, in order, on a PyCUDA stream; does not wait.

        `pointers` maps the plan's array names to GPU addresses. The GPU's context must be current.
        Raises `GpuFailed` if a copy or launch is refused; an error during a kernel's execution
        appears at the stream's next synchronisation.
        """
        import pycuda.driver as cuda

        try:
            for copy in self.plan.constants:
                target, source = self._module.address(copy.symbol), pointers[copy.array]
                cuda.memcpy_dtod_async(target, source, copy.nbytes, stream)
            for launch in self.plan.launches:
                self._enqueue(launch, pointers, stream)
        except cuda.Error as error:
            raise GpuFailed(
                f"kernel {self.plan.kernel.name} cannot be launched: {error}"
            ) from error

    def _enqueue(self, launch: Launch, pointers: Mapping[str, int], stream: Any) -> None:
        grid = grid_of(launch, self._module.processors)
        arguments = [a if isinstance(a, int) else pointers.get(a) or 0 for a in launch.arguments]
        self._module.function(launch).prepared_async_call(
            grid, launch.block, stream, *arguments, shared_size=launch.shared_bytes
        )
