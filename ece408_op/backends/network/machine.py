"""What computes a network: GPUs, or the emulator in the place of one."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..cuda.kernel_plan import Plan, Target


@dataclass(frozen=True)
class Run:
    """A plan that is loaded, and the addresses of its arrays."""

    loaded: Any
    pointers: dict[str, int]


class Recorded(Protocol):
    """Runs on a lane."""

    def launch(self) -> None:
        """Enqueue them."""

    def close(self) -> None:
        """Give back what is kept for them."""


class Machine(ABC):
    """One GPU, and the cores nearest to it. All methods but `budget` are to be called inside
    `active`, by one thread at a time: that which holds `lock`. They raise `NotEnoughMemory` and
    `GpuFailed`."""

    key: tuple[object, ...]
    backend: str
    target: Target
    lock: threading.Lock
    cores: frozenset[int]

    @abstractmethod
    def active(self) -> contextlib.AbstractContextManager[None]:
        """Have the GPU current on this thread."""

    @abstractmethod
    def budget(self, own: int) -> int:
        """Bytes that a network may use, which has `own` of them already."""

    @abstractmethod
    def allocate(self, nbytes: int) -> int:
        """The address of memory that stays."""

    @abstractmethod
    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""

    @abstractmethod
    def upload(self, address: int, source: int, nbytes: int) -> None:
        """Copy from the host."""

    @abstractmethod
    def download(self, to: int, address: int, nbytes: int) -> None:
        """Copy to the host."""

    @abstractmethod
    def load(self, plans: Sequence[Plan]) -> list[Any]:
        """The plans, compiled and loaded."""

    @abstractmethod
    def lanes(
        self, count: int, device_bytes: int, host_bytes: int, limit: int
    ) -> contextlib.AbstractContextManager[Sequence[Any]]:
        """Lanes as `Gpu.lanes` has them."""

    @abstractmethod
    def record(self, lane: Any, runs: Sequence[Run]) -> Recorded:
        """What enqueues these runs, in order, on this lane, as often as it is told to."""

    @abstractmethod
    def timed(self, lane: Any, runs: Sequence[Run]) -> list[float]:
        """Do the runs and wait; the seconds that each took by the GPU's clock."""
