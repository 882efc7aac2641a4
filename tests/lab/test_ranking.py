"""Ranking of a folder of files: it can be resumed, and files do not affect each other."""

import contextlib
import csv
import datetime
import functools
import json
import os
from unittest.mock import Mock

import pytest
from kernel_files import COURSE_2020, DECLARED
from places import ROOT

from ece408_op import settings
from ece408_op.errors import InvalidSetting, InvalidSize, NoUsableGpu
from ece408_op.lab import ranking as ranks
from ece408_op.lab import ranking_workers
from ece408_op.lab.check import Group, Verdict
from ece408_op.lab.timing import OURS
from ece408_op.problem import ConvProblem

CHEATS = ROOT / "tests" / "cheats"
LAYERS = [(text, ConvProblem.parse(text)) for text in ("b3,c2,h9,w12,m4,k3", "b4,c1,h20,w20,m3,k5")]
CONDITIONS = {"device": "this", "layers": {n: str(p) for n, p in LAYERS}, "rounds": 2}
SLOW = "#include <unistd.h>\n" + COURSE_2020.replace(") {", ") {\n    usleep(20000);", 1)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a class of four, and unrelated files."""
    folder = tmp_path / "class"
    for name, text in {
        "ann/cpu-new-forward.cc": COURSE_2020,
        "bob/cpu-new-forward.cc": SLOW,
        "cy/wrong.cc": COURSE_2020.replace("= sum;", "= sum + 1;"),
        "dan/broken.cc": "void conv_forward_cpu( {",
        "dan/notes.txt": "later",
        "dan/helper.h": "int helper();",
        "dan/empty.cc": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class Stopped(Exception):
    pass


def _rank(*folders, ranking, rounds=2, stop_after=None):
    """Rank; return the steps done. `stop_after` limits the stored ones."""
    steps, kept = [], []

    def keep():
        kept.append(1)
        if len(kept) == stop_after:
            raise Stopped

    files = ranks.find(folders)
    with contextlib.suppress(Stopped):
        problems = [problem for _, problem in LAYERS]
        ranks.rank(
            files, ranking, LAYERS, rounds, 1, keep, lambda *step: steps.append(step), problems
        )
    return steps


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        ranks, "_checked", lambda files, checked, _: zip(files, map(checked, files.values()))
    )
    kept = tmp_path / "ranking.json"
    ranking = ranks.Ranking(CONDITIONS)
    _rank(folder, ranking=ranking, stop_after=2)
    ranks.save(ranking, kept)
    ranking = ranks.load(kept, CONDITIONS)
    assert sum(each.checked for each in ranking.entries.values()) == 1 + 1 + 2
    steps = _rank(folder, ranking=ranking, stop_after=3)
    assert [step[2] for step in steps if step[0] == "checking"] == [2, 2]
    assert {each.rounds for each in ranking.in_order()} == {1}
    ranks.save(ranking, kept)
    ranking = ranks.load(kept, CONDITIONS)
    steps = _rank(folder, ranking=ranking)
    assert not [step for step in steps if step[0] == "checking"]
    assert [step for step in steps if step[0] == "timing"][-1] == ("timing", 12, 12)
    assert {each.rounds for each in ranking.in_order()} == {2}
    assert _rank(folder, ranking=ranking) == []
    _check_order(ranking)
    _change(folder, ranking)


def _check_order(ranking):
    names = [each.name for each in ranking.in_order()]
    assert [n for n in names if n != OURS] == ["ann/cpu-new-forward.cc", "bob/cpu-new-forward.cc"]
    left = {each.name: each.wrong for each in ranking.without()}
    assert list(left) == ["cy/wrong.cc", "dan/broken.cc", "dan/empty.cc"]
    assert "elements are wrong" in left["cy/wrong.cc"]
    assert "broken.cc:1: variable or field" in left["dan/broken.cc"]
    assert "neither conv_forward_cpu" in left["dan/empty.cc"]
    ann = ranking.entries["ann/cpu-new-forward.cc"]
    assert [len(ann.seconds[layer]) for layer, _ in LAYERS] == [2, 2]


def _change(folder, ranking):
    """A changed file is compared with its last sum."""
    bob = folder / "bob" / "cpu-new-forward.cc"
    slow = ranking.multiple(ranking.entries["bob/cpu-new-forward.cc"])
    bob.write_text(COURSE_2020 + "// faster\n")
    steps = _rank(folder, ranking=ranking)
    # It was checked; two contenders had a warm-up round and two timed ones, on two layers.
    assert [step for step in steps if step[0] == "checking"] == [("checking", 1, 1)]
    assert [step for step in steps if step[0] == "timing"][-1] == ("timing", 12, 12)
    entry = ranking.entries["bob/cpu-new-forward.cc"]
    assert entry.before == slow
    assert entry.rounds == 2
    assert ranking.multiple(entry) > 0
    bob.unlink()
    _rank(folder, ranking=ranking)
    assert "bob/cpu-new-forward.cc" not in ranking.entries
    ranking.entries["ann/cpu-new-forward.cc"].failure = "it ended"
    assert "ann/cpu-new-forward.cc" not in [each.name for each in ranking.in_order()]
    ranks.again(ranking)
    assert not ranking.entries["ann/cpu-new-forward.cc"].why_not
    assert ranking.in_order() == []
    assert ranking.entries[OURS].before == 1


def test_runs_are_compared_by_our_own_kernel():
    """The machine was five times as slow in the second run."""
    (layer, _), *_ = LAYERS
    seconds = {OURS: [1, 1, 5, 5], "first": [3, 3], "second": [10, 10]}
    ours = {OURS: seconds[OURS], "first": [1, 1], "second": [5, 5]}
    entries = {
        name: ranks.Entry(name, "", True, rounds=2, seconds={layer: each}, ours={layer: ours[name]})
        for name, each in seconds.items()
    }
    ranking = ranks.Ranking({"layers": {layer: layer}}, entries)
    assert [each.name for each in ranking.in_order()] == [OURS, "second", "first"]
    assert [ranking.sum(each) for each in ranking.in_order()] == [3, 6, 9]
    assert [ranking.multiple(each) for each in ranking.in_order()] == [1, 2, 3]


def _ends(file, folder):
    """Return a verdict, but end the process for "bob"."""
    if file.path.parent.name == "bob":
        os._exit(9)
    return Verdict(str(file.path), [Group("given problems", right=1)])


def test_who_ends_the_process_that_checks_spoils_nothing_else(folder, tmp_path):
    files = {name: each for name, each in ranks.find([folder]).items() if name[:3] != "dan"}
    found = dict(ranks._checked(files, functools.partial(_ends, folder=tmp_path), 1))
    said = {name[:3]: verdict.broken for name, verdict in found.items()}
    assert said == {"ann": "", "bob": "ends the process that checks it", "cy/": ""}


def _played(file, folder):
    """Return a verdict, as if "ann" lacked the memory that "cy" uses, and "bob" had no GPU while
    "cy" ran."""
    who = file.path.parent.name
    first = not (folder / who).exists()
    (folder / who).touch()
    if who == "cy":
        return Verdict(str(file.path), broken="takes more than 50% of the GPU's free memory")
    if who == "bob" and first:
        raise NoUsableGpu("out of memory")
    return Verdict(str(file.path), [Group("given problems", right=0 if first else 1)])


def test_who_failed_beside_one_that_took_the_gpu_s_memory_is_checked_again(folder, tmp_path):
    files = {name: each for name, each in ranks.find([folder]).items() if name[:3] != "dan"}
    found = list(ranks._checked(files, functools.partial(_played, folder=tmp_path), 1))
    assert [(name[:3], verdict.is_right) for name, verdict in found] == [
        ("ann", False),
        ("cy/", False),
        ("ann", True),
        ("bob", True),
    ]


@pytest.mark.slow
def test_several_gpus_share_the_files(folder, monkeypatch):
    # Processes for the CPU stand in for GPUs.
    monkeypatch.setattr(ranking_workers, "places", lambda contenders: (0, 1))
    ranking = ranks.Ranking(CONDITIONS)
    with settings.override(devices="0,1"):
        steps = _rank(folder / "ann", folder / "bob", ranking=ranking)
    # Each has a separate GPU, so their speeds do not matter here.
    ann, bob = sorted((e for e in ranking.in_order() if e.name != OURS), key=lambda e: e.name)
    assert (ann.name[:3], bob.name[:3]) == ("ann", "bob")
    assert [len(ann.seconds[layer]) for layer, _ in LAYERS] == [2, 2]
    # Ours runs beside the files on each of the two.
    assert [len(ranking.entries[OURS].seconds[layer]) for layer, _ in LAYERS] == [4, 4]
    assert steps[-1] == ("timing", 24, 24)


@pytest.mark.slow
def test_what_ends_a_share_ends_the_ranking(folder, monkeypatch):
    monkeypatch.setattr(ranking_workers, "places", lambda contenders: (0, 1))
    ranking = ranks.Ranking(CONDITIONS)
    _rank(folder, ranking=ranking, stop_after=4)
    monkeypatch.setenv("ECE408_THREADS", "many")
    with pytest.raises(InvalidSize, match="'many' is not a number of threads"):
        _rank(folder, ranking=ranking)


def _add_odd_files(folder):
    """Add odd names, a pipe, a file of gigabytes, and a CUDA file among CPU files."""
    (folder / "eve").mkdir()
    (folder / "eve" / "k.cu").write_text(DECLARED)
    os.mkfifo(folder / "eve" / "pipe.cc")
    with (folder / "eve" / "sparse.cc").open("wb") as sparse:
        sparse.truncate(6 << 30)
    for name in (b"\xff.cc", b"\x1b[31mred.cc"):
        with open(os.path.join(os.fsencode(folder / "eve"), name), "w") as file:
            file.write("")
    (folder / "=1+1").mkdir()
    (folder / "=1+1" / "k.cc").write_text("")


def test_the_command_also_of_odd_files(run_here, run_ece408, folder, tmp_path):
    _add_odd_files(folder)
    output = tmp_path / "ranking"
    some = [str(folder / name) for name in ("ann", "cy", "eve", "=1+1")]
    arguments = ("lab", "rank", *some, "--output", str(output))
    arguments += ("--layer", "fa17_1", "--batch-size", "3", "--repeat", "1", "--jobs", "1")
    result = run_ece408(*arguments, ECE408_CACHE=str(settings.cache()))
    assert result.returncode == 0, result.stderr
    told = dict(
        line.removeprefix("not ranked: ").split(": ", 1)
        for line in result.stdout.splitlines()
        if line.startswith("not ranked: ")
    )
    assert "elements are wrong" in told["cy/wrong.cc"]
    assert told["eve/k.cu"] == "it is for GPUs, and most files are for the CPU"
    assert "it is no regular file" in told["eve/pipe.cc"]
    assert "it has 6442450944 bytes, more than 4194304" in told["eve/sparse.cc"]
    assert {"eve/\\udcff.cc", "eve/\\x1b[31mred.cc"} <= told.keys()
    rows = list(csv.DictReader((output / "ranking.csv").open()))
    ranks_of = {row["name"]: row["rank"] for row in rows if row["rank"] or row["name"] == OURS}
    assert ranks_of == {OURS: "", "ann/cpu-new-forward.cc": "1"}
    remarks = {row["name"]: row["remarks"] for row in rows}
    assert remarks["cy/wrong.cc"].startswith("not ranked: b")
    assert "'=1+1/k.cc" in remarks
    assert "\x1b" not in result.stdout + (output / "ranking.csv").read_text()
    page = (output / "ranking.html").read_text()
    assert "cpu-new-forward.cc" in page
    assert str(datetime.date.today()) in page
    assert "Not ranked" in page
    assert json.loads((output / "ranking.json").read_text())["conditions"]["rounds"] == 1
    result = run_here(*arguments, "--batch-size", "5")
    assert result.returncode == 16
    assert "was measured with another layers" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "layers"), [((), ("fa20_1", "fa20_2")), (("--term", "2017fa"), ("fa17_1",))]
)
def test_the_layers_are_those_of_a_term(run_here, folder, tmp_path, options, layers):
    output = tmp_path / "ranking"
    command = ("lab", "rank", str(folder / "ann"), "--output", str(output), *options)
    result = run_here(*command, "--batch-size", "1", "--repeat", "1")
    assert result.returncode == 0, result.stderr
    conditions = json.loads((output / "ranking.json").read_text())["conditions"]
    assert list(conditions["layers"]) == [f"{layer}, 1 images" for layer in layers]


def test_bad_input_is_one_line(refused, tmp_path):
    (tmp_path / "a.cc").write_text(COURSE_2020)
    (tmp_path / "b.cu").write_text(DECLARED)
    (tmp_path / "ranking").mkdir()
    (tmp_path / "ranking" / "ranking.json").write_text("[]")
    (tmp_path / "none").mkdir()
    for arguments, text in (
        (("nowhere",), "nowhere is not there"),
        (("none",), "no kernel file in"),
        ((".",), "kernels for the CPU and for CUDA do not race"),
        (("a.cc", "--repeat", "0"), "numbers from 1 on"),
        (("a.cc", "--jobs", "0"), "--jobs takes numbers from 1 on"),
        (("a.cc",), "is no ranking"),
    ):
        paths = (str(tmp_path / arguments[0]), *arguments[1:])
        refused(16, text, "lab", "rank", *paths, "--output", str(tmp_path / "ranking"))


def test_names_are_paths_from_the_folder_that_has_them_all(tmp_path):
    for name in ("a/new.cc", "b/new.cc", "b/deep/new.cc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(COURSE_2020)
    a, b = tmp_path / "a", tmp_path / "b"
    assert sorted(ranks.find([tmp_path])) == ["a/new.cc", "b/deep/new.cc", "b/new.cc"]
    assert sorted(ranks.find([a, b])) == ["a/new.cc", "b/deep/new.cc", "b/new.cc"]
    assert sorted(ranks.find([a / "new.cc", b / "new.cc"])) == ["a/new.cc", "b/new.cc"]
    assert sorted(ranks.find([a / "new.cc"])) == ["new.cc"]


@pytest.mark.slow
def test_a_page_that_is_not_written_is_not_announced(run_here, folder, tmp_path, monkeypatch):
    failed = Mock(side_effect=InvalidSetting("no such library"))
    monkeypatch.setattr("ece408_op.cli.lab_rank.page.render", failed)
    output = tmp_path / "ranking"
    layer = ("--layer", "fa17_1", "--batch-size", "3", "--repeat", "1")
    result = run_here("lab", "rank", str(folder / "ann"), "--output", str(output), *layer)
    assert result.stdout.splitlines()[-2:] == [
        f"no {output / 'ranking.html'}: no such library",
        f"{output}: ranking.json, ranking.csv",
    ]
