"""Resizing of Fashion-MNIST's images by the course's recipe, with a disk cache."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Callable

import numpy as np

from ... import settings
from ...errors import CacheUntrusted, DataCorrupt
from ...files.cachedir import atomic_path
from ...files.sealed import Damage, check_trust
from . import idx

# Part of the cached files' names: change it with the recipe or the file format.
VERSION = 2

# The sha256 of all images in the course's sizes, by that of the original images.
_KNOWN = {
    idx.FILES["t10k"][0].sha256: {
        48: "90e1d81af661e453b6e8e6118aa9731052d389dbd5496dd72e734a17f69338a3",
        64: "4f74220d71aa835c1b355d6e31ff4b5ff63d1ec1029ba7a60b40f2d41ed35a0f",
        70: "cf38a3be76e140478f409a710859c68db0794a6724cffd07c9842041af4fd337",
    },
    idx.FILES["train"][0].sha256: {
        48: "94271d572f38ef3f18bc852abcba3be49354165bdacba8283714b7bfff9887e9",
        64: "1a3eac2d001649d1e33ed3885aa246c1700792db1a4ff6a6d1c43313c0ea2b5c",
        70: "0bfaaaab3fdfca1aa9227d251ef5d8e985ac715b560671f0b7c86515119dc992",
    },
}


def resize_image(image: np.ndarray, size: int) -> np.ndarray:
    """Resize one uint8 image (H, W), no larger than `size`, to uint8 (size, size).

    Bit-identical to the course's preparation: scikit-image's `transform.resize(image / 256.0,
    (size, size), mode="constant", cval=0) * 256`, truncated. This is bilinear, with 0 outside the
    image, clipped to the image's own range.
    """
    from scipy import ndimage

    pixels = image / 256.0
    # Divide twice, as scikit-image does, for the same rounding.
    factors = [1 / (length / size) for length in image.shape]
    larger = ndimage.zoom(pixels, factors, order=1, mode="grid-constant", cval=0, grid_mode=True)
    np.clip(larger, pixels.min(), pixels.max(), out=larger)
    return (larger * 256).astype(np.uint8)


def cached_path(kind: str, size: int) -> Path:
    """Return the path of the resized images of `kind`, which may not exist yet."""
    return _folder() / f"{kind}-{size}-v{VERSION}.npy"


def _folder() -> Path:
    return settings.cache() / "resized"


def resized(kind: str, size: int, original: Callable[[], np.ndarray]) -> np.ndarray:
    """Return all images of `kind`, uint8 (N, size, size), read-only, mapped from the cache.

    `original` returns the uint8 images (N, 28, 28); it is called only when the cache has no sound
    file. Then the file is created, with progress on stderr if that is a terminal.

    Raises `CacheUnwritable`, `DataCorrupt` when this machine's SciPy computes other pixels than the
    course's, and what `original` raises.
    """
    path = cached_path(kind, size)
    if os.path.exists(path):
        try:
            return _open(path, kind, size)
        except (Damage, CacheUntrusted) as reason:
            print(f"ece408: making the images of {size}x{size} again: {reason}", file=sys.stderr)
    _make(path, original(), kind, size)
    return np.load(path, mmap_mode="r")


def verify(kind: str) -> list[Path]:
    """Verify all resized images of `kind` in the cache; return their paths.

    Raises `DataCorrupt`, and `CacheUntrusted`.
    """
    checked = []
    for path in sorted(_folder().glob(f"{kind}-*-v{VERSION}.npy")):
        size = path.name.split("-")[1]
        try:
            _open(path, kind, int(size))
        except (Damage, ValueError) as damage:
            raise DataCorrupt(
                f"{path} is damaged; remove it, and it is made again when it is needed"
            ) from damage
        checked.append(path)
    return checked


def _open(path: Path, kind: str, size: int) -> np.ndarray:
    """Return the cached array. Raises `Damage` for wrong content, and `CacheUntrusted` when only
    the file itself states its checksum and others can have written it."""
    shape = (idx.files(kind)[0].shape[0], size, size)
    known = _known(kind, size)
    if known is None:
        check_trust(path)
    try:
        images = np.load(path, mmap_mode="r")
        seal = _after(path, images.offset + images.nbytes)
    except Exception as error:  # A damaged header fails in NumPy's parser in many ways.
        raise Damage(f"{path} is damaged") from error
    right = images.dtype == np.uint8 and images.shape == shape and images.flags.c_contiguous
    if not right or hashlib.sha256(images).digest() != seal or known not in (None, seal):
        raise Damage(f"{path} is damaged")
    return images


def _known(kind: str, size: int) -> bytes | None:
    """Return the checksum of the course's images of this size, if known."""
    text = _KNOWN.get(idx.files(kind)[0].sha256, {}).get(size)
    return None if text is None else bytes.fromhex(text)


def _after(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(hashlib.sha256().digest_size + 1)


def _make(path: Path, images: np.ndarray, kind: str, size: int) -> None:
    """Write the array, followed by the checksum of its pixels."""
    from tqdm import tqdm  # which imports much

    header = {"descr": "|u1", "fortran_order": False, "shape": (len(images), size, size)}
    label = f"resizing to {size}x{size}"
    seal = hashlib.sha256()
    # Written, not mapped: a full disk is then an error, whereas a mapping kills the process.
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for image in tqdm(images, label, unit="image", leave=False, disable=None):
            pixels = resize_image(image, size).tobytes()
            seal.update(pixels)
            file.write(pixels)
        file.write(seal.digest())
        if _known(kind, size) not in (None, seal.digest()):
            raise DataCorrupt(
                f"the images of {size}x{size} made here are not the course's: SciPy resizes "
                "otherwise than it should; install another version of it"
            )
