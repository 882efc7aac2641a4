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

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code


class InvalidSize(Ece408Error, ValueError, exit_code=3):
    """An invalid number of images, batch size or number of threads."""


class UnknownModel(Ece408Error, ValueError, exit_code=4):
    """A model or a term that the course does not have."""


class DataMissing(Ece408Error, exit_code=5):
    """Fashion-MNIST is not in the given folder, or not found at all."""


class DataCorrupt(Ece408Error, exit_code=6):
    """A data file is truncated, damaged, of the wrong shape, or not Fashion-MNIST."""


class DownloadFailed(Ece408Error, exit_code=7):
    """Neither the official address nor the distribution's package could be fetched."""


class CheckpointMissing(Ece408Error, exit_code=8):
    """A symbol or parameter file of a model is missing."""


class CheckpointMismatch(Ece408Error, exit_code=9):
    """A checkpoint cannot be read, or its parameters do not fit its symbol or the images."""


class CacheUnwritable(Ece408Error, exit_code=10):
    """The cache folder cannot be created or written."""


class MXNetMissing(Ece408Error, ImportError, exit_code=11):
    """MXNet is not installed, or does not import."""


class NotEnoughMemory(Ece408Error, MemoryError, exit_code=12):
    """The requested work needs more memory than this machine has free."""


class KernelsMissing(Ece408Error, exit_code=13):
    """The compiled CPU kernels are not installed, or do not load."""


class InvalidProblem(Ece408Error, ValueError, exit_code=14):
    """A convolution that does not exist: wrong rank, shapes that do not fit, unknown attribute."""


class UnsupportedProblem(Ece408Error, exit_code=15):
    """A valid convolution that the requested backend cannot compute."""


class InvalidSetting(Ece408Error, ValueError, exit_code=16):
    """A setting, from an argument or the environment, with an invalid value."""


class OperatorFailed(Ece408Error, exit_code=17):
    """The operator failed while MXNet was running it; `__cause__` is the original exception."""


class NoUsableGpu(Ece408Error, exit_code=18):
    """No GPU, or a requirement for computing on it is missing."""


class KernelCompileFailed(Ece408Error, exit_code=19):
    """A compiler refused a kernel: the text has the file, the line and the command."""


class GpuFailed(Ece408Error, exit_code=22):
    """The GPU or its driver reported a failure while a kernel or a copy of ours ran."""


class WrongResult(Ece408Error, exit_code=23):
    """A kernel computes something other than a convolution, so it is not timed."""


class TuningFailed(Ece408Error, exit_code=24):
    """Every candidate of `ece408 tune` gave wrong results for a problem."""


class ProfilerMissing(Ece408Error, exit_code=26):
    """A recorder, ncu or compute-sanitizer is missing or does not start; recording needs CUPTI for
    Python."""


class ProfilingNotPermitted(Ece408Error, exit_code=27):
    """The driver does not let this user profile the GPU."""


class ScriptMissing(Ece408Error, exit_code=28):
    """The program to profile is neither a milestone nor a readable Python script."""


class ReportUnwritable(Ece408Error, exit_code=29):
    """The folder of a report cannot be created or written."""


class NotesUnreadable(Ece408Error, exit_code=30):
    """The notes in an existing report cannot be separated from the rest of it."""


class CacheUntrusted(Ece408Error, exit_code=31):
    """A cache file that could do harm, and that other users can have written."""


class OutputUnwritable(Ece408Error, exit_code=32):
    """Standard output is closed, or the disk or device behind it is full."""


class KernelFailed(Ece408Error, exit_code=33):
    """A user's kernel threw an exception, such as that of a CHECK, while it computed."""


class KernelNotSupported(Ece408Error, exit_code=34):
    """A user's kernel may be right, but needs a GPU or a library that is missing."""


class InstallFailed(Ece408Error, exit_code=35):
    """pip or a compiler failed to install what `ece408 gpu-setup` needs."""


class WorkerFailed(Ece408Error, exit_code=40):
    """A worker of a job failed, or was killed."""


class ServerFailed(Ece408Error, exit_code=41):
    """A server of a job failed, or was killed."""


class SchedulerFailed(Ece408Error, exit_code=42):
    """The scheduler of a job failed, or was killed."""


class HostLost(Ece408Error, exit_code=43):
    """A host of a job cannot be reached, or no longer."""


class WorkersDiffer(Ece408Error, exit_code=44):
    """Workers that train one model no longer have the same weights."""


class SchedulerUnreached(Ece408Error, exit_code=45):
    """A process of a job cannot connect to the job's scheduler."""


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
