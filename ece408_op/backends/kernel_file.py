"""Kernels in users' files: which form a file has, and the library that a compiler makes of it.

kernels/files has what the course's forms are compiled with: stand-ins for the headers that they
include, and a source for each form, which exports `ece408_file_forward`.
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

# What the names of files end in, by the device that their kernels are for.
_SUFFIXES = {"cpu": (".cc", ".cpp", ".cxx", ".h", ".hpp"), "cuda": (".cu", ".cuh")}
# Far more than a person writes.
_MOST_BYTES = 4 << 20
_TENSOR = r"\bmshadow\s*::\s*Tensor\b"
# What a file of each form has in its text. A course's form is also the name of its source.
_FORMS = {
    "cpu": {"course_2019": _TENSOR, "course_2020": r"\bconv_forward_cpu\s*\("},
    "cuda": {
        "course_2019": _TENSOR,
        "course_2020": r"\bGPUInterface\s*::\s*conv_forward_gpu\s*\(",
        "declared": r"^[ \t]*//[ \t]*ece408:",
    },
}
# Makes a library. A compiler may link its C++ library statically; what another one of the process
# shares with it, such as the numbers of a locale's parts, would then be of the wrong one.
# What is declared and defined nowhere is an error of the linker, which names it.
COMPLETE = ("-Xlinker", "--no-undefined")
_SHARED = ("-shared", "-Xlinker", "--exclude-libs=ALL", *COMPLETE)
# Libraries of CUDA's toolkit that files may use, and a compiler's words where one, or what the
# headers of kernels/files/mxnet lack of MXNet, is not there.
_CUDA = r"(?:cu(?:blas|dnn|fft|rand|solver|sparse|tlass|b\b|da/|da\.h)|nvrtc|npp|thrust)"
_ABSENT = (
    "No such|file not found|no match for .oper|no operator|no member|not a member|does not name"
)
_NOT_HERE = re.compile(
    rf"(?=.*(?:{_ABSENT})).*\b(?:mxnet(?!::op)|mshadow|dmlc|{_CUDA})|"
    rf"undefined reference to .{_CUDA}"
)
# Runs a compiler's command, and returns what it prints.
Run = Callable[[Sequence[str]], str]
# What a compiler's command becomes, where it and the file are not to be trusted with all there is.
Guard = Callable[[Sequence[str], Path], Sequence[str]]
_guard: ContextVar[Guard | None] = ContextVar("guard", default=None)
_LONGEST_ERROR, _MOST_MESSAGES = 300, 1 << 20
# The parameters of a method that has a stride: ten, where others have nine.
_STRIDED = re.compile(r"GPUInterface\s*::\s*conv_forward_gpu\s*\(([^,)]*,){9}[^,)]*\)")
_PLAIN_OUTPUT = re.compile(r"GPUInterface\s*::\s*conv_forward_gpu_prolog\s*\(\s*float\b")
_EXPECTED = {
    "cpu": "neither conv_forward_cpu(...) nor forward(...) of mshadow::Tensor",
    "cuda": "no GPUInterface::conv_forward_gpu(...), no forward(...) of mshadow::Tensor, and no "
    "line '// ece408: launch ...'",
}


@dataclass(frozen=True)
class KernelFile:
    """A file of a form, "course_2019", "course_2020" or "declared", for a device, "cpu" or "cuda".

    `text` is its content, `key` a checksum of it.
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
    """The device, "cpu" or "cuda", for which a file of this name is; `None` if it names no file."""
    found = (device for device, endings in _SUFFIXES.items() if kernel.endswith(endings))
    return next(found, None)


def find(name: str) -> KernelFile:
    """The file. Raises `InvalidSetting` unless it is there and of a form that is known."""
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
    """What files of the course compute, where the problem is something else; else `None`."""
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
    """Of the sources in kernels/files, for a CUDA file: where terms' headers differ."""
    found = ["ECE408_STRIDED"] if has_stride(file) else []
    return [*found, "ECE408_PLAIN_OUTPUT"] if _PLAIN_OUTPUT.search(file.text) else found


@functools.lru_cache(maxsize=64)
def has_stride(file: KernelFile) -> bool:
    """Whether the methods of a CUDA file from 2020 on have a stride."""
    return _STRIDED.search(file.text) is not None


def source_of(file: KernelFile) -> Path:
    """The source in kernels/files that exports the kernel of a file in a course's form."""
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
    """The library that a compiler's command makes of the file, kept in a folder, or made now.

    The command is for g++, clang++ or nvcc, without what it is to make. The library is kept by
    the preprocessed text, the command, and `versions`, which say what compiles. `build` makes it of
    that text, by commands that it runs, where one command is not enough.

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
    """The compiled library, in this process: code of the file runs from here on."""
    # A copy of its own: what is kept may change, or be in a folder that others can write.
    with tempfile.TemporaryDirectory(prefix="ece408-kernel-") as temporary:
        copy = Path(temporary) / f"{file.path.stem}.so"
        copy.write_bytes(content)
        try:
            library = ctypes.CDLL(str(copy))
        except OSError as error:
            # Such as a method that is declared, and defined with other arguments.
            reason = str(error).rpartition(": ")[2]
            raise KernelCompileFailed(f"{file.path}: its library does not load: {reason}") from None
    library.ece408_file_message.restype = ctypes.c_char_p
    return library


def message(library: ctypes.CDLL) -> str:
    """What the file's code threw in this thread's last call."""
    text: bytes = library.ece408_file_message()
    return text.decode(errors="replace")


def _compile(command: Sequence[str], run: Run) -> bytes:
    with tempfile.TemporaryDirectory(prefix="ece408-kernel-") as folder:
        out = Path(folder) / "kernel.so"
        run([*command, *_SHARED, "-o", str(out)])
        return out.read_bytes()


@contextlib.contextmanager
def guarding(guard: Guard) -> Iterator[None]:
    """Have compilers of files be run as the guard says, in this thread."""
    token = _guard.set(guard)
    try:
        yield
    finally:
        _guard.reset(token)


def guarded(command: Sequence[str], path: Path) -> Sequence[str]:
    """The command that runs a compiler's command on the file at a path."""
    guard = _guard.get()
    return guard(command, path) if guard else command


def run_compiler(command: Sequence[str], path: Path, missing: Ece408Error) -> str:
    """What the command prints. Raises `KernelCompileFailed` with what it says of the file,
    `KernelNotSupported` where a library is not there, and `missing` if the command does not run."""
    # Files have a limit where a guard sets one; a pipe has none.
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
    """What is said of a file that does not run. The compiler's command helps nobody there."""
    return str(error).partition(" (exit code ")[0]


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


def first_error(messages: str, path: Path) -> str:
    """A compiler's first error as file:line: text, or the last thing that it said of the file."""
    # As g++ and clang++ say it, and as nvcc does.
    gnu, nvcc = (
        r"^(.+?):(\d+):(?:\d+:)? (?:fatal )?error: (.*)$",
        r"^(.+?)\((\d+)\): error\b[^:]*: (.*(?:\n +operand types are: .*)?)$",
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
    # That it ends says less than why.
    ends = ("", "compilation terminated.")
    lines = [line.strip() for line in messages.splitlines() if line.strip() not in ends]
    last = lines[-1] if lines else "the compiler fails without a message"
    return f"{path}: {last[:_LONGEST_ERROR]}"
