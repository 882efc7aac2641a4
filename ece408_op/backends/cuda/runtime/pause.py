"""A kernel that keeps the GPU busy while the host enqueues work to be timed: otherwise the time
between launches would be measured, too."""

from __future__ import annotations

from ..kernel_plan import ARCHITECTURES, Code, Launch, Plan
from . import launcher
from .device import Gpu

_CODE = Code("pause", "measuring/pause.cu", ARCHITECTURES, "float32", float32_accurate=True)


def load(gpu: Gpu, microseconds: int) -> launcher.LoadedPlan:
    """Load the pause on the GPU, whose context must be current. Raises what `launcher.load`
    does."""
    launch = Launch("pause", (1, 1, 1), (1, 1, 1), (microseconds,))
    return launcher.load(gpu, Plan(_CODE, (), (launch,)))
