"""Reader of the GPU architectures in a shared library.

nvcc puts GPU code into sections of the ELF file as a sequence of containers. A container is a
header (magic number, version, header size, body size) and entries; an entry is a header, with kind
and architecture, and a payload. Headers are never compressed.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Union

_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_CONTAINER = struct.pack("<I", 0xBA55ED50)
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_LONGEST_NAME = 1 + max(map(len, _SECTIONS))
_KINDS = {1: "compute", 2: "sm"}
# Flags of an entry: code for exactly one architecture, or for one family (nvcc 13.0).
_EXACT = 0x100000
_FAMILY = 0x200000

_Image = Union[bytes, mmap.mmap]


def architectures(path: Path | str) -> list[str]:
    """Return the architectures in the ELF file at `path`, by nvcc's names, in ascending order.

    `sm_86` is machine code, `compute_86` is PTX, which the driver compiles for newer GPUs. The list
    is empty for a library without GPU code.

    Raises `OSError` when the file cannot be read, and `ValueError` when it is not a 64-bit
    little-endian ELF file or is damaged.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        if image[: len(_ELF64_LITTLE_ENDIAN)] != _ELF64_LITTLE_ENDIAN:
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        try:
            found = set(_entries(image))
        except struct.error as error:
            raise ValueError(f"{path} is a damaged ELF file ({error})") from error
    return [f"{kind}_{number}{suffix}" for kind, number, suffix in sorted(found, key=_order)]


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for `architecture`, such as "sm_80", runs on a GPU of this capability.

    Machine code runs on the same major version from its own minor version up, PTX on everything
    newer; a suffix "a" means that GPU alone, "f" the same major version.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if match is None:
        raise ValueError(f"{architecture!r} is not an architecture such as sm_80")
    kind, suffix = match[1], match[4]
    built_for = (int(match[2]), int(match[3]))
    if suffix == "a":
        return capability == built_for
    same_major = capability[0] == built_for[0]
    return capability >= built_for and (same_major or (kind == "compute" and not suffix))


def _order(entry: tuple[str, int, str]) -> tuple[bool, int, str]:
    kind, number, suffix = entry
    return kind != "sm", number, suffix


def _entries(image: _Image) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, number, suffix), such as ("sm", 90, "a"), of every entry in the file."""
    for start, end in _fatbin_sections(image):
        at = image.find(_CONTAINER, start, end)
        while at >= 0:
            header_size, body_size = struct.unpack_from("<HQ", image, at + 6)
            body = at + header_size
            yield from _entries_of(image, body, body + body_size)
            # A damaged header may have sizes of 0.
            at = image.find(_CONTAINER, max(body + body_size, at + 1), end)


def _entries_of(image: _Image, at: int, end: int) -> Iterator[tuple[str, int, str]]:
    while at < end:
        kind, _, header_size, size = struct.unpack_from("<HHIQ", image, at)
        if not header_size:
            return
        number, flags = struct.unpack_from("<I8xI", image, at + 28)
        if kind in _KINDS:
            suffix = "a" if flags & _EXACT else "f" if flags & _FAMILY else ""
            yield _KINDS[kind], number, suffix
        at += header_size + size


def _fatbin_sections(image: _Image) -> Iterator[tuple[int, int]]:
    """Yield start and end, in the file, of every section with GPU code."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)

    def section(index: int) -> tuple[int, int, int]:
        name, offset, size = struct.unpack_from("<I20xQQ", image, table + index * entry_size)
        return name, offset, size

    names = section(names_index)[1] if count else 0
    for index in range(count):
        name, offset, size = section(index)
        start = names + name
        if image[start : start + _LONGEST_NAME].split(b"\0")[0] in _SECTIONS:
            yield offset, offset + size
