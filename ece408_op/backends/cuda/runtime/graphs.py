"""CUDA graphs: launches are captured once and replayed by one driver call."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from . import driver

# CU_STREAM_CAPTURE_MODE_RELAXED: CUDA calls of any thread stay allowed during the capture.
_RELAXED = 2


class Recording:
    """A captured sequence: what `enqueue` enqueues on a PyCUDA stream, without running it. The
    stream's context must be current. Raises `GpuFailed` and the errors of `enqueue`."""

    def __init__(self, stream: Any, enqueue: Callable[[], None]) -> None:
        self._stream = ctypes.c_void_p(int(stream.handle))
        self._executable = ctypes.c_void_p()
        graph = ctypes.c_void_p()
        driver.call("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(_RELAXED))
        try:
            enqueue()
        except BaseException:
            # End the capture, so that the stream stays usable.
            driver.library().cuStreamEndCapture(self._stream, ctypes.byref(graph))
            raise
        driver.call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            made = ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0)
            driver.call("cuGraphInstantiateWithFlags", *made)
        finally:
            driver.library().cuGraphDestroy(graph)

    def launch(self) -> None:
        """Enqueue the whole graph on the stream."""
        driver.call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Destroy the graph."""
        driver.library().cuGraphExecDestroy(self._executable)
