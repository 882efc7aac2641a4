"""Finds the call of our operator that a kernel or a copy on the GPU belongs to.

Functions of several of our sources have the same name: they get that of the kernel before it, as
the catalog names it.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from .activities import KERNEL, ON_GPU, OP_CALL, Activity, in_order
from .ncu import Counters


def with_layers(activities: Iterable[Activity]) -> tuple[Activity, ...]:
    """All activities in order; those on a GPU within a call of our operator get its layer, and
    kernels among them its kernel's name.

    The operator's calls return when their work is done. What lies within two calls at the same
    time, on several GPUs or threads, gets the layer of neither.
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
    """ncu's counters with their functions named as in a profile, where it has them."""
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
    """The kernel's name in the log of op times without a word that follows; of several, all."""
    return "+".join(part.split(" ")[0] for part in logged.split("+"))
