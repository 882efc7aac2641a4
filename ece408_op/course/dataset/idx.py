"""Reader and verification of Fashion-MNIST's four files in the idx format.

An idx file is a header of 4-byte integers (a magic number, then the length of each dimension) and
the payload, one unsigned byte per element. Standard files have big-endian headers, the course's had
little-endian ones; both are read, gzip-compressed or not, with any file name.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import DataCorrupt, DataMissing, InvalidSetting

IMAGE_SIZE = 28
KINDS = ("t10k", "train")

_GZIP_MAGIC = b"\x1f\x8b"
# The third byte means unsigned byte elements, the fourth is the number of dimensions.
_MAGIC_OF_BYTES = 0x0800


@dataclass(frozen=True)
class Expected:
    """One file: its name without `.gz`, the shape of its array, its payload's sha256 in hex."""

    name: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def magic(self) -> int:
        return _MAGIC_OF_BYTES | len(self.shape)

    @property
    def payload_bytes(self) -> int:
        return math.prod(self.shape)

    @property
    def header_bytes(self) -> int:
        return 4 * (1 + len(self.shape))

    @property
    def most_bytes(self) -> int:
        """Upper bound of the file's size, compressed or not: gzip adds little to incompressible
        data."""
        content = self.header_bytes + self.payload_bytes
        return content + content // 100 + 1024


# The checksum covers the payload alone: compression and byte order of the header do not change it.
FILES = {
    "t10k": (
        Expected(
            "t10k-images-idx3-ubyte",
            (10000, IMAGE_SIZE, IMAGE_SIZE),
            "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        ),
        Expected(
            "t10k-labels-idx1-ubyte",
            (10000,),
            "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
        ),
    ),
    "train": (
        Expected(
            "train-images-idx3-ubyte",
            (60000, IMAGE_SIZE, IMAGE_SIZE),
            "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        ),
        Expected(
            "train-labels-idx1-ubyte",
            (60000,),
            "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        ),
    ),
}


class Damage(Exception):
    """Description of wrong content, without its path and without advice."""


def files(kind: str) -> tuple[Expected, Expected]:
    """Return the files of images and labels of `kind`. Raises `InvalidSetting` for an unknown
    one."""
    if kind not in FILES:
        raise InvalidSetting(
            f"unknown part of Fashion-MNIST {kind!r}; there are: {', '.join(KINDS)}"
        )
    return FILES[kind]


def find(folder: Path, expected: Expected) -> Path | None:
    """Return the file in `folder`, compressed or plain, or `None`.

    The compressed one comes first: a download puts it next to a damaged plain one.
    """
    candidates = (folder / f"{expected.name}.gz", folder / expected.name)
    # os.path.isfile, unlike pathlib's, treats an inaccessible folder as a missing file.
    return next((path for path in candidates if os.path.isfile(path)), None)


def read(path: Path, expected: Expected) -> np.ndarray:
    """Return the array in the file: uint8, of shape `expected.shape`, read-only.

    Raises `DataCorrupt` when the file does not contain exactly that, and `DataMissing` when it
    cannot be read at all.
    """
    try:
        return parse(path, expected)
    except Damage as damage:
        raise DataCorrupt(
            f"{path} {damage}; delete it and get a new copy with `ece408 data fetch`, "
            "or point --data (ECE408_DATA) elsewhere"
        ) from damage
    except OSError as error:
        raise DataMissing(
            f"{path} cannot be read: {error.strerror or error}; make it readable, "
            "or point --data (ECE408_DATA) elsewhere"
        ) from error


def parse(path: Path, expected: Expected) -> np.ndarray:
    """As `read`, but raises `Damage` for wrong content and `OSError` for an unreadable file."""
    content = _content(path, expected.header_bytes + expected.payload_bytes)
    _check_header(content, expected)
    payload = memoryview(content)[expected.header_bytes :]
    _check_length(len(payload), expected)
    _check_sum(payload, expected)
    return np.frombuffer(payload, np.uint8).reshape(expected.shape)


def _content(path: Path, wanted: int) -> bytes:
    """Return the file's bytes, decompressed; if there are too many, one more than `wanted`."""
    with path.open("rb") as plain:
        compressed = plain.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        plain.seek(0)
        if not compressed:
            return plain.read(wanted + 1)
        try:
            with gzip.open(plain) as stream:
                return stream.read(wanted + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            size = os.fstat(plain.fileno()).st_size
            raise Damage(f"({size} bytes) is damaged gzip data: {error}") from error


def _check_header(content: bytes, expected: Expected) -> None:
    if len(content) < expected.header_bytes:
        raise Damage(
            f"is truncated: its content has {len(content)} bytes, "
            f"the header alone has {expected.header_bytes}"
        )
    order = ">" if struct.unpack_from(">I", content)[0] == expected.magic else "<"
    magic, *shape = struct.unpack_from(f"{order}{1 + len(expected.shape)}I", content)
    if magic != expected.magic:
        raise Damage(
            f"is not an idx file of {len(expected.shape)}-dimensional bytes: it begins with "
            f"{content[:4].hex(' ')}, not with {struct.pack('>I', expected.magic).hex(' ')}"
        )
    if tuple(shape) != expected.shape:
        raise Damage(f"has the shape {_times(shape)}, Fashion-MNIST's is {_times(expected.shape)}")


def _check_length(length: int, expected: Expected) -> None:
    if length < expected.payload_bytes:
        raise Damage(
            f"is truncated: {length} bytes follow its header, not {expected.payload_bytes}"
        )
    if length > expected.payload_bytes:
        raise Damage(f"is too long: more than {expected.payload_bytes} bytes follow its header")


def _check_sum(payload: memoryview, expected: Expected) -> None:
    found = hashlib.sha256(payload).hexdigest()
    if found != expected.sha256:
        raise Damage(
            f"is not Fashion-MNIST's: the sha256 of its data begins with {found[:16]}, "
            f"not with {expected.sha256[:16]}"
        )


def _times(shape: tuple[int, ...] | list[int]) -> str:
    return "x".join(map(str, shape))
