import functools
import gzip
import os
from unittest.mock import Mock

import numpy as np
import pytest
from fake_data import encode, fake_arrays, write_files

from ece408_op import settings
from ece408_op.course.dataset import fashion_data, idx
from ece408_op.errors import DataCorrupt, DataMissing, InvalidSetting, InvalidSize

IMAGES = "t10k-images-idx3-ubyte"
LABELS = "t10k-labels-idx1-ubyte"


@pytest.fixture
def no_fetch(monkeypatch):
    monkeypatch.setattr("ece408_op.course.dataset.fetch.fetch", Mock(side_effect=AssertionError))


@pytest.fixture
def named(fake, tmp_path, monkeypatch, no_fetch):
    """Return the folder that ECE408_DATA names, with the fake test set."""
    folder = tmp_path / "named"
    write_files(folder, "t10k")
    monkeypatch.setenv("ECE408_DATA", str(folder))
    return folder


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("order", [">", "<"])
@pytest.mark.parametrize("kind", ["t10k", "train"])
def test_files_are_read_in_both_byte_orders_compressed_or_not(named, kind, order, compressed):
    write_files(named, kind, order, compressed)
    images, labels = fashion_data.load(kind)
    expected_images, expected_labels = fake_arrays(kind)
    np.testing.assert_array_equal(images, expected_images)
    np.testing.assert_array_equal(labels, expected_labels)
    assert images.dtype == labels.dtype == np.uint8


def test_compression_is_told_by_the_content_not_by_the_name(named):
    (named / f"{IMAGES}.gz").write_bytes(encode(fake_arrays("t10k")[0], compressed=False))
    (named / f"{LABELS}.gz").rename(named / LABELS)
    assert len(fashion_data.load("t10k")[1]) == 12


@pytest.mark.parametrize("size", [28, 48])
def test_limit_gives_the_first_images(named, size):
    images, labels = fashion_data.load("t10k", size, limit=5)
    everything, _ = fashion_data.load("t10k", size)
    assert images.shape == (5, size, size)
    np.testing.assert_array_equal(images, everything[:5])
    np.testing.assert_array_equal(labels, [0, 1, 2, 3, 4])


def test_a_limit_that_cannot_be_met_and_a_size_below_the_originals_are_refused(named):
    for limit in (0, -1, 13):
        with pytest.raises(InvalidSize, match=f"{limit} images .* from 1 to 12"):
            fashion_data.load("t10k", limit=limit)
    with pytest.raises(InvalidSize, match="27x27"):
        fashion_data.load("t10k", 27)


gz, plain = encode, functools.partial(encode, compressed=False)


def damaged_gzip(array):
    content = bytearray(gz(array))
    # In the checksum at the end: earlier damage might change content first.
    content[-8] ^= 0xFF
    return bytes(content)


def wrong_pixel(array):
    array = array.copy()
    array.flat[0] ^= 1
    return gz(array)


DAMAGES = {
    "truncated gzip": (IMAGES, lambda a: gz(a)[:-20], r"damaged gzip data"),
    "damaged gzip": (IMAGES, damaged_gzip, r"damaged gzip data"),
    "garbage after gzip": (IMAGES, lambda a: gz(a) + b"more", r"damaged gzip data"),
    "empty": (IMAGES, lambda a: b"", r"truncated: its content has 0 bytes.* header .*16"),
    "header only in part": (LABELS, lambda a: b"\0\0\x08\1", r"truncated: .* 4 bytes.* 8"),
    "truncated": (IMAGES, lambda a: plain(a)[:-1], r"truncated: 9407 bytes follow .*, not 9408"),
    "trailing bytes": (LABELS, lambda a: gzip.compress(plain(a) + b"\0"), r"too long: .* 12 bytes"),
    "not idx": (IMAGES, lambda a: b"<html> no such page </html>", r"begins with 3c 68 74 6d"),
    "labels for images": (IMAGES, lambda a: gz(a.reshape(-1)), r"begins with 00 00 08 01, not"),
    "too few images": (IMAGES, lambda a: gz(a[:7]), r"shape 7x28x28, Fashion-MNIST's is 12x28x28"),
    "other sides": (IMAGES, lambda a: gz(a.reshape(12, 14, 56)), r"shape 12x14x56"),
    "other pixels": (IMAGES, wrong_pixel, r"is not Fashion-MNIST's: the sha256 .* not with \w{16}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line_with_path_figures_and_advice(named, damage):
    name, spoil, text = DAMAGES[damage]
    path = named / f"{name}.gz"
    path.write_bytes(spoil(fake_arrays("t10k")[name == LABELS]))
    with pytest.raises(DataCorrupt, match=text) as caught:
        fashion_data.load("t10k")
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert "`ece408 data fetch`" in message
    assert "--data" in message


def test_verify_names_the_files_or_what_is_wrong(named):
    assert fashion_data.verify("t10k") == [named / f"{IMAGES}.gz", named / f"{LABELS}.gz"]
    (named / f"{LABELS}.gz").write_bytes(b"")
    with pytest.raises(DataCorrupt, match=LABELS):
        fashion_data.verify("t10k")


def test_a_file_that_cannot_be_read_is_reported(named, monkeypatch):
    monkeypatch.setattr(idx, "_content", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(DataMissing, match=rf"{IMAGES}.gz cannot be read: Permission denied"):
        fashion_data.load("t10k")


def test_the_named_folder_is_the_only_one_looked_at(named):
    write_files(fashion_data.PACKAGE_FOLDER, "t10k")
    write_files(fashion_data.cache_folder(), "t10k")
    assert fashion_data.locate("t10k") == named
    (named / f"{LABELS}.gz").unlink()
    with pytest.raises(DataMissing) as caught:
        fashion_data.locate("t10k")
    message = str(caught.value)
    assert str(named) in message
    assert LABELS in message
    assert "--data" in message
    assert "\n" not in message


def test_a_named_folder_that_is_none_is_reported(named):
    labels = named / f"{LABELS}.gz"
    with settings.override(data=labels), pytest.raises(DataMissing, match="not a folder"):
        fashion_data.locate("t10k")


def test_the_argument_comes_before_the_environment(named, tmp_path):
    write_files(tmp_path / "argument", "t10k")
    with settings.override(data=tmp_path / "argument"):
        assert fashion_data.locate("t10k") == tmp_path / "argument"


def test_the_package_comes_before_the_cache_if_it_has_all_files(fake, no_fetch):
    write_files(fashion_data.cache_folder(), "t10k")
    write_files(fashion_data.PACKAGE_FOLDER, "train")
    assert fashion_data.locate("t10k") == fake / "fashion-mnist" == fashion_data.cache_folder()
    assert fashion_data.locate("train") == fashion_data.PACKAGE_FOLDER
    write_files(fashion_data.PACKAGE_FOLDER, "t10k")
    assert fashion_data.locate("t10k") == fashion_data.PACKAGE_FOLDER


def test_find_fetches_nothing(fake, no_fetch):
    assert fashion_data.find("t10k") is None
    assert not fake.exists()
    write_files(fashion_data.cache_folder(), "t10k")
    assert fashion_data.find("t10k") == fake / "fashion-mnist"
    assert fashion_data.find("train") is None
    with pytest.raises(InvalidSetting, match="'test'"):
        fashion_data.find("test")


def test_what_is_nowhere_is_fetched_into_the_cache(fake, monkeypatch):
    fetched = []

    def fetch(folder, kinds):
        fetched.append((folder, kinds))
        write_files(folder, *kinds)

    monkeypatch.setattr("ece408_op.course.dataset.fetch.fetch", fetch)
    assert len(fashion_data.load("t10k")[0]) == 12
    fashion_data.load("t10k")
    assert fetched == [(fake / "fashion-mnist", ("t10k",))]


def test_the_genuine_test_set(fashion_mnist):
    images, labels = fashion_data.load("t10k")
    assert images.shape == (10000, 28, 28)
    assert np.bincount(labels).tolist() == [1000] * 10
    # The first picture of the test set is an ankle boot.
    assert labels[0] == 9
    assert os.path.samefile(fashion_data.verify("t10k")[0].parent, fashion_mnist)
