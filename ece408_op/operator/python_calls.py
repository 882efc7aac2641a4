"""Protection of MXNet's calls into Python from signals and from the end of Python.

MXNet calls an operator written in Python, for example for shapes, on its user's thread. Python
handles Ctrl-C there as anywhere, but the exception would be printed and lost, or kill the process.
MXNet's own threads also call Python to run operators and to delete them, which hangs or aborts the
process once Python ends. So every such call goes through the compiled library
(kernels/mxnet/python_calls.cpp). Without the library MXNet calls Python directly.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
from typing import Any, Callable

from . import compiled_operator

_Action = ctypes.CFUNCTYPE(None)


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    try:
        return ctypes.CDLL(str(compiled_operator.LIBRARY))
    except OSError:
        return None


def install(mxnet: Any) -> None:
    """Keep exceptions of signal handlers that Python would only print; end MXNet before Python."""
    library = _library()
    if library is None:
        return
    # Functions of PyDLL hold the GIL.
    unraisable = ctypes.PyDLL(str(compiled_operator.LIBRARY)).ece408_unraisable
    unraisable.argtypes = [ctypes.py_object] * 3
    unraisable.restype = ctypes.py_object
    # Not a Python function, because a later signal would raise its exception in that one.
    sys.unraisablehook = functools.partial(unraisable, _is_of_signal, sys.unraisablehook)
    # Last in, first out: before MXNet's own, which hangs if an operator is in flight.
    atexit.register(_end, mxnet)


def register(mxnet: Any, name: str, creator: Any, functions: Any) -> None:
    """Register an operator's creator with MXNet, and put the library's guards, if it is loaded, in
    the place of the functions: of a description, then of an operator."""
    library = _library()
    if library is not None:
        library.ece408_guarded.restype = ctypes.c_void_p
        creator = ctypes.c_void_p(library.ece408_guarded(creator, functions))
    mxnet.base.check_call(mxnet.base._LIB.MXCustomOpRegister(name.encode(), creator))


def before_forks(action: Callable[[], None]) -> None:
    """Call `action` before every fork; signals wait until the fork is done.

    Python would only print an exception that a handler raises during a fork.
    """
    if _library() is None:
        os.register_at_fork(before=action)
        return
    library = ctypes.PyDLL(str(compiled_operator.LIBRARY))
    os.register_at_fork(
        before=functools.partial(library.ece408_before_fork, _Action(action)),
        after_in_parent=library.ece408_after_fork_in_parent,
        after_in_child=library.ece408_after_fork_in_child,
    )


def _is_of_signal(given: Any) -> bool:
    """Return whether a signal's handler raised this, rather than the code that it interrupted."""
    if issubclass(given.exc_type, KeyboardInterrupt):
        return True
    interrupted, entry = None, given.exc_traceback
    while entry is not None:
        # A handler in Python receives the interrupted frame as an argument.
        values = list(entry.tb_frame.f_locals.values())
        values += [each for value in values if type(value) is tuple for each in value]
        if interrupted is not None and any(value is interrupted for value in values):
            return True
        interrupted, entry = entry.tb_frame, entry.tb_next
    return False


def _end(mxnet: Any) -> None:
    # Flush operators that MXNet has collected for its threads.
    mxnet.engine.set_bulk_size(0)
    base = mxnet.base
    has_others = threading.active_count() > 1
    at_rest = _library().ece408_end(
        base._LIB.MXNDArrayWaitAll, base._LIB.MXNotifyShutdown, int(has_others)
    )
    if not at_rest:
        atexit.unregister(base._notify_shutdown)
