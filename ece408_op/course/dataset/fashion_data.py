"""Fashion-MNIST as arrays; missing files are fetched."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ... import settings
from ...errors import DataMissing, InvalidSize
from . import distribution, idx, resize
from .idx import IMAGE_SIZE

KINDS = idx.KINDS
# Folder of the files in an installed Debian or Ubuntu package.
PACKAGE_FOLDER = Path("/") / distribution.FOLDER


def cache_folder() -> Path:
    """Return the folder for downloads, which may not exist yet."""
    return settings.cache() / "fashion-mnist"


def find(kind: str) -> Path | None:
    """Return the folder with the images and labels of `kind`, "t10k" or "train"; fetches nothing.

    It is the user's folder, if one is set, else the distribution's package or the cache. `None`
    when neither has both files. Only the presence of the files is checked.

    Raises `DataMissing` when the user's folder lacks a file, `InvalidSetting` for an unknown
    `kind`.
    """
    named = settings.data()
    if named is not None:
        _require(kind, named)
        return named
    folders = (PACKAGE_FOLDER, cache_folder())
    return next((folder for folder in folders if not _missing(kind, folder)), None)


def locate(kind: str) -> Path:
    """As `find`, but fetches missing files into the cache.

    Raises the errors of `find`, `CacheUnwritable`, and `DownloadFailed` when no copy exists and
    none can be fetched.
    """
    folder = find(kind)
    if folder is None:
        from .fetch import fetch  # which imports much

        fetch(cache_folder(), (kind,))
        folder = cache_folder()
    return folder


def load(
    kind: str, size: int = IMAGE_SIZE, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of `kind`, "t10k" (10000 for testing) or "train" (60000).

    Returns read-only arrays: images, uint8 of shape (N, size, size), pixels 0 to 255, black
    background; labels, uint8 of shape (N,), 0 to 9. `limit` is the number of images to return from
    the start, by default all. Images larger than 28x28 are resized by the course's recipe, once,
    and cached.

    Raises `InvalidSize` for a size below 28 or a limit that `kind` cannot meet, `DataCorrupt` when
    a file has the wrong content, `CacheUnwritable`, and the errors of `locate`.
    """
    images, labels = idx.files(kind)
    if size < IMAGE_SIZE:
        raise InvalidSize(
            f"images of {size}x{size} cannot be had; give a size from {IMAGE_SIZE} up"
        )
    if limit is not None and not 1 <= limit <= images.shape[0]:
        raise InvalidSize(
            f"{limit} images cannot be had from {kind}; give a number from 1 to {images.shape[0]}"
        )
    folder = locate(kind)
    if size == IMAGE_SIZE:
        pixels = _read(folder, images)
    else:
        pixels = resize.resized(kind, size, lambda: _read(folder, images))
    return pixels[:limit], _read(folder, labels)[:limit]


def verify(kind: str) -> list[Path]:
    """Verify the full content of both files of `kind` and of its resized images in the cache;
    return their paths.

    Raises `DataCorrupt`, `CacheUntrusted`, and the errors of `locate`.
    """
    folder = locate(kind)
    for expected in idx.files(kind):
        _read(folder, expected)
    paths = [_path(folder, expected) for expected in idx.files(kind)]
    return paths + resize.verify(kind)


def _missing(kind: str, folder: Path) -> list[str]:
    return [each.name for each in idx.files(kind) if idx.find(folder, each) is None]


def _require(kind: str, folder: Path) -> None:
    missing = _missing(kind, folder)
    if missing:
        where = f"the folder {folder}" if folder.is_dir() else f"{folder}, which is not a folder,"
        raise DataMissing(
            f"{where} has no {missing[0]}.gz or {missing[0]}; put Fashion-MNIST's files there, "
            "point --data (ECE408_DATA) elsewhere, or leave it out to have them fetched"
        )


def _path(folder: Path, expected: idx.Expected) -> Path:
    return idx.find(folder, expected) or folder / expected.name


def _read(folder: Path, expected: idx.Expected) -> np.ndarray:
    return idx.read(_path(folder, expected), expected)
