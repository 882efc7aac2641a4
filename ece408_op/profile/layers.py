"""Attribution of GPU kernels and copies to calls of our operator.

Functions of several sources may have the same name, so they are prefixed with the kernel's name in
the catalog.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from .activities import KERNEL, ON_GPU, OP_CALL, Activity, in_order
from .ncu import Counters


def with_layers(activities: Iterable[Activity]) -> tuple[Activity, ...]:
    """Return all activities in order; GPU activities within a call of our operator get its layer,
    and kernels the name of its kernel.

    The operator's calls are synchronous. An activity within two concurrent calls, on several GPUs
    or threads, gets no layer.
    """
    ordered = in_order(activities)
    calls = [each for each in ordered if each.kind == OP_CALL]
    starts = [call.start_ns for call in calls]
    longest = max((call.duration_ns for call in calls), default=0)

    def attributed(activity: Activity) -> Activity:
        if activity.kind not in ON_GPU:
            return activity
        middle = (activity.start_ns + activity.end_ns) // 2
        nearby = calls[bisect.bisect(starts, middle - longest) : bisect.bisect(starts, middle)]
        around = [call for call in nearby if call.end_ns >= middle]
        if len(around) != 1:
            return activity
        call = around[0].details
        name = activity.name
        if activity.kind == KERNEL:
            name = f"{catalog_name(call['kernel'])}:{name}"
        details = {**activity.details, "layer": call["layer"]}
        return dataclasses.replace(activity, name=name, details=details)

    return tuple(map(attributed, ordered))


def with_kernel_names(
    counters: Iterable[Counters], activities: Iterable[Activity]
) -> list[Counters]:
    """Return ncu's counters with their functions named as in the profile, if it has them."""
    names = {
        (each.name.partition(":")[2], tuple(each.details["block"]), each.details["registers"]): (
            each.name
        )
        for each in activities
        if each.kind == KERNEL and "layer" in each.details
    }
    return [
        dataclasses.replace(
            each, name=names.get((each.name, each.block, each.registers), each.name)
        )
        for each in counters
    ]


def catalog_name(logged: str) -> str:
    """Return the kernel's name in the log of op times without a suffix word; of several, all."""
    return "+".join(part.split(" ")[0] for part in logged.split("+"))
