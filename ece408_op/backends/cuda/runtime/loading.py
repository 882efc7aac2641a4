"""Plans made ready for a GPU, looked up quickly after the first time."""

from __future__ import annotations

import functools
from typing import Any

from ..plan import Plan
from . import launcher
from .device import Gpu


@functools.lru_cache(maxsize=4096)
def load(gpu: Gpu, plan: Plan) -> Any:
    """The plan, ready to launch on the GPU, which is active. Raises as `launcher.load`."""
    return launcher.load(plan, gpu.capability)
