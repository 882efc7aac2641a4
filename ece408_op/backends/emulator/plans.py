"""Planned kernels in the emulator: this package's, and those in files that declare their
launches."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from ...errors import KernelFailed
from ...files.resources import kernels_dir
from .. import Done
from ..cuda.kernel_plan import Capability, Launch, Plan
from ..cuda.work import Work, done
from . import emulator_compiler, findings
from .library import FROM_GPU, ON_GPU, TO_GPU, Emulation, allocated, begin, copy, error_of, load

# Persistent launches have as many blocks as fit on an H100's multiprocessors.
_PROCESSORS = 132
_MAX_DYNAMIC_SHARED = 8  # cudaFuncAttributeMaxDynamicSharedMemorySize


class EmulatedGpu:
    """The target of plans."""

    name = "emulated GPU"
    # Kernels for tensor cores or copy engines, which the emulator lacks, are not the default here.
    capability: Capability = (8, 6)
    driver = 13000


GPU = EmulatedGpu()


def compute(work: Work, emulation: Emulation, given: bytes | None = None) -> Done:
    """Compute work on host addresses; work of one step may use the library in `given`.

    Raises `KernelFailed` with CUDA's error and, unless the library is given, its line; and what
    `Work.plans` and `emulator_compiler.source` raise.
    """
    plans = _plans(work)
    contents = [given or compiled(plan, emulation) for plan in plans]
    libraries = [load(content) for content in contents]
    # Libraries share the emulated memory.
    begin(libraries[0], emulation)
    nbytes = {role: work.nbytes(role, work.problem.batch) for role in work.addresses}
    workspace = max(1, *(plan.workspace_bytes for plan in plans))
    with allocated(libraries[0], [*nbytes.values(), workspace]) as places:
        pointers = dict(zip([*nbytes, "workspace"], places))
        # `inputs` contains accumulated outputs only if they have a batch axis.
        added = [role for role, step in zip(work.outputs, work.steps) if step.accumulate]
        for role in dict.fromkeys((*work.inputs, *added)):
            copy(libraries[0], pointers[role], work.addresses[role], nbytes[role], TO_GPU)
        for plan, content, library in zip(plans, contents, libraries):
            try:
                run(plan, library, pointers)
            except KernelFailed as error:
                raise error if given else findings.explained(error, content) from None
        for role in work.outputs:
            copy(libraries[0], work.addresses[role], pointers[role], nbytes[role], FROM_GPU)
    return done(None, plans)


def prepare(work: Work, emulation: Emulation) -> None:
    """Compile what `compute` will need, without running code. Raises what it raises."""
    for plan in _plans(work):
        compiled(plan, emulation)


def content(work: Work, emulation: Emulation) -> bytes:
    """Return the library for work of one step."""
    (plan,) = _plans(work)
    return compiled(plan, emulation)


def _plans(work: Work) -> list[Plan]:
    return work.plans(GPU, work.problem.batch)


def compiled(plan: Plan, emulation: Emulation) -> bytes:
    """Return the library that launches a plan. Raises what `emulator_compiler.source` raises."""
    path = kernels_dir() / "cuda" / plan.kernel.source
    functions = tuple(dict.fromkeys(launch.function for launch in plan.launches))
    return emulator_compiler.source(path, plan.macros, functions, emulation.mode)


def run(plan: Plan, library: ctypes.CDLL, pointers: Mapping[str, int]) -> None:
    """Launch a plan on addresses in emulated GPU memory. Raises `KernelFailed`."""
    for each in plan.constants:
        symbol = ctypes.addressof(ctypes.c_char.in_dll(library, each.symbol))
        library.ece408_emulator_room.restype = ctypes.c_size_t
        room = library.ece408_emulator_room(ctypes.c_void_p(symbol))
        if room < each.nbytes:
            raise KernelFailed(
                f"{each.place or plan.kernel.name}: copies {each.nbytes} bytes to or from "
                f"{each.symbol}, which has {room}"
            )
        whole = ctypes.c_void_p(symbol), ctypes.c_size_t(each.nbytes)
        part = ctypes.c_void_p(pointers[each.array]), ctypes.c_size_t(each.nbytes)
        offset = ctypes.c_size_t(0)
        error = library.ece408_emulator_to_symbol(*whole, *part, offset, ON_GPU)
        _check(library, plan, error)
    for launch in plan.launches:
        _launch(library, launch, pointers)
        _check(library, plan, library.cudaPeekAtLastError())


def _check(library: ctypes.CDLL, plan: Plan, error: int) -> None:
    if error:
        raise KernelFailed(f"kernel {plan.kernel.name}: {error_of(library)}")


def _launch(library: ctypes.CDLL, launch: Launch, pointers: Mapping[str, int]) -> None:
    grid = launch.grid
    if launch.blocks_per_processor:
        at_once = launch.blocks_per_processor * _PROCESSORS
        grid = (min(grid[0], max(1, at_once // (grid[1] * grid[2]))), *grid[1:])
    sizes = (ctypes.c_uint * 6)(*grid, *launch.block)
    values = [
        ctypes.c_int(each) if isinstance(each, int) else ctypes.c_void_p(pointers.get(each))
        for each in launch.arguments
    ]
    arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
    library.ece408_emulator_allow_shared(_MAX_DYNAMIC_SHARED, launch.shared_bytes)
    function = library[f"ece408_launch_{launch.function}"]
    function(sizes, ctypes.c_size_t(launch.shared_bytes), arguments)
