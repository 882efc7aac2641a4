"""Counts of CUDA kernels' warps per source line, by the emulator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from ..backends.cuda.kernel_plan import Capability
from ..backends.emulator import counts, findings
from ..backends.emulator.counts import Count, Launched
from ..backends.emulator.emulator_backend import of_kernel
from ..backends.emulator.library import Emulation
from ..backends.kernel_file import KernelFile
from ..errors import KernelFailed
from ..host import gpu
from ..problem import ConvProblem
from ..profile import occupancy
from . import explanation, sanitizer
from .session import Ended, Session

_CALL_SECONDS = 600.0


@dataclass(frozen=True)
class Resident:
    """Occupancy (0 to 1) of a multiprocessor by a function's blocks, and its registers per thread.
    Registers are 0 without nvcc; the occupancy may then be too high."""

    share: float
    registers: int


@dataclass(frozen=True)
class Counted:
    """Counts per line, in order, and launches of a kernel on a problem, with the occupancy of each
    launch."""

    counts: list[Count]
    launches: list[Launched]
    resident: list[Resident]


@dataclass
class _Target:
    name: str
    capability: Capability
    driver: int = 13000


def count(kernel: KernelFile | str, problem: ConvProblem, architecture: str) -> Counted:
    """Run a file, or this package's kernel of this name, once on a problem, isolated as for
    checking. Occupancy is that of an architecture of `occupancy.KNOWN`.

    Raises `KernelFailed`, with the line if known, `Ended`, and the compiler's errors.
    """
    emulated = of_kernel(kernel, Emulation("counted"))
    rng = np.random.default_rng(408)
    x, w = (rng.standard_normal(each, np.float32) for each in (problem.x_shape, problem.w_shape))
    with Session(kernel, _CALL_SECONDS, emulated=emulated) as session:
        try:
            session.forward(problem, x, w)
        except (Ended, KernelFailed) as error:
            last = findings.ending(sanitizer.told(session), emulated.content(problem))
            raise KernelFailed(f"{last.place}: {last.title}" if last else str(error)) from None
        taken = session.counts()
    try:
        found, launches = counts.located(taken, emulated.content(problem))
    except (IndexError, KeyError, TypeError, ValueError):
        raise Ended("writes to what is not its own output") from None
    registers = _registers(kernel, problem, architecture)
    resident = [_resident(each, registers.get(each.kernel, 0), architecture) for each in launches]
    return Counted(found, launches, resident)


def _registers(kernel: KernelFile | str, problem: ConvProblem, architecture: str) -> dict[str, int]:
    """Return the registers of each function by name, if nvcc is available."""
    if gpu.find_nvcc() is None:
        return {}
    number = int(architecture.partition("_")[2])
    target = _Target(architecture, divmod(number, 10))
    found = explanation.resources(kernel, problem, target)
    return {explanation.plain_name(name): each.registers for name, each in found.items()}


def _resident(launched: Launched, registers: int, architecture: str) -> Resident:
    activity = {**dataclasses.asdict(launched), "registers": registers}
    known = occupancy.KNOWN[architecture]
    return Resident(occupancy.occupancy(activity, known), registers)
