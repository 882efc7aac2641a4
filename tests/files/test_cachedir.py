"""Files of the cache: private, whole, sealed, and cleaned after killed processes."""

import os
import signal
import stat
import subprocess
import sys
import time

import programs
import pytest

from ece408_op import settings
from ece408_op.errors import CacheUntrusted
from ece408_op.files import cachedir
from ece408_op.files.cachedir import atomic_path
from ece408_op.files.sealed import Damage, check_trust, read_sealed, write_sealed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a cache folder that does not exist yet."""
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("ECE408_CACHE", str(folder))
    before = os.umask(0o002)
    yield folder
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_cache_is_for_its_user_alone(folder, tmp_path):
    for path in (folder / "kind" / "deep" / "file", tmp_path / "elsewhere" / "file"):
        with atomic_path(path) as temporary:
            temporary.write_text("content")
    made = ("", "kind", "kind/deep")
    assert [mode(folder / name) for name in made] == [0o700] * 3
    assert mode(folder / "kind" / "deep" / "file") == 0o600
    # Users decide on files they have written elsewhere, and on folders that others may need.
    assert mode(folder.parent) == mode(tmp_path / "elsewhere") == 0o775
    assert mode(tmp_path / "elsewhere" / "file") == 0o664


def test_a_cache_with_a_relative_name_is_one_too(folder, monkeypatch):
    folder.parent.mkdir()
    monkeypatch.chdir(folder.parent)
    with settings.override(cache="other"):
        cachedir.ensure_folder(settings.cache() / "kind")
    assert mode(folder.parent / "other") == mode(folder.parent / "other" / "kind") == 0o700


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The name, too, before the block has ended: a power cut leaves the old file or the new."""
    done = []

    def note(name, function):
        def noted(*arguments):
            function(*arguments)
            what = arguments[0]
            done.append((name, os.readlink(f"/proc/self/fd/{what}") if name == "sync" else what))

        monkeypatch.setattr(os, {"sync": "fsync", "rename": "replace"}[name], noted)

    note("sync", os.fsync)
    note("rename", os.replace)
    with atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("content")
    expected = [("sync", str(temporary)), ("rename", temporary), ("sync", str(tmp_path))]
    assert done == expected


def flip(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "lengthened": lambda content: content + b"\0",
    "first byte": lambda content: flip(content, 0),
    "last byte": lambda content: flip(content, -33),
    "checksum": lambda content: flip(content, len(content) - 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("content", [b"", b"x" * 100_000], ids=["nothing", "much"])
def test_a_sealed_file_gives_what_was_written_or_nothing(tmp_path, damage, content):
    path = tmp_path / "file"
    write_sealed(path, content)
    assert read_sealed(path) == content
    whole = path.read_bytes()
    damaged = DAMAGES[damage](whole) if content or "byte" not in damage else b"?" + whole
    path.write_bytes(damaged)
    with pytest.raises(Damage, match=f"^{path} is damaged$"):
        read_sealed(path)


def test_a_sealed_file_in_the_place_of_another_is_damage(tmp_path):
    write_sealed(tmp_path / "one", b"content")
    os.rename(tmp_path / "one", tmp_path / "other")
    with pytest.raises(Damage):
        read_sealed(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        read_sealed(tmp_path / "one")


def test_what_cannot_be_read_is_damage(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(Damage, match=f"^{tmp_path}/file cannot be read: Is a directory$"):
        read_sealed(tmp_path / "file")


@pytest.mark.parametrize("others", [0o020, 0o002], ids=["group", "world"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_what_others_can_write_is_not_trusted(folder, level, others):
    path = folder / "kind" / "deep" / "file"
    write_sealed(path, b"content")
    open_to_others = (path, *path.parents)[level]
    open_to_others.chmod(mode(open_to_others) | others)
    text = f"{open_to_others} can be written by other users .*chmod go-w {open_to_others}$"
    with pytest.raises(CacheUntrusted, match=text):
        read_sealed(path)


def test_folders_above_the_cache_do_not_count(folder):
    path = folder / "file"
    write_sealed(path, b"content")
    folder.parent.chmod(0o777)
    assert read_sealed(path) == b"content"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_owns_is_not_trusted(folder):
    path = folder / "kind" / "file"
    write_sealed(path, b"content")
    for each in (path, path.parent, folder):
        os.chown(each, 12345, -1)
        with pytest.raises(CacheUntrusted, match=f"^{each} belongs to user 12345, not to root;"):
            check_trust(path)
        os.chown(each, 0, -1)
    check_trust(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_roots_files_are_trusted_by_all(tmp_path):
    """Such as those that an administrator has prepared."""
    code = """
import os
from pathlib import Path
from ece408_op.files.sealed import check_trust
folder = Path("shared")
folder.mkdir(mode=0o755)
(folder / "file").touch(0o644)
os.setuid(65534)
check_trust(folder / "file")
print("fine")
"""
    tmp_path.chmod(0o755)
    result = programs.run(sys.executable, "-c", code, cwd=tmp_path)
    assert result.stdout == "fine\n", result.stderr


WRITER = """
import sys, time
from pathlib import Path
from ece408_op.files.cachedir import atomic_path, scratch_folder
path = Path(sys.argv[1])
with atomic_path(path) if path.suffix else scratch_folder(path) as temporary:
    print(temporary, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("name", ["file.txt", ""], ids=["file", "folder"])
def test_what_a_killed_process_has_left_is_removed_by_the_next(tmp_path, name):
    command = [sys.executable, "-c", WRITER, str(tmp_path / name)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        left = process.stdout.readline().rstrip()
        next_one = tmp_path / "next.txt"
        with atomic_path(next_one):
            assert os.path.exists(left)
        assert os.path.exists(left), "its process still lived"
        process.send_signal(signal.SIGKILL)
    assert os.path.exists(left)
    with atomic_path(next_one):
        assert not os.path.exists(left)
    assert list(tmp_path.iterdir()) == [next_one]


def test_a_temporary_file_taken_for_abandoned_before_it_is_held_is_made_again(
    tmp_path, monkeypatch
):
    hold, removed = cachedir._hold, []

    def too_late(descriptor):
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        hold(descriptor)

    monkeypatch.setattr(cachedir, "_hold", too_late)
    with atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("content")
    assert removed == [temporary]
    assert (tmp_path / "file").read_text() == "content"


@pytest.mark.parametrize("locks", [True, False])
def test_where_locks_do_not_tell_only_a_day_does(tmp_path, monkeypatch, locks):
    """Such as files of another machine, and file systems without locks."""
    here = cachedir._unfinished_here()
    left = tmp_path / (".ece408-another-0011-file" if locks else f"{here}-0011-file")
    left.touch()
    if not locks:
        monkeypatch.setattr(cachedir.fcntl, "flock", _without_locks)
    with atomic_path(tmp_path / "new"):
        pass
    assert left.exists()
    os.utime(left, (time.time() - 25 * 60 * 60,) * 2)
    with atomic_path(tmp_path / "new"):
        assert not left.exists()


def _without_locks(*_):
    raise OSError(95, "Operation not supported")


def test_only_our_own_unfinished_files_are_removed(tmp_path):
    here = cachedir._unfinished_here()
    outside = tmp_path / "outside"
    outside.mkdir()
    kept = [tmp_path / name for name in (".hidden", ".ece408", "ece408-0011-file", ".file.1-ab.x")]
    for path in kept:
        path.touch()
    kept += [tmp_path / f"{here}-{name}" for name in ("link", "pipe")]
    kept[-2].symlink_to(outside)
    os.mkfifo(kept[-1])
    if os.geteuid() == 0:
        kept.append(tmp_path / f"{here}-others")
        kept[-1].touch()
        os.chown(kept[-1], 12345, -1)
    with atomic_path(tmp_path / "new"):
        pass
    assert {*kept, outside} <= set(tmp_path.iterdir())
