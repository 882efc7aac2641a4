"""A kernel that keeps the GPU busy, while the host enqueues what is to be timed: without it the
host's time from one launch to the next is part of what is measured."""

from __future__ import annotations

from ..kernel_plan import ARCHITECTURES, Code, Launch, Plan
from . import launcher
from .device import Gpu

_CODE = Code("pause", "measuring/pause.cu", ARCHITECTURES, "float32", float32_accurate=True)


def load(gpu: Gpu, microseconds: int) -> launcher.LoadedPlan:
    """The pause, loaded on the GPU, whose context is current. Raises what `launcher.load` does."""
    launch = Launch("pause", (1, 1, 1), (1, 1, 1), (microseconds,))
    return launcher.load(gpu, Plan(_CODE, (), (launch,)))
