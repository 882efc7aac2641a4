"""The project's size limits: lines by room, lines of a file, bytes of a result."""

import collections
import subprocess

import pytest
from places import ROOT

# Raise a number if needed, and give the reason in the commit.
MOST_LINES = {"ece408_op, kernels and scripts": 77_090, "tests": 35_870}
MOST_LINES_OF_A_FILE, MOST_BYTES_OF_A_RESULT = 700, 60_000
# Longer for now.
LONG = {"tests/helpers/random_graphs.py"}
SOURCES = (".py", ".sh", ".h", ".cc", ".cpp", ".cu", ".cuh")
# Results that tests and documents read; other results are tables only.
JSON = {"cpu", "cuda_bench", "gpu_layers_h200", "gpu_networks_h200"}


@pytest.fixture(scope="module")
def lines():
    """Return the lines of each source tracked by git or not ignored, by path."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    paths = {path for path in listed.stdout.splitlines() if path.endswith(SOURCES)}
    return {
        path: (ROOT / path).read_text().count("\n") for path in paths if (ROOT / path).is_file()
    }


def test_the_rooms_together(lines):
    rooms, sums = collections.Counter(), collections.Counter()
    for path, count in lines.items():
        top, *rest = path.split("/")
        if top not in ("ece408_op", "kernels", "scripts", "tests"):
            continue
        rooms[f"{top}/{rest[0]}" if len(rest) > 1 else top] += count
        sums["tests" if top == "tests" else "ece408_op, kernels and scripts"] += count
    for room, count in sorted(rooms.items()):
        print(f"{count:7} {room}")
    assert {what: count for what, count in sums.items() if count > MOST_LINES[what]} == {}


def test_a_file(lines):
    assert {path for path, count in lines.items() if count > MOST_LINES_OF_A_FILE} == LONG


def test_a_result():
    results = list((ROOT / "docs" / "results").iterdir())
    assert [each.name for each in results if each.stat().st_size > MOST_BYTES_OF_A_RESULT] == []
    assert {each.stem for each in results if each.suffix == ".json"} == JSON
