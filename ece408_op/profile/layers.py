"""Which call of our operator a kernel or a copy on the GPU belongs to."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from .activities import ON_GPU, OP_CALL, Activity, in_order


def with_layers(activities: Iterable[Activity]) -> tuple[Activity, ...]:
    """All activities in order; those on a GPU within a call of our operator get its layer.

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
        details = {**activity.details, "layer": around[0].details["layer"]}
        return dataclasses.replace(activity, details=details)

    return tuple(map(attributed, ordered))
