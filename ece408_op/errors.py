"""Errors that the package raises on purpose, and their exit codes.

An error's text is one line: what is wrong, the offending value, and what to do about it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator


def printable(text: str) -> str:
    """Return untrusted text as one line, with unprintable characters, such as a terminal's escape
    sequences, escaped as in Python."""
    return "".join(
        each if each.isprintable() else " " if each.isspace() else ascii(each)[1:-1]
        for each in text
    )


class Ece408Error(Exception):
    """Base of all errors that this package raises on purpose."""

    exit_code = 1


class InvalidSize(Ece408Error, ValueError):
    """An invalid number of images, batch size or number of threads."""

    exit_code = 3


class UnknownModel(Ece408Error, ValueError):
    """A model or a term that the course does not have."""

    exit_code = 4


class DataMissing(Ece408Error):
    """Fashion-MNIST is not in the given folder, or not found at all."""

    exit_code = 5


class DataCorrupt(Ece408Error):
    """A data file is truncated, damaged, of the wrong shape, or not Fashion-MNIST."""

    exit_code = 6


class DownloadFailed(Ece408Error):
    """Neither the official address nor the distribution's package could be fetched."""

    exit_code = 7


class CheckpointMissing(Ece408Error):
    """A symbol or parameter file of a model is missing."""

    exit_code = 8


class CheckpointMismatch(Ece408Error):
    """A checkpoint cannot be read, or its parameters do not fit its symbol or the images."""

    exit_code = 9


class CacheUnwritable(Ece408Error):
    """The cache folder cannot be created or written."""

    exit_code = 10


class MXNetMissing(Ece408Error, ImportError):
    """MXNet is not installed, or does not import."""

    exit_code = 11


class NotEnoughMemory(Ece408Error, MemoryError):
    """The requested work needs more memory than this machine has free."""

    exit_code = 12


class KernelsMissing(Ece408Error):
    """The compiled CPU kernels are not installed, or do not load."""

    exit_code = 13


class InvalidProblem(Ece408Error, ValueError):
    """A convolution that does not exist: wrong rank, shapes that do not fit, unknown attribute."""

    exit_code = 14


class UnsupportedProblem(Ece408Error):
    """A valid convolution that the requested backend cannot compute."""

    exit_code = 15


class InvalidSetting(Ece408Error, ValueError):
    """A setting, from an argument or the environment, with an invalid value."""

    exit_code = 16


class OperatorFailed(Ece408Error):
    """The operator failed while MXNet was running it; `__cause__` is the original exception."""

    exit_code = 17


class NoUsableGpu(Ece408Error):
    """No GPU, or a requirement for computing on it is missing."""

    exit_code = 18


class KernelCompileFailed(Ece408Error):
    """A compiler refused a kernel: the text has the file, the line and the command."""

    exit_code = 19


class GpuFailed(Ece408Error):
    """The GPU or its driver reported a failure while a kernel or a copy of ours ran."""

    exit_code = 22


class WrongResult(Ece408Error):
    """A kernel computes something other than a convolution, so it is not timed."""

    exit_code = 23


class TuningFailed(Ece408Error):
    """Every candidate of `ece408 tune` gave wrong results for a problem."""

    exit_code = 24


class ProfilerMissing(Ece408Error):
    """A recorder, ncu or compute-sanitizer is missing or does not start; recording needs CUPTI for
    Python."""

    exit_code = 26


class ProfilingNotPermitted(Ece408Error):
    """The driver does not let this user profile the GPU."""

    exit_code = 27


class ScriptMissing(Ece408Error):
    """The program to profile is neither a milestone nor a readable Python script."""

    exit_code = 28


class ReportUnwritable(Ece408Error):
    """The folder of a report cannot be created or written."""

    exit_code = 29


class NotesUnreadable(Ece408Error):
    """The notes in an existing report cannot be separated from the rest of it."""

    exit_code = 30


class CacheUntrusted(Ece408Error):
    """A cache file that could do harm, and that other users can have written."""

    exit_code = 31


class OutputUnwritable(Ece408Error):
    """Standard output is closed, or the disk or device behind it is full."""

    exit_code = 32


class KernelFailed(Ece408Error):
    """A user's kernel threw an exception, such as that of a CHECK, while it computed."""

    exit_code = 33


class KernelNotSupported(Ece408Error):
    """A user's kernel may be right, but needs a GPU or a library that is missing."""

    exit_code = 34


class WorkerFailed(Ece408Error):
    """A worker of a job failed, or was killed."""

    exit_code = 40


class ServerFailed(Ece408Error):
    """A server of a job failed, or was killed."""

    exit_code = 41


class SchedulerFailed(Ece408Error):
    """The scheduler of a job failed, or was killed."""

    exit_code = 42


class HostLost(Ece408Error):
    """A host of a job cannot be reached, or no longer."""

    exit_code = 43


class WorkersDiffer(Ece408Error):
    """Workers that train one model no longer have the same weights."""

    exit_code = 44


class SchedulerUnreached(Ece408Error):
    """A process of a job cannot connect to the job's scheduler."""

    exit_code = 45


_lock = threading.Lock()
_first_failure: Ece408Error | None = None
# The number of open `surfaced` blocks, and the last message printed outside of them.
_blocks = 0
_last_said = ""


def remember(error: Exception) -> Ece408Error:
    """Keep the first failure that MXNet will report without its text; return it as ours.

    An error of another package becomes the cause of an `OperatorFailed`. Outside `surfaced`, where
    it would be lost, its text is printed to stderr, once.
    """
    global _first_failure, _last_said
    if isinstance(error, Ece408Error):
        failure = error
    else:
        failure = OperatorFailed(f"the operator failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
    with _lock:
        _first_failure = _first_failure or failure
        is_news = not _blocks and str(failure) != _last_said
        if is_news:
            _last_said = str(failure)
    if is_news and sys.stderr is not None:
        print(f"ece408: error: {failure}", file=sys.stderr)
    return failure


def remembered(work: Callable[[], object]) -> int:
    """Call `work` for C++: return 1, or remember its failure and return 0."""
    try:
        work()
    except Exception as error:
        remember(error)
        return 0
    return 1


def take_failure() -> Ece408Error | None:
    """Return and forget the first failure since the last call; `None` if there was none."""
    global _first_failure
    with _lock:
        failure, _first_failure = _first_failure, None
    return failure


@contextlib.contextmanager
def _listening() -> Iterator[None]:
    global _blocks
    with _lock:
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1


@contextlib.contextmanager
def surfaced() -> Iterator[None]:
    """Raise the operator's original error instead of MXNet's error without its text.

    MXNet reports a failure inside an operator at the next synchronisation, as an `MXNetError` that
    lacks the message, and arrays read after that contain garbage. Inside this block the original
    error is raised in its place (chained to it), or at the end of the block if MXNet has not
    reported it by then; wait for the results inside it::

        with ece408_op.errors.surfaced():
            answers = module.predict(images).asnumpy()
    """
    take_failure()
    try:
        with _listening():
            yield
    except Exception as error:
        failure = take_failure()
        if failure is None or failure is error:
            raise
        raise failure from (failure.__cause__ or error)
    failure = take_failure()
    if failure is not None:
        raise failure
