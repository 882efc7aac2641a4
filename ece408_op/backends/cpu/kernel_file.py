"""A CPU kernel in a user's C++ file: compiled, kept, loaded.

Two forms of the course, unchanged: new-forward.h, to 2019, defines mxnet::op::forward of three
tensors; cpu-new-forward.cc, from 2020 on, conv_forward_cpu of three pointers. kernels/files has
what stands in for the headers that they include.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ... import settings
from ...errors import InvalidSetting, KernelCompileFailed, KernelsMissing
from ...files.resources import kernels_dir
from ...files.sealed import kept_or_compiled

SUFFIXES = (".cc", ".cpp", ".cxx", ".h", ".hpp")
# What a file of each form has in its text; the form's source in kernels/files.
_FORMS = {
    "course_2019": r"\bmshadow\s*::\s*Tensor\b",
    "course_2020": r"\bconv_forward_cpu\s*\(",
}
# For the processor at hand: what is kept of one machine is compiled again on another.
_OPTIONS = ("-std=gnu++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-w")


@dataclass(frozen=True)
class KernelFile:
    """A compiled file: its `forward`, as the header kernels/files/entry.h has it."""

    path: Path
    library: ctypes.CDLL

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def address(self) -> int:
        """Where its forward function is."""
        found = ctypes.cast(self.library.ece408_file_forward, ctypes.c_void_p)
        return found.value or 0

    @property
    def takes_strides(self) -> bool:
        return bool(self.library.ece408_file_takes_strides())

    def message(self) -> str:
        """What its code threw in this thread's last call."""
        text: bytes = self.library.ece408_file_message()
        return text.decode(errors="replace")


def is_file_name(kernel: str) -> bool:
    """Whether a kernel's name means a C++ file for the CPU."""
    return kernel.endswith(SUFFIXES)


def find(name: str) -> Path:
    """The file. Raises `InvalidSetting` unless it is there and of a form that is known."""
    path = Path(name).expanduser().absolute()
    _form(path, *_stamp(path))
    return path


def load(path: Path) -> KernelFile:
    """The file's kernel, compiled once for each text of the file and of its headers.

    Raises `InvalidSetting`, `KernelCompileFailed` with file and line, `KernelsMissing` without a
    C++ compiler, and `CacheUnwritable`.
    """
    return _load(path, *_stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    """What changes with the file: when it was written, and its size."""
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from None
    return found.st_mtime_ns, found.st_size


def _unreadable(path: Path, error: OSError) -> InvalidSetting:
    return InvalidSetting(
        f"kernel file {path} cannot be read ({error.strerror}); give the path of a C++ file"
    )


@functools.lru_cache(maxsize=64)
def _form(path: Path, mtime_ns: int, size: int) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise _unreadable(path, error) from None
    for form, pattern in _FORMS.items():
        if re.search(pattern, text):
            return form
    raise InvalidSetting(
        f"kernel file {path} has neither conv_forward_cpu(...) nor forward(...) of "
        "mshadow::Tensor; docs/manual.md, 'A kernel of your own', has both forms"
    )


@functools.lru_cache(maxsize=64)
def _load(path: Path, mtime_ns: int, size: int) -> KernelFile:
    compiler = _compiler()
    command = _command(compiler, path, _form(path, mtime_ns, size))
    key = _key(compiler, command, path)
    kept = settings.cache() / "cpu-kernels" / f"{path.stem}-{key}.so"
    content = kept_or_compiled(kept, path.name, lambda: _compile(command, path))
    # A copy of its own: what is kept may change, or be in a folder that others can write.
    with tempfile.TemporaryDirectory(prefix="ece408-kernel-") as folder:
        copy = Path(folder) / kept.name
        copy.write_bytes(content)
        library = ctypes.CDLL(str(copy))
    library.ece408_file_message.restype = ctypes.c_char_p
    return KernelFile(path, library)


def _compiler() -> str:
    """The C++ compiler: CXX, or what there is. Raises `KernelsMissing`."""
    asked = shlex.split(os.environ.get("CXX", ""))[:1]
    for name in asked or ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    raise KernelsMissing(
        f"no C++ compiler ({' '.join(asked) or 'g++, clang++, c++'}) to compile a kernel file "
        "with; install g++ (Debian, Ubuntu: apt install g++) or set CXX"
    )


def _command(compiler: str, path: Path, form: str) -> list[str]:
    folder = kernels_dir() / "files"
    sources = [str(folder / f"{form}.cpp")]
    if form == "course_2019":
        own = [f'-DECE408_FILE="{path}"']
    else:
        own = []
        sources.append(str(path))
    return [compiler, *_OPTIONS, *own, f"-I{folder}", "-x", "c++", *sources]


def _key(compiler: str, command: list[str], path: Path) -> str:
    """Of everything that the compiler reads: its preprocessed text, options and version."""
    text = _run([*command, "-E"], path)
    version = _run([compiler, "--version"], path)
    # -march=native is another thing on another processor.
    target = _run([compiler, "-march=native", "-Q", "--help=target"], path, check=False)
    key = hashlib.sha256()
    for part in (text, version, target, *command):
        key.update(part.encode() + b"\0")
    return key.hexdigest()[:24]


def _compile(command: list[str], path: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="ece408-kernel-") as folder:
        out = Path(folder) / "kernel.so"
        _run([*command, "-shared", "-o", str(out)], path)
        return out.read_bytes()


def _run(command: list[str], path: Path, check: bool = True) -> str:
    with contextlib.suppress(OSError):
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
        if result.returncode == 0 or not check:
            return result.stdout
        raise KernelCompileFailed(
            f"{_first_error(result.stderr, path)} (exit code {result.returncode} of: "
            f"{shlex.join(command)})"
        )
    raise KernelsMissing(f"the C++ compiler {command[0]} does not run; set CXX")


def _first_error(messages: str, path: Path) -> str:
    """The compiler's first error as file:line: text, or the last thing that it said."""
    match = re.search(r"^(.+?:\d+):(?:\d+:)? (?:fatal )?error: (.*)$", messages, re.M)
    if match:
        return f"{match[1]}: {match[2].strip()}"
    lines = [line for line in messages.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"{path}: the compiler fails without a message"
