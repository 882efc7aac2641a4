"""Demangling of C++ kernel names."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from typing import Any


@functools.lru_cache(maxsize=4096)
def demangle(name: str) -> str:
    """Return the C++ name for a symbol such as `_Z4copyPf`; other names unchanged."""
    library = _library() if name.startswith("_Z") else None
    if library is None:
        return name
    status = ctypes.c_int()
    text = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        return ctypes.string_at(text).decode()
    finally:
        _free(text)


@functools.cache
def _library() -> Any:
    """Return the C++ runtime, or `None` if it is missing."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return None
    library.__cxa_demangle.restype = ctypes.c_void_p
    return library


def _free(address: int) -> None:
    ctypes.CDLL(None).free(ctypes.c_void_p(address))
