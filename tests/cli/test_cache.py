import os
import re
from pathlib import Path

import pytest

import ece408_op
from ece408_op.cli import cache
from ece408_op.cli.main import execute
from ece408_op.errors import CacheUnwritable, InvalidSetting


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a cache folder with two kinds of content, and a file of the user's."""
    folder = tmp_path / "cache"
    (folder / "resized" / "deep").mkdir(parents=True)
    (folder / "resized" / "a.npy").write_bytes(bytes(100))
    (folder / "resized" / "deep" / "b.npy").write_bytes(bytes(20))
    (folder / "training").mkdir()
    (folder / "thesis.txt").write_text("not ours")
    monkeypatch.setenv("ECE408_CACHE", str(folder))
    return folder


def test_clear_removes_what_the_package_made_and_nothing_else(folder):
    removed = cache.clear()
    assert [entry.kind for entry in removed] == ["resized", "training"]
    assert removed[0].size_bytes == 120
    assert os.listdir(folder) == ["thesis.txt"]
    assert cache.clear() == []


def test_an_absent_cache_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("ECE408_CACHE", str(tmp_path / "nowhere"))
    assert cache.entries() == cache.clear() == []
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("kind", ["thesis.txt", "../cache", ".", "", "/"])
def test_an_unknown_kind_is_refused_before_anything_is_removed(folder, kind):
    for action in (cache.entries, cache.clear):
        with pytest.raises(InvalidSetting, match=r"there are: fashion-mnist, resized, training"):
            action(["resized", kind])
    assert (folder / "resized" / "a.npy").exists()
    assert (folder / "thesis.txt").exists()


def test_symbolic_links_are_removed_not_followed(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(bytes(1000))
    (folder / "training" / "link").symlink_to(outside)
    (folder / "fashion-mnist").symlink_to(outside)
    (folder / "resized" / "dangling").symlink_to(tmp_path / "nowhere")
    by_kind = {entry.kind: entry for entry in cache.entries()}
    assert by_kind["training"].files == by_kind["fashion-mnist"].files == 1
    assert by_kind["training"].size_bytes < 1000
    cache.clear()
    assert os.listdir(folder) == ["thesis.txt"]
    assert (outside / "precious").stat().st_size == 1000


def test_a_file_in_a_kinds_place_is_removed(folder):
    (folder / "fashion-mnist").write_bytes(bytes(7))
    assert cache.clear(["fashion-mnist"])[0].size_bytes == 7
    assert not (folder / "fashion-mnist").exists()


def test_what_cannot_be_removed_is_reported(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cache.shutil, "rmtree", refuse)
    with pytest.raises(CacheUnwritable, match=r"resized: Permission denied"):
        cache.clear()


def test_every_kind_that_the_package_makes_is_known():
    package = Path(ece408_op.__file__).parent
    made = {
        kind
        for source in package.rglob("*.py")
        for kind in re.findall(r'settings\.cache\(\) / "([^"]+)"', source.read_text())
    }
    assert made == set(cache.KINDS)


def test_the_command_lists_and_clears(folder, capsys):
    assert execute(["cache"]) == 0
    listed = capsys.readouterr().out
    assert execute(["cache", "list"]) == 0
    assert capsys.readouterr().out == listed
    lines = listed.splitlines()
    assert re.fullmatch(rf" +0\.0 MiB +2 files  {re.escape(str(folder / 'resized'))}", lines[0])
    assert len(lines) == 2

    assert execute(["cache", "clear", "resized"]) == 0
    output = capsys.readouterr()
    assert output.out == f"removed {lines[0]}\n"
    assert output.err == ""
    assert execute(["cache", "clear", "resized"]) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"ece408: nothing to clear in {folder}\n"
