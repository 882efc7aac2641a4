"""Compilation of kernels/cuda sources for GPUs, with a disk cache, also on machines without a GPU.

PyCUDA's own cache runs the preprocessor before every lookup if a source includes a header, and its
compiler needs the driver; PyCUDA only loads the results. NVRTC compiles this package's sources if
it is there, and nvcc those of others, which may contain host code and include its headers.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from ....files.resources import cuda_folders, kernels_dir
from ....files.sealed import kept_or_compiled
from ....host.gpu import find_nvrtc
from ..kernel_plan import Defines
from . import nvcc_compiler, nvrtc_compiler

_version_lock = threading.Lock()
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.M)


def compile_plan(source: str, defines: Defines, architecture: str, cache_folder: Path) -> bytes:
    """Return machine code (a cubin) of kernels/cuda/`source` for an architecture such as "90"; a
    source given by an absolute path may also include the headers beside it.

    Each combination of source text, headers, macros, options, architecture and compiler is compiled
    once, also across threads and processes, and cached in `cache_folder`. A damaged or untrusted
    cache file is compiled again, with a line on stderr.

    Raises `NoUsableGpu` without a compiler, `KernelCompileFailed` with file, line and options when
    the source does not compile, `KernelsMissing`, and `CacheUnwritable`.
    """
    path = kernels_dir() / "cuda" / source
    version, options, compile_source = _compiler(source, defines, architecture)
    key = hashlib.sha256()
    for part in (version, *options, *_texts(path)):
        key.update(part.encode() + b"\0")
    kept = cache_folder / f"{path.stem}-sm_{architecture}-{key.hexdigest()[:24]}.cubin"
    return kept_or_compiled(kept, source, lambda: compile_source(path, options))


def require(kernel_file: str | None = None) -> None:
    """Raise `NoUsableGpu` without a compiler for a file, or for this package's kernels."""
    if kernel_file is not None or find_nvrtc() is None:
        nvcc_compiler.require_nvcc()


def _compiler(
    source: str, defines: Defines, architecture: str
) -> tuple[str, Sequence[str], Callable[[Path, Sequence[str]], bytes]]:
    """Return a compiler's version, its options, and the function that compiles a file with them."""
    is_users, nvrtc = Path(source).is_absolute(), find_nvrtc()
    if nvrtc is not None and not is_users:
        # The size tells builds of a version apart.
        return (
            f"{nvrtc_compiler.version(nvrtc.library)}, {nvrtc.library.stat().st_size} bytes",
            nvrtc_compiler.options(defines, architecture),
            functools.partial(nvrtc_compiler.compile_source, nvrtc),
        )
    nvcc = nvcc_compiler.require_nvcc()
    options = nvcc_compiler.options(defines, architecture)
    # Concurrent threads must not all run nvcc --version.
    with _version_lock:
        version = nvcc_compiler.nvcc_version(nvcc)
    return (
        version,
        (*options, nvcc_compiler.LINES) if is_users else options,
        functools.partial(nvcc_compiler.compile_source, nvcc),
    )


def _texts(source: Path) -> list[str]:
    """Return the texts of a source and of all headers that it includes from its folder or ours."""
    paths, texts, folders = [source], [], cuda_folders()
    for path in paths:
        status = path.stat()
        text, includes = _text(path, status.st_mtime_ns, status.st_size)
        texts.append(text)
        for name in includes:
            # The compiler reports missing ones.
            places = (place / name for place in (path.parent, *folders))
            found = [place for place in places if place.is_file()]
            paths += [header for header in found[:1] if header not in paths]
    return texts


# Networks compile the same few sources with many macros.
@functools.lru_cache(maxsize=256)
def _text(path: Path, written: int, size: int) -> tuple[str, list[str]]:
    """Return a file's text and its includes; `written` and `size` identify its version."""
    text = path.read_text(encoding="utf-8")
    return text, _INCLUDE.findall(text)
