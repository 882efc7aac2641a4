import hashlib
import os
from unittest import mock

import numpy as np
import pytest
from fake_data import fake_arrays, write_files

from ece408_op.cli.main import execute
from ece408_op.course.dataset import fashion_data, idx, resize
from ece408_op.errors import CacheUnwritable, DataCorrupt

SIZES = (48, 64, 70, 72)


def by_skimage(images, size):
    transform = pytest.importorskip("skimage.transform")
    larger = [
        transform.resize(image / 256.0, (size, size), mode="constant", cval=0) * 256
        for image in images
    ]
    return np.array(larger).astype(np.uint8)


@pytest.fixture
def images(rng):
    """Return clothes-like blobs, noise, and the extremes; some without any black, which clips."""
    noise = rng.integers(0, 256, (20, 28, 28), np.uint8)
    blob = np.hypot(*np.ogrid[-1:1:28j, -1:1:28j]) < rng.uniform(0.2, 1, (20, 1, 1))
    flat = np.array([0, 1, 128, 255], np.uint8)[:, None, None] * np.ones((1, 28, 28), np.uint8)
    return np.concatenate([noise, noise * blob, noise // 2 + 100, flat])


@pytest.fixture
def original():
    calls = []

    def give():
        calls.append(1)
        return fake_arrays("t10k")[0]

    give.calls = calls
    return give


@pytest.mark.parametrize("size", [29, *SIZES, 200])
def test_images_are_bit_equal_to_the_courses_recipe(images, size):
    ours = np.array([resize.resize_image(image, size) for image in images])
    np.testing.assert_array_equal(ours, by_skimage(images, size))


@pytest.mark.parametrize("size", SIZES)
def test_genuine_images_are_bit_equal_to_the_courses_recipe(fashion_mnist, size):
    images = fashion_data.load("t10k", limit=100)[0]
    ours = np.array([resize.resize_image(image, size) for image in images])
    np.testing.assert_array_equal(ours, by_skimage(images, size))


@pytest.mark.parametrize("size", SIZES)
def test_the_set_is_made_once(fake, original, capfd, size):
    first = resize.resized("t10k", size, original)
    again = resize.resized("t10k", size, original)
    assert len(original.calls) == 1
    assert first.shape == (12, size, size)
    assert first.dtype == np.uint8
    assert not first.flags.writeable
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, by_skimage(original(), size))
    # No progress unless stderr is a terminal, and never anything on stdout.
    assert capfd.readouterr() == ("", "")


def test_sizes_and_kinds_have_files_of_their_own(fake, original):
    resize.resized("t10k", 48, original)
    resize.resized("t10k", 64, original)
    resize.resized("train", 48, lambda: fake_arrays("train")[0])
    assert len(list((fake / "resized").iterdir())) == 3


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def flip_a_bit(offset):
    def flip(path):
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return flip


DAMAGES = {
    "first pixel": flip_a_bit(128),
    "last pixel": flip_a_bit(-33),
    "checksum": flip_a_bit(-1),
    "fortran order": lambda path: path.write_bytes(
        path.read_bytes().replace(b"'fortran_order': False", b"'fortran_order': True ")
    ),
    "truncated": cut,
    "trailing byte": lengthen,
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\x93NUMPY\1\0\x10\0{[(not a header"),
    "other shape": lambda path: np.save(path, np.zeros((12, 48, 47), np.uint8)),
    "other type": lambda path: np.save(path, np.zeros((12, 48, 48), np.int8)),
    "archive": lambda path: np.savez(path.open("wb"), np.zeros(3)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(fake, original, capfd, damage):
    sound = np.array(resize.resized("t10k", 48, original))
    path = resize.cached_path("t10k", 48)
    DAMAGES[damage](path)
    np.testing.assert_array_equal(resize.resized("t10k", 48, original), sound)
    assert len(original.calls) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"ece408: making the images of 48x48 again: {path} is damaged\n"
    resize.resized("t10k", 48, original)
    assert len(original.calls) == 2


@pytest.mark.slow
def test_genuine_images_must_be_the_known_ones(elsewhere, fashion_mnist, capfd):
    """Those that another program has made and sealed are rejected, too."""
    sound = np.array(fashion_data.load("t10k", 48)[0])
    path = resize.cached_path("t10k", 48)
    content = path.read_bytes()
    pixels = bytearray(sound.tobytes())
    pixels[5_000_000] ^= 1
    path.write_bytes(content[:128] + pixels + hashlib.sha256(pixels).digest())
    np.testing.assert_array_equal(fashion_data.load("t10k", 48)[0], sound)
    assert path.read_bytes() == content
    assert capfd.readouterr().err.count(f"again: {path} is damaged") == 1


def test_images_that_scipy_makes_otherwise_are_refused(fake, original, monkeypatch):
    originals = idx.files("t10k")[0].sha256
    monkeypatch.setitem(resize._KNOWN, originals, {48: "00" * 32})
    with pytest.raises(DataCorrupt, match="48x48 made here are not the course's: SciPy"):
        resize.resized("t10k", 48, original)
    assert list((fake / "resized").iterdir()) == []


def test_sealed_images_of_another_user_are_made_again(fake, original, capfd):
    resize.resized("t10k", 48, original)
    path = resize.cached_path("t10k", 48)
    path.chmod(0o666)
    resize.resized("t10k", 48, original)
    assert len(original.calls) == 2
    assert f"again: {path} can be written by other users (mode 0666)" in capfd.readouterr().err


def test_verify_checks_what_was_made_of_the_images(fake, original, monkeypatch, tmp_path, capsys):
    for kind in idx.KINDS:
        write_files(tmp_path / "named", kind)
    monkeypatch.setenv("ECE408_DATA", str(tmp_path / "named"))
    resize.resized("t10k", 48, original)
    path = resize.cached_path("t10k", 48)
    assert execute(["data", "verify"]) == 0
    assert f"{path}: ok\n" in capsys.readouterr().out
    flip_a_bit(1000)(path)
    assert execute(["data", "verify"]) == DataCorrupt.exit_code
    assert f"error: {path} is damaged; remove it" in capsys.readouterr().err
    path.unlink()
    assert execute(["data", "verify"]) == 0


@pytest.mark.parametrize(
    ("error", "raised"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), CacheUnwritable)],
)
def test_what_is_not_finished_leaves_no_file(fake, original, monkeypatch, error, raised):
    monkeypatch.setattr(resize, "resize_image", mock.Mock(side_effect=error))
    with pytest.raises(raised, match="No space left" if raised is CacheUnwritable else ""):
        resize.resized("t10k", 48, original)
    assert list((fake / "resized").iterdir()) == []
