"""Fashion-MNIST's images made larger by the course's recipe, once, and kept in the cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Callable

import numpy as np
from tqdm import tqdm

from .. import settings
from ..cachedir import atomic_path
from . import idx

# Part of the cached files' names: a change of the recipe must change it.
RECIPE = 1


def resize_image(image: np.ndarray, size: int) -> np.ndarray:
    """One uint8 image (H, W), no larger than `size`, as uint8 (size, size).

    Bit for bit what the course's preparation gave: scikit-image's `transform.resize(image /
    256.0, (size, size), mode="constant", cval=0) * 256`, truncated. This is bilinear, with 0
    outside the image, clipped to the image's own range.
    """
    from scipy import ndimage

    pixels = image / 256.0
    # Sizes go into the factors by way of their quotient, as in scikit-image, to round alike.
    factors = [1 / (length / size) for length in image.shape]
    larger = ndimage.zoom(pixels, factors, order=1, mode="grid-constant", cval=0, grid_mode=True)
    np.clip(larger, pixels.min(), pixels.max(), out=larger)
    return (larger * 256).astype(np.uint8)


def cached_path(kind: str, size: int) -> Path:
    """Where the resized images of `kind` are kept; not necessarily there yet."""
    return settings.cache() / "resized" / f"{kind}-{size}-v{RECIPE}.npy"


def resized(kind: str, size: int, original: Callable[[], np.ndarray]) -> np.ndarray:
    """All images of `kind`, uint8 (N, size, size), read-only, mapped from the cache.

    `original` gives the uint8 images (N, 28, 28); it is called only when the cache has no
    sound file, which is then made, with progress on stderr when that is a terminal.

    Raises `CacheUnwritable`, and what `original` raises.
    """
    path = cached_path(kind, size)
    shape = (idx.files(kind)[0].shape[0], size, size)
    if os.path.exists(path):
        images = _open(path, shape)
        if images is not None:
            return images
        print(f"ece408: {path} is damaged; making it anew", file=sys.stderr)
    _make(path, original(), size)
    return np.load(path, mmap_mode="r")


def _open(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The cached array, or `None` when the file does not hold exactly one of that shape."""
    try:
        images = np.load(path, mmap_mode="r")
        whole = path.stat().st_size == images.offset + images.nbytes
    except Exception:  # A damaged header fails in NumPy's parser in more ways than it documents.
        return None
    return images if whole and images.dtype == np.uint8 and images.shape == shape else None


def _make(path: Path, images: np.ndarray, size: int) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": (len(images), size, size)}
    label = f"resizing to {size}x{size}"
    # Written, not mapped: a full disk is then an error, where a mapping kills the process.
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for image in tqdm(images, label, unit="image", leave=False, disable=None):
            file.write(resize_image(image, size).tobytes())
