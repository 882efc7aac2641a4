"""Small fake files of Fashion-MNIST."""

import gzip
import struct
from pathlib import Path

import numpy as np

from ece408_op.course.dataset import idx

FAKE_COUNTS = {"t10k": 12, "train": 20}


def fake_arrays(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of a fake set: always the same, sparse like clothes on black."""
    rng = np.random.default_rng(len(kind))
    shape = (FAKE_COUNTS[kind], idx.IMAGE_SIZE, idx.IMAGE_SIZE)
    images = rng.integers(0, 256, shape, np.uint8) * rng.integers(0, 2, shape, np.uint8)
    return images, np.arange(shape[0], dtype=np.uint8) % 10


def encode(array: np.ndarray, order: str = ">", compressed: bool = True) -> bytes:
    """Return an idx file with the array; `order` is the header's byte order, as in `struct`."""
    magic = 0x0800 | array.ndim
    header = struct.pack(f"{order}{1 + array.ndim}I", magic, *array.shape)
    content = header + array.tobytes()
    return gzip.compress(content) if compressed else content


def write_files(folder: Path, kind: str, order: str = ">", compressed: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for expected, array in zip(idx.files(kind), fake_arrays(kind)):
        name = f"{expected.name}.gz" if compressed else expected.name
        (folder / name).write_bytes(encode(array, order, compressed))
