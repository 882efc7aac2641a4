"""Log of op times: one entry per call of a backend for a layer."""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .problem import ConvProblem


@dataclass(frozen=True)
class GpuTime:
    """The time within one call during which any kernel, and any copy over the bus, was active.

    Copies and kernels overlap, so their sum may exceed the time of the call.
    """

    kernel_seconds: float
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class OpTime:
    """One call of a backend.

    `seconds` is wall time around the backend's call, with its device idle before and after; `gpu`
    is the busy time of GPUs, or `None` when none computed. `precision` is the arithmetic's:
    "strict", "tf32" or "float16" if requested and used, and otherwise "float32": as exact as the
    arrays' type allows, or float32 if that is more.
    """

    layer: str
    problem: ConvProblem
    direction: str
    backend: str
    kernel: str
    seconds: float
    gpu: GpuTime | None = None
    precision: str = "float32"

    @property
    def milliseconds(self) -> float:
        return 1e3 * self.seconds


_HEADER = ("layer", "direction", "backend", "kernel", "precision", "ms", "problem")


class OpTimes(list[OpTime]):
    """The calls of one `op_times` block in the order of completion; displayed as a table by `str`
    and notebooks."""

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[i]) for row in [_HEADER, *rows]) for i in range(len(_HEADER))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if i == _HEADER.index("ms") else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths))
            ).rstrip()
            for row in [_HEADER, *rows]
        )

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        head = "".join(f"<th>{each}</th>" for each in _HEADER)
        rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._rows()]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                *(t.layer or "-", t.direction, t.backend, t.kernel, t.precision),
                *(f"{t.milliseconds:.3f}", str(t.problem)),
            )
            for t in self
        ]


_Listener = Callable[[OpTime], object]
_listeners: list[_Listener] = []
_watchers: list[Callable[[bool], object]] = []
_lock = threading.Lock()


def watch(on_change: Callable[[bool], object]) -> None:
    """Call `on_change` now, and at every beginning and end of an `op_times` block, with whether any
    such block is collecting."""
    with _lock:
        _watchers.append(on_change)
        on_change(bool(_listeners))


def _change(how: Callable[[_Listener], None], listener: _Listener) -> None:
    with _lock:
        how(listener)
        # With the lock held, so that the last notification is the current state.
        for on_change in _watchers:
            on_change(bool(_listeners))


def collecting() -> bool:
    """Return whether any `op_times` block is collecting."""
    return bool(_listeners)


@contextlib.contextmanager
def op_times(on_call: Callable[[OpTime], object] | None = None) -> Iterator[OpTimes]:
    """Collect the op times of every call that ends within the block, on any thread.

    MXNet computes asynchronously: wait for the results (`asnumpy`, `wait_to_read`) inside the
    block. `on_call`, if given, also receives each entry immediately.
    """
    log = OpTimes()

    def listen(entry: OpTime) -> None:
        log.append(entry)
        if on_call is not None:
            on_call(entry)

    _change(_listeners.append, listen)
    try:
        yield log
    finally:
        _change(_listeners.remove, listen)


def publish(entry: OpTime) -> None:
    """Pass an entry to every open `op_times` block."""
    with _lock:
        listeners = list(_listeners)
    for listen in listeners:
        listen(entry)
