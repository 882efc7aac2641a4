"""Sandbox for compilers of untrusted files: an include must not read other users' files.

    python -m ece408_op.lab.compile_sandbox SCRATCH SOURCE [FOLDER...] -- COMMAND...

runs a compiler's command on the kernel file SOURCE. It can read SOURCE and the headers beside it,
and write to SCRATCH and the folders.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ..backends import kernel_file
from ..backends.kernel_file import Guard
from ..errors import InvalidSetting
from ..files.resources import kernels_dir
from ..host import this_python
from . import sandbox

# Limits of each compiler process. The largest kernel files need a tenth of them.
_LIMITS = sandbox.Limits(memory=4 << 30, seconds=150, file_bytes=256 << 20, open_files=256)
_SYSTEM = (*sandbox.SYSTEM, "/bin", "/opt", "/etc/alternatives", "/etc/ld.so.conf.d")
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "NVCC_CCBIN", "NVCC_APPEND_FLAGS")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"\n]+)"', re.M)
_HEADERS = (".h", ".hh", ".hpp", ".hxx", ".cuh", ".inc", ".inl", ".tcc")


def guard(scratch: Path) -> Guard:
    """Return a guard that runs compilers in a sandbox, with temporary files in `scratch`."""

    def guarded(command: Sequence[str], source: Path) -> Sequence[str]:
        folders = [str(Path(o).parent) for flag, o in zip(command, command[1:]) if flag == "-o"]
        own = [*this_python.running(__name__), str(scratch), str(source), *folders]
        return [*own, "--", *command]

    return guarded


def main(arguments: list[str]) -> None:
    sandbox.end_with_parent()
    end = arguments.index("--")
    scratch, source, *folders = map(Path, arguments[:end])
    command = arguments[end + 1 :]
    program = Path(command[0]).resolve()
    system = [*map(Path, _SYSTEM), program.parent.parent, kernels_dir()]
    rules = [(each, sandbox.EVERYTHING) for each in (scratch, *folders)]
    rules += sandbox.readable(system, sandbox.READ_AND_RUN)
    rules += sandbox.readable([source, *headers(source)])
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    sandbox.confine(rules, _LIMITS, programs=True)
    os.execve(command[0], command, {**variables, "HOME": str(scratch), "TMPDIR": str(scratch)})


def headers(source: Path) -> set[Path]:
    """Return files beside a source or below that it includes by name, directly or indirectly,
    without other kernel files."""
    folder = source.parent.resolve()
    found: set[Path] = set()
    left = [source.resolve()]
    while left:
        each = left.pop()
        text = each.read_text(encoding="utf-8", errors="replace")
        for name in _INCLUDE.findall(text):
            path = (each.parent / name).resolve()
            if path not in found and folder in path.parents and _is_header(path):
                found.add(path)
                left.append(path)
    return found


def _is_header(path: Path) -> bool:
    if path.suffix not in _HEADERS or not path.is_file():
        return False
    if kernel_file.device_of(path.name) is None:
        return True
    try:
        kernel_file.find(str(path))
    except InvalidSetting:
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
