"""Kernels in users' files: recognition of the file's form, and its compilation to a library.

kernels/files contains the support for the course's forms: stand-ins for the headers that they
include, and a source per form that exports `ece408_file_forward`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import re
import shlex
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..errors import Ece408Error, InvalidSetting, KernelCompileFailed, KernelNotSupported
from ..files.resources import kernels_dir
from ..files.sealed import kept_or_compiled
from ..problem import ConvProblem

# File name suffixes, by the device of the kernels.
_SUFFIXES = {"cpu": (".cc", ".cpp", ".cxx", ".h", ".hpp"), "cuda": (".cu", ".cuh")}
# A size limit that no hand-written file reaches.
_MOST_BYTES = 4 << 20
_TENSOR = r"\bmshadow\s*::\s*Tensor\b"
# The text by which a form is recognised. The name of a course's form is also that of its source.
_FORMS = {
    "cpu": {"course_2019": _TENSOR, "course_2020": r"\bconv_forward_cpu\s*\("},
    "cuda": {
        "course_2019": _TENSOR,
        "course_2020": r"\bGPUInterface\s*::\s*conv_forward_gpu\s*\(",
        "declared": r"^[ \t]*//[ \t]*ece408:",
    },
}
# Options for a shared library. If the compiler links its C++ library statically, symbols are
# hidden: otherwise they would mix with those of the process's C++ library, such as locale ids. An
# undefined symbol is a linker error that names it.
COMPLETE = ("-Xlinker", "--no-undefined")
_SHARED = ("-shared", "-Xlinker", "--exclude-libs=ALL", *COMPLETE)
# CUDA toolkit libraries that files may use, and compiler messages if one of them, or a part of
# MXNet that kernels/files/mxnet does not provide, is missing.
_CUDA = r"(?:cu(?:blas|dnn|fft|rand|solver|sparse|tlass|b\b|da/|da\.h)|nvrtc|npp|thrust)"
_ABSENT = (
    "No such|file not found|no match for .oper|no operator|no member|not a member|does not name"
)
_NOT_HERE = re.compile(
    rf"(?=.*(?:{_ABSENT})).*\b(?:mxnet(?!::op)|mshadow|dmlc|{_CUDA})|"
    rf"undefined reference to .{_CUDA}"
)
# Runs a compiler's command and returns its output.
Run = Callable[[Sequence[str]], str]
# Wraps a compiler's command so that the compiler and an untrusted file run with restrictions.
Guard = Callable[[Sequence[str], Path], Sequence[str]]
_guard: ContextVar[Guard | None] = ContextVar("guard", default=None)
_LONGEST_ERROR, _MOST_MESSAGES = 300, 1 << 20
# The parameters of a method with a stride: ten instead of nine.
_STRIDED = re.compile(r"GPUInterface\s*::\s*conv_forward_gpu\s*\(([^,)]*,){9}[^,)]*\)")
_PLAIN_OUTPUT = re.compile(r"GPUInterface\s*::\s*conv_forward_gpu_prolog\s*\(\s*float\b")
_EXPECTED = {
    "cpu": "neither conv_forward_cpu(...) nor forward(...) of mshadow::Tensor",
    "cuda": "no GPUInterface::conv_forward_gpu(...), no forward(...) of mshadow::Tensor, and no "
    "line '// ece408: launch ...'",
}


@dataclass(frozen=True)
class KernelFile:
    """A file in the form "course_2019", "course_2020" or "declared", for the device "cpu" or
    "cuda".

    `text` is its content, `key` a checksum of the content.
    """

    path: Path
    device: str
    form: str
    text: str

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def key(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def device_of(kernel: str) -> str | None:
    """Return the device of a file with this name, "cpu" or "cuda", or `None` if it names no
    file."""
    found = (device for device, endings in _SUFFIXES.items() if kernel.endswith(endings))
    return next(found, None)


def find(name: str) -> KernelFile:
    """Return the file. Raises `InvalidSetting` if it is missing or of unknown form."""
    path = Path(name).expanduser().absolute()
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    if not stat.S_ISREG(found.st_mode):
        raise _unreadable(path, "it is no regular file")
    if found.st_size > _MOST_BYTES:
        raise _unreadable(path, f"it has {found.st_size} bytes, more than {_MOST_BYTES}")
    return _read(path, found.st_mtime_ns, found.st_size)


@functools.lru_cache(maxsize=64)
def _read(path: Path, mtime_ns: int, size: int) -> KernelFile:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise _unreadable(path, error.strerror) from None
    device = device_of(path.name)
    if device is None:
        endings = ", ".join(ending for each in _SUFFIXES.values() for ending in each)
        raise InvalidSetting(f"kernel file {path} should end in one of {endings}")
    for form, pattern in _FORMS[device].items():
        if re.search(pattern, text, re.M):
            return KernelFile(path, device, form, text)
    raise InvalidSetting(
        f"kernel file {path} has {_EXPECTED[device]}; docs/manual.md, 'A kernel of your own', has "
        "the forms"
    )


def _unreadable(path: Path, why: str | None) -> InvalidSetting:
    return InvalidSetting(
        f"kernel file {path} cannot be read ({why}); give the path of a C++ or CUDA file"
    )


def why_not(problem: ConvProblem, takes_strides: bool) -> str | None:
    """Return what the course's files compute if the problem is something else; else `None`."""
    if problem.dtype != "float32":
        return f"float32 only, not {problem.dtype}"
    if problem.bias:
        return "no bias"
    if problem.kernel[0] != problem.kernel[1]:
        return "square kernels only"
    if problem.pad != (0, 0) or problem.dilate != (1, 1) or problem.groups != 1:
        return "no padding, dilation or groups"
    if problem.stride != (1, 1) and not (takes_strides and problem.stride[0] == problem.stride[1]):
        return "the same stride both ways only" if takes_strides else "stride 1 only"
    return None


def macros(file: KernelFile) -> list[str]:
    """Return macros of kernels/files for a CUDA file: differences between the terms' headers."""
    found = ["ECE408_STRIDED"] if has_stride(file) else []
    return [*found, "ECE408_PLAIN_OUTPUT"] if _PLAIN_OUTPUT.search(file.text) else found


@functools.lru_cache(maxsize=64)
def has_stride(file: KernelFile) -> bool:
    """Return whether the methods of a CUDA file since 2020 take a stride."""
    return _STRIDED.search(file.text) is not None


def source_of(file: KernelFile) -> Path:
    """Return the source in kernels/files that exports the kernel of a file in a course's form."""
    suffix = {"cpu": ".cpp", "cuda": ".cu"}[file.device]
    return kernels_dir() / "files" / f"{file.form}{suffix}"


def compiled(
    file: KernelFile,
    command: Sequence[str],
    versions: Sequence[str],
    folder: Path,
    missing: Ece408Error,
    build: Callable[[str, Run], bytes] | None = None,
) -> bytes:
    """Return the library that a compiler's command makes of the file, from the cache folder or
    compiled now.

    The command is for g++, clang++ or nvcc, without the kind of output. The cache key is the
    preprocessed text, the command, and `versions`, which identify the compiler. If one command is
    not enough, `build` makes the library from that text by running several.

    Raises `KernelCompileFailed` with file and line, `CacheUnwritable`, and `missing` if the
    compiler does not run.
    """
    run = functools.partial(run_compiler, path=file.path, missing=missing)
    text = run([*command, "-E"])
    key = hashlib.sha256()
    for part in (text, *versions, *command):
        key.update(part.encode() + b"\0")
    kept = folder / f"{file.path.stem}-{key.hexdigest()[:24]}.so"
    make = functools.partial(build, text) if build else functools.partial(_compile, command)
    return kept_or_compiled(kept, file.name, lambda: make(run))


def load(file: KernelFile, content: bytes) -> ctypes.CDLL:
    """Load the compiled library into this process; code of the file runs from now on."""
    # Load a private copy: the cached file may change, or be in a folder that others can write to.
    with tempfile.TemporaryDirectory(prefix="ece408-kernel-") as temporary:
        copy = Path(temporary) / f"{file.path.stem}.so"
        copy.write_bytes(content)
        try:
            library = ctypes.CDLL(str(copy))
        except OSError as error:
            # For example a method that is declared but defined with other arguments.
            reason = str(error).rpartition(": ")[2]
            raise KernelCompileFailed(f"{file.path}: its library does not load: {reason}") from None
    library.ece408_file_message.restype = ctypes.c_char_p
    return library


def message(library: ctypes.CDLL) -> str:
    """Return the message of the exception that the file's code threw in this thread's last call."""
    text: bytes = library.ece408_file_message()
    return text.decode(errors="replace")


def _compile(command: Sequence[str], run: Run) -> bytes:
    with tempfile.TemporaryDirectory(prefix="ece408-kernel-") as folder:
        out = Path(folder) / "kernel.so"
        run([*command, *_SHARED, "-o", str(out)])
        return out.read_bytes()


@contextlib.contextmanager
def guarding(guard: Guard) -> Iterator[None]:
    """Run compilers of files through the guard, in this thread."""
    token = _guard.set(guard)
    try:
        yield
    finally:
        _guard.reset(token)


def guarded(command: Sequence[str], path: Path) -> Sequence[str]:
    """Return the guarded command for compiling the file at `path`."""
    guard = _guard.get()
    return guard(command, path) if guard else command


def run_compiler(command: Sequence[str], path: Path, missing: Ece408Error) -> str:
    """Run the command and return its output. Raises `KernelCompileFailed` with the file's first
    error, `KernelNotSupported` for a missing library, and `missing` if the command does not run."""
    # A guard can limit the size of files, but not of pipes.
    with contextlib.suppress(OSError), _text_file() as out, _text_file() as messages:
        code = subprocess.run(
            guarded(command, path), stdin=subprocess.DEVNULL, stdout=out, stderr=messages
        ).returncode
        if code == 0:
            out.seek(0)
            return out.read()
        messages.seek(0)
        text = first_error(messages.read(_MOST_MESSAGES), path)
        if _NOT_HERE.match(text.partition(": ")[2]):
            raise KernelNotSupported(text)
        raise KernelCompileFailed(f"{text} (exit code {code} of: {shlex.join(command)})")
    raise missing


def reason(error: Exception) -> str:
    """Return the reason why a file does not run, without the compiler's command."""
    return str(error).partition(" (exit code ")[0]


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


def first_error(messages: str, path: Path) -> str:
    """Return a compiler's first error as file:line: text, or its last line."""
    # The formats of g++ and clang++, and of nvcc.
    gnu, nvcc = (
        r"^(.+?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$",
        r"^(.+?)\((\d+)\): (?:catastrophic )?error\b[^:]*: (.*(?:\n +operand types are: .*)?)$",
    )
    found = [match for each in (gnu, nvcc) for match in re.finditer(each, messages, re.M)]
    if found:
        match = min(found, key=re.Match.start)
        return f"{match[1]}:{match[2]}: {' '.join(match[3].split())[:_LONGEST_ERROR]}"
    linker = r"^(?:\S*ld: )?(.+?):(\d+)?.*: (undefined reference to .*)$"
    undefined = re.search(linker, messages, re.M)
    if undefined:
        place = f"{undefined[1]}:{undefined[2]}" if undefined[2] else path
        return f"{place}: {undefined[3][:_LONGEST_ERROR]}"
    # The line that says compilation ended is less informative.
    ends = ("", "compilation terminated.")
    lines = [line.strip() for line in messages.splitlines() if line.strip() not in ends]
    last = lines[-1] if lines else "the compiler fails without a message"
    return f"{path}: {last[:_LONGEST_ERROR]}"
