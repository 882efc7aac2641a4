"""Reader of ELF libraries and objects (elf.h)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

# Offsets of the section headers' position, and of their size and number; fields of a header.
_SECTIONS, _COUNTS = struct.Struct("<Q"), struct.Struct("<HH")
_SECTION, _SYMBOL = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ")
_SYMBOLS, _OBJECT, _WRITTEN = 2, 1, 1


def sections(content: bytes) -> list[tuple[int, int]]:
    """Return the bytes and alignment of each section."""
    return [(each[5], each[8]) for each in _headers(content)]


def variables(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield the address and bytes of each variable that is not constant: symbols (`Elf64_Sym`) of
    type object in writable sections."""
    headers = _headers(content)
    for _, kind, _, _, begin, nbytes, *_ in headers:
        if kind != _SYMBOLS:
            continue
        for _, info, _, section, address, taken in _SYMBOL.iter_unpack(
            content[begin : begin + nbytes]
        ):
            if info & 15 == _OBJECT and section < len(headers) and headers[section][2] & _WRITTEN:
                yield address, taken


def _headers(content: bytes) -> list[tuple[int, ...]]:
    (at,) = _SECTIONS.unpack_from(content, 0x28)
    size, count = _COUNTS.unpack_from(content, 0x3A)
    return [_SECTION.unpack_from(content, at + i * size) for i in range(count)]
