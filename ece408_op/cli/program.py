"""Start and end of the command and the scripts: streams that may be closed, full or abandoned, an
exit code, and at most one line on stderr for an error."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import sys
from typing import Any, Callable, NoReturn

from ..errors import Ece408Error, OutputUnwritable
from .colour import paint, plain

EXIT_UNEXPECTED = 1
EXIT_INTERRUPTED = 130
# A shell's exit code for programs that SIGPIPE ends; Python ignores that signal.
EXIT_ABANDONED = 141


class _Output(io.FileIO):
    """Standard output. The first failed write raises, and later output is dropped: a stream would
    try to write its buffer again, at the latest while Python ends."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
                raise
        return len(data)


class _Errors(io.FileIO):
    """Standard error. A failed write is ignored, because it cannot be reported."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


_output: _Output | None = None
_ends_at_once = False


def run(name: str, work: Callable[[], int | None]) -> NoReturn:
    """Run a program and end the process with its exit code: the result of `work`, 0 for `None`.

    An error of this package is one line on stderr, and so is a failure to write output; if the
    reader of the output has gone, nothing is printed.
    """
    _open_streams()
    code: Any
    try:
        code = int(work() or 0)
    except KeyboardInterrupt:
        code = fail(name, "interrupted", EXIT_INTERRUPTED)
    except Ece408Error as error:
        code = fail(name, str(error), error.exit_code)
    except SystemExit as end:
        code = end.code
    except OSError:
        if not output_failed():
            raise
        code = EXIT_UNEXPECTED
    code = _code_of_output(name, code)
    sys.stderr.flush()
    if _ends_at_once and not _is_watched():
        # Output of libraries, such as oneDNN with DNNL_VERBOSE.
        ctypes.CDLL(None).fflush(None)
        os._exit(code)
    if code == EXIT_INTERRUPTED:
        # MXNet's threads may still compute, and a normal exit would wait for them.
        os._exit(code)
    sys.exit(code)


def end_at_once() -> None:
    """Make `run` end the process as soon as its work is done: its output is flushed, and the
    operating system frees its memory. NVIDIA's driver takes 1/6 s for that."""
    global _ends_at_once
    _ends_at_once = True


def _is_watched() -> bool:
    """Return whether a profiler or sanitizer is loaded into this process: it writes its results at
    a normal exit."""
    return any(name == "LD_PRELOAD" or "INJECTION" in name for name in os.environ)


def fail(name: str, text: str, code: int) -> int:
    """Print the one line of an error; return `code`."""
    # Errors after a failure of the output are its consequences.
    if not output_failed():
        print(f"{name}: {paint('error', 'red', sys.stderr)}: {plain(text)}", file=sys.stderr)
    return code


def output_failed() -> bool:
    """Return whether writing to standard output has failed, in a program started by `run`."""
    return _output is not None and _output.failure is not None


def _code_of_output(name: str, code: Any) -> Any:
    """Return the exit code; if output could not be written, report that and return its code."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    failure = _output.failure if _output is not None else None
    if failure is None:
        return code
    if failure.errno == errno.EPIPE:
        return EXIT_ABANDONED
    print(
        f"{name}: error: cannot write to standard output: {failure.strerror}; make room, or send "
        "it to something that takes it",
        file=sys.stderr,
    )
    return OutputUnwritable.exit_code


def _open_streams() -> None:
    """Replace the three standard streams by this module's, and ensure that they are open.

    Otherwise a file opened later would get the number of a closed stream, and output of libraries
    and child processes would be written into it.
    """
    global _output
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        # A closed standard output becomes one that refuses writes.
        if not _is_open(number):
            opened = os.open(os.devnull, flags)
            os.dup2(opened, number)
            os.set_inheritable(number, True)
            if opened != number:
                os.close(opened)
    if _is_ours(sys.stdout, 1):
        _output = _Output(1, "w", closefd=False)
        sys.stdout = _text(_output, sys.stdout, "strict")
    if _is_ours(sys.stderr, 2):
        sys.stderr = _text(_Errors(2, "w", closefd=False), sys.stderr, "backslashreplace")


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _is_ours(stream: Any, number: int) -> bool:
    """Return whether it is Python's own stream, or `None`, which Python uses for a closed one."""
    if stream is None:
        return True
    return stream in (sys.__stdout__, sys.__stderr__) and stream.fileno() == number


def _text(raw: io.FileIO, before: Any, errors: str) -> io.TextIOWrapper:
    """Return a text stream on `raw`, otherwise like the one before it."""
    if before is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), errors=errors)
    before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        before.encoding,
        before.errors,
        # With PYTHONUNBUFFERED output is passed on at once, but here a buffer is below.
        line_buffering=before.line_buffering or before.write_through,
        write_through=before.write_through,
    )
