"""Launches recorded once, and then repeated by one call of the driver: CUDA graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from . import driver

# What the recording thread and others do meanwhile is not looked at.
_RELAXED = 2


class Recording:
    """What `enqueue` enqueues on a PyCUDA stream, which is not run yet. The stream's context is to
    be current. Raises `GpuFailed`, and what `enqueue` raises."""

    def __init__(self, stream: Any, enqueue: Callable[[], None]) -> None:
        self._stream = ctypes.c_void_p(int(stream.handle))
        self._executable = ctypes.c_void_p()
        graph = ctypes.c_void_p()
        driver.call("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(_RELAXED))
        try:
            enqueue()
        except BaseException:
            # The stream is to be of use again.
            driver.library().cuStreamEndCapture(self._stream, ctypes.byref(graph))
            raise
        driver.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            made = ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0)
            driver.call("cuGraphInstantiateWithFlags", *made)
        finally:
            driver.library().cuGraphDestroy(graph)

    def launch(self) -> None:
        """Enqueue all of it on the stream."""
        driver.call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Give back what the driver keeps for it."""
        driver.library().cuGraphExecDestroy(self._executable)
