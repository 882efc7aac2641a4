"""Recording of a program with all applicable recorders, and the resulting profile."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..backends.cuda.runtime import device
from ..operator import environment
from . import gpu_ceilings, kernel_figures, occupancy
from .activities import KERNEL, Activity, Profile
from .cupti_recorder import CuptiRecorder
from .layers import with_layers
from .mxnet_recorder import MXNetRecorder
from .op_recorder import OpRecorder


@dataclass(frozen=True)
class Outcome:
    """A recorded program: its profile, and its exception, if any."""

    profile: Profile
    failure: BaseException | None


def record(program: Callable[[], object], command: Sequence[str], gpu: bool) -> Outcome:
    """Call `program` and record MXNet's operators, our operator's calls and, with `gpu`, GPUs.

    The outcome contains the program's exception, `SystemExit` too; only `KeyboardInterrupt` is
    raised. Raises `ProfilerMissing` and `ProfilingNotPermitted` before the program begins.
    """
    operators = MXNetRecorder()
    recorders: list[Any] = [CuptiRecorder()] if gpu else []
    recorders += [operators, OpRecorder()]
    for recorder in recorders:
        recorder.start()
    begin_ns, begin = time.time_ns(), time.perf_counter()
    failure: BaseException | None = None
    try:
        program()
    except KeyboardInterrupt:
        operators.abandon()
        raise
    except BaseException as error:
        failure = error
    elapsed_s = time.perf_counter() - begin
    recorded = (activity for recorder in recorders for activity in recorder.stop())
    # Recorders use the system's clock, a profile times since the program's start.
    activities = [dataclasses.replace(each, start_ns=each.start_ns - begin_ns) for each in recorded]
    profile = Profile(
        with_layers(activities),
        tuple(command),
        elapsed_s,
        exit_code(failure),
        # This imports MXNet, which may be missing if nothing was recorded.
        environment.machine() if activities else {},
        notes=tuple(operators.notes),
    )
    return Outcome(profile, failure)


def exit_code(failure: BaseException | None) -> int:
    """Return the exit code of a program that ended with this exception."""
    if failure is None:
        return 0
    if isinstance(failure, SystemExit):
        code = failure.code
        return code if isinstance(code, int) else int(code is not None)
    return getattr(failure, "exit_code", 1)


def with_kernel_figures(profile: Profile) -> Profile:
    """Return the profile with the figures of our kernels, if any ran on a GPU, and its ceilings.

    Raises the errors of measuring the ceilings, such as `NotEnoughMemory`.
    """
    if not any("layer" in each.details for each in profile.of_kinds(KERNEL)):
        return profile
    ceilings = gpu_ceilings.measure(device.get(_busiest_gpu(profile.of_kinds(KERNEL))))
    found = kernel_figures.figures(profile.activities, ceilings, occupancy.limits)
    return dataclasses.replace(
        profile,
        kernel_figures=tuple(map(dataclasses.asdict, found)),
        ceilings=dataclasses.asdict(ceilings),
    )


def _busiest_gpu(kernels: Sequence[Activity]) -> int:
    times: dict[int, int] = {}
    for kernel in kernels:
        number = kernel.details["device"]
        times[number] = times.get(number, 0) + kernel.duration_ns
    return max(times, key=lambda number: times[number])
