"""Interface of the machine that computes a network: the CPU, a GPU or the emulator."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...backends import Done
from ..builder import Lowering


@dataclass(frozen=True)
class Run:
    """A loaded plan and the addresses of its arrays."""

    loaded: Any
    pointers: dict[str, int]


class Recorded(Protocol):
    """Recorded launches on a lane."""

    def launch(self) -> None:
        """Enqueue the launches."""

    def close(self) -> None:
        """Free the recording."""


class Machine(ABC):
    """What computes a network."""

    key: tuple[object, ...]
    backend: str
    # Held by a thread that computes on it.
    lock: contextlib.AbstractContextManager[Any]

    @abstractmethod
    def lowering(self, precision: str) -> Lowering:
        """Return its steps, with convolutions of at least this precision."""

    @abstractmethod
    def done(self, plan: Any, seconds: float) -> Done:
        """Return what the log of op times says of a convolution."""

    @abstractmethod
    def active(self) -> contextlib.AbstractContextManager[None]:
        """Make it current on this thread."""


class GpuMachine(Machine):
    """One GPU, and the cores nearest to it. All methods but `budget` require `active`, and `lock`
    held by the calling thread. They raise `NotEnoughMemory` and `GpuFailed`."""

    lock: threading.Lock
    cores: frozenset[int]

    @abstractmethod
    def budget(self, own: int) -> int:
        """Return the bytes that a network may use, including `own` bytes that it already has."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """Allocate memory and return its address."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Free memory from `allocate`."""

    @abstractmethod
    def reaches(self, other: Any) -> bool:
        """Return whether kernels on this GPU can read the memory of another machine of this class;
        let them."""

    @abstractmethod
    def upload(self, address: int, source: int, nbytes: int) -> None:
        """Copy from the host."""

    @abstractmethod
    def download(self, to: int, address: int, nbytes: int) -> None:
        """Copy to the host."""

    def is_page_locked(self, address: int, nbytes: int) -> bool:
        """Return whether lanes can copy from this part of the host's memory."""
        return False

    @abstractmethod
    def load(self, plans: Sequence[Any]) -> list[Any]:
        """Compile and load the plans."""

    @abstractmethod
    def lanes(
        self, count: int, device_bytes: int, host_bytes: int, limit: int
    ) -> contextlib.AbstractContextManager[Sequence[Any]]:
        """Provide lanes, as `Gpu.lanes` does."""

    @abstractmethod
    def record(self, lane: Any, runs: Sequence[Run]) -> Recorded:
        """Record these launches, in order, for repeated execution on this lane."""

    @abstractmethod
    def timed(self, lane: Any, runs: Sequence[Run]) -> list[float]:
        """Execute the launches, wait, and return the seconds of each by the GPU's clock."""
