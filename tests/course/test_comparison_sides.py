"""`ece408 compare A.json B.json`: earlier comparisons side by side."""

import dataclasses
import json

import pytest

from ece408_op.bench import results
from ece408_op.cli.main import execute
from ece408_op.course import comparison_files
from ece408_op.course.comparison import Options, Row, Run
from ece408_op.errors import InvalidSetting, InvalidSize

RUN = Run("m2.1", "2019fa", "ece408-high", 1000, 0.914, (0.2, 0.1), 4.0, 1 << 30)


def _write(path, seconds, **changes):
    """Write a comparison of one row, with these times in seconds of the first layer in its runs."""
    runs = [dataclasses.replace(RUN, op_seconds=(each, 0.1), **changes) for each in seconds]
    comparison_files.write_json(path, [Row(tuple(runs))], Options())
    return str(path)


def _table(capsys, *paths):
    assert execute(["compare", *paths]) == 0
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines()[len(paths) :])
    return "\n".join(" ".join(line.split()) for line in out.splitlines())


def test_a_gain_is_told_from_chance(tmp_path, capsys):
    slow = _write(tmp_path / "before.json", [0.2, 0.21, 0.19, 0.2])
    fast = _write(tmp_path / "after.json", [0.1, 0.104, 0.098, 0.1])
    out = _table(capsys, slow, fast)
    assert "m2.1 ece408-high 2019fa, 1000 conv1 ms 200.0 ±2.5 100.0 ±0.8 2.00x\n" in out
    assert "conv2 ms 100.0 ±0.0 100.0 ±0.0 1.00x?\n" in out
    assert "program s 4.00 ±0.00 4.00 ±0.00" in out
    assert "samples that overlap" in out
    assert "single run" not in out


def test_single_runs_prove_nothing(tmp_path, capsys):
    one, two = (_write(tmp_path / f"{name}.json", [s]) for name, s in (("a", 0.2), ("b", 0.1)))
    out = _table(capsys, one, two)
    assert "conv1 ms 200.0 100.0 2.00x?\n" in out
    assert "fewer than 4 runs of a side (--repeat)" in out
    assert "Figures without ± are of a single run." in out


def test_benchmarks_are_compared_by_medians(tmp_path, capsys):
    paths = []
    for name, median in (("before", 0.0306), ("after", 0.0153)):
        ms = {"ours": {"median": median}, "cudnn NCHW": {"median": 2.0}}
        rows = [
            {"case": "c1,h9", "batch": 4, "direction": "forward", "ms": ms},
            {"case": "m2.1", "ms": {"ours": {"median": 100 * median}}},
            {"case": "c2,h9", "failure": "no memory"},
        ]
        results.write(tmp_path / name, "Times", "", {"rows": rows})
        paths.append(str(tmp_path / f"{name}.json"))
    out = _table(capsys, *paths)
    assert "c1,h9, batch 4, forward ours ms 0.0306 0.0153 2.00x\n" in out
    assert "c1,h9, batch 4, forward cudnn NCHW ms 2.00 2.00 1.00x\n" in out
    assert "m2.1 ours ms 3.06 1.53 2.00x\n" in out
    assert out.endswith("\n\ngain: how many times as fast as the first, by medians.")


def test_what_only_one_side_ran_has_no_gain(tmp_path, capsys):
    one = _write(tmp_path / "a.json", [0.2])
    other = _write(tmp_path / "b.json", [0.1], script="m3.1")
    out = _table(capsys, one, other)
    assert "m2.1 ece408-high 2019fa, 1000 conv1 ms 200.0 - -\n" in out
    assert "m3.1 ece408-high 2019fa, 1000 conv1 ms - 100.0 -\n" in out


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path, capsys):
    paths = []
    for folder in ("laptop", "server"):
        (tmp_path / folder).mkdir()
        paths.append(_write(tmp_path / folder / "times.json", [0.2]))
    out = _table(capsys, *paths)
    assert "run figure laptop/times server/times gain\n" in out


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"machine": {}, "runs": [{}], "date": ""}'])
def test_other_files_are_refused_in_one_line(content, written, refused):
    path = written("other.json", content)
    message = f"{path} is not a file that `ece408 compare --json` or scripts/bench.py has "
    refused(InvalidSetting.exit_code, message, "compare", str(path))


def test_what_is_no_file_is_refused(tmp_path, refused):
    refused(InvalidSetting.exit_code, "No such file", "compare", str(tmp_path / "none.json"))
    message = "'100 200' is not one number of images"
    refused(InvalidSize.exit_code, message, "compare", "100", "200")


def test_a_run_that_failed_has_no_figures(tmp_path, capsys):
    path = tmp_path / "a.json"
    failed = Run("m3.1", "2019fa", "ece408-high", 1000, exit_code=13, error="no GPU")
    comparison_files.write_json(path, [Row((RUN,)), Row((failed,))], Options())
    assert json.loads(path.read_text())["runs"][1]["error"] == "no GPU"
    assert "m3.1" not in _table(capsys, str(path))
