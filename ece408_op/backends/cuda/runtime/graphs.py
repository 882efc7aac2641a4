"""Launches recorded once, and then repeated by one call of the driver: CUDA graphs.

PyCUDA has no functions for them, so they are called in the driver's library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from ....errors import GpuFailed
from .device import RESTART

# What the recording thread and others do meanwhile is not looked at.
_RELAXED = 2


class Recording:
    """What `enqueue` enqueues on a PyCUDA stream, which is not run yet. The stream's context is to
    be current. Raises `GpuFailed`, and what `enqueue` raises."""

    def __init__(self, stream: Any, enqueue: Callable[[], None]) -> None:
        self._stream = ctypes.c_void_p(int(stream.handle))
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._executable = ctypes.c_void_p()
        graph = ctypes.c_void_p()
        self._check("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(_RELAXED))
        try:
            enqueue()
        except BaseException:
            # The stream is to be of use again.
            self._driver.cuStreamEndCapture(self._stream, ctypes.byref(graph))
            raise
        self._check("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            made = ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0)
            self._check("cuGraphInstantiateWithFlags", *made)
        finally:
            self._driver.cuGraphDestroy(graph)

    def launch(self) -> None:
        """Enqueue all of it on the stream."""
        self._check("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Give back what the driver keeps for it."""
        self._driver.cuGraphExecDestroy(self._executable)

    def _check(self, name: str, *arguments: Any) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            raise GpuFailed(f"{name} failed with CUDA error {error}{RESTART}")
