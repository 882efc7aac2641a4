"""Parameters of Gluon blocks that stay on a GPU while they train (`network/residents`): which of
MXNet's arrays they replace, and bringing these up to date."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import InvalidSetting
from ..network.gpu_memory import GpuMemory
from ..network.host_arrays import Array
from ..network.residents import Resident
from . import array_memory
from .native_handles import library

# By handles of parameters: those that have been on a GPU.
_held: dict[int, OnGpu] = {}


class OnGpu:
    """A parameter on a GPU, with its gradient and an optimizer's `states`, in the place of MXNet's
    arrays, which it keeps. Raises `NotEnoughMemory` and `GpuFailed`."""

    def __init__(
        self, memory: GpuMemory, parameter: Any, array: Any, gradient: Any, states: int
    ) -> None:
        array_memory.make_plain([array, gradient])
        self.array, self.gradient, self._parameter = array, gradient, parameter
        self._machine = memory.machine
        with self._machine.lock, self._machine.active():
            self.resident = Resident(memory, _described(array), _described(gradient), states)
        _held[array.handle.value] = self

    def is_of(self, array: Any, gradient: Any) -> bool:
        return array is self.array and gradient is self.gradient

    def bring(self) -> None:
        """Copy what the host has newer to the GPU, which is active. Raises `InvalidSetting` for a
        parameter that both have changed."""
        self.array.wait_to_read()
        self.gradient.wait_to_read()
        resident, writes = self.resident, library().ece408_writes_to(self.array.handle)
        if resident.is_ahead and writes != resident.version:
            raise InvalidSetting(
                f"parameter {self._parameter} was changed through an array from before the last "
                "step of its trainer; call its data() after the step, and change that"
            )
        resident.bring(writes)
        resident.bring_gradient(library().ece408_writes_to(self.gradient.handle))

    def fetch(self) -> None:
        """Bring MXNet's array up to date."""
        if self.resident.is_ahead:
            # Counts as a write: whoever kept the old values takes the new ones.
            array_memory.wait_for_uses([self.array])
            with self._machine.lock, self._machine.active():
                self.resident.fetch()
            self.resident.version = library().ece408_writes_to(self.array.handle)

    def fetch_gradient(self) -> None:
        """Bring MXNet's array of the gradient up to date."""
        self.gradient.wait_to_read()
        writes = library().ece408_writes_to(self.gradient.handle)
        if self.resident.has_gradient(writes):
            array_memory.wait_for_uses([self.gradient])
            with self._machine.lock, self._machine.active():
                self.resident.fetch_gradient()

    def close(self) -> None:
        """Let MXNet's arrays be used as others are, up to date."""
        self.fetch()
        self.fetch_gradient()
        self.resident.close()
        _held.pop(self.array.handle.value, None)


def _described(array: Any) -> Array:
    return Array(array_memory.pointer(array), array.shape, "float32", 0)


def fetch(arrays: Iterable[Any]) -> None:
    """Bring those of the arrays up to date that are parameters on a GPU."""
    if _held:
        for array in arrays:
            held = _held.get(array.handle.value)
            if held is not None:
                held.fetch()


def fetch_copied(arrays: Iterable[Any]) -> None:
    """Bring those of the arrays up to date of which MXNet may pass copies to a node."""
    if _held:
        fetch(a for a in arrays if library().ece408_writes_to(a.handle) < 0)


class _Inside(threading.local):
    depth = 0


_inside = _Inside()


@contextlib.contextmanager
def in_block() -> Iterator[None]:
    """In the block, what MXNet's parameters return need not be up to date."""
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1


def is_in_block() -> bool:
    return _inside.depth > 0
