"""Obstacles in the lock file's place: one error, and no waiting."""

import os
import socket
import threading

import pytest

from ece408_op.errors import CacheUnwritable
from ece408_op.files.cachedir import locked


def _socket(path):
    socket.socket(socket.AF_UNIX).bind(str(path))


IN_THE_WAY = {
    "fifo": os.mkfifo,
    "folder": os.mkdir,
    "link": lambda path: path.symlink_to(path.parent / "elsewhere"),
    "link_to_a_file": lambda path: path.symlink_to("/etc/passwd"),
    "link_to_itself": lambda path: path.symlink_to(path),
    "socket": _socket,
}


def _error_of_locking(folder):
    """Return the error that `locked` raises, on a thread, as it may wait forever."""
    caught = []

    def lock():
        try:
            with locked(folder, "be done"):
                caught.append(None)
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=lock, daemon=True)
    thread.start()
    thread.join(60)
    assert caught, "still waiting"
    return caught[0]


@pytest.mark.parametrize("kind", IN_THE_WAY)
def test_anything_but_a_regular_file_is_refused(tmp_path, kind):
    IN_THE_WAY[kind](tmp_path / ".lock")
    error = _error_of_locking(tmp_path)
    assert isinstance(error, CacheUnwritable)
    assert f"cannot write {tmp_path / '.lock'}: it is not a regular file" in str(error)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_an_unreadable_lock_file_is_one_error(tmp_path):
    (tmp_path / ".lock").touch(0)
    error = _error_of_locking(tmp_path)
    assert f"cannot write {tmp_path / '.lock'}: Permission denied" in str(error)


def test_a_lock_file_of_before_serves(tmp_path):
    (tmp_path / ".lock").write_text("whatever")
    assert _error_of_locking(tmp_path) is None
    assert (tmp_path / ".lock").read_text() == "whatever"
