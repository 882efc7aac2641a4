"""Arrays of MXNet's whose newest values are on a GPU, where a network trains, and bringing them up
to date."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol


class OnGpu(Protocol):
    """A parameter that stays on a GPU."""

    def show(self) -> None:
        """Bring MXNet's array up to date: MXNet's operators may read it."""

    def hide(self) -> None:
        """Prepare MXNet's array for calls of parts that read the parameter on the GPU."""


# By handles of the arrays.
held: weakref.WeakValueDictionary[int, OnGpu] = weakref.WeakValueDictionary()


def show(arrays: Iterable[Any]) -> None:
    """Bring those of the arrays up to date that are parameters on a GPU."""
    for each in _held(arrays):
        each.show()


def hide(arrays: Iterable[Any]) -> None:
    """Prepare the arrays for a call of parts on a GPU."""
    for each in _held(arrays):
        each.hide()


def _held(arrays: Iterable[Any]) -> list[OnGpu]:
    if not held:
        return []
    found = (held.get(array.handle.value) for array in arrays)
    return [each for each in found if each is not None]


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
