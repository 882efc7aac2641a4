"""`ece408 report`: its programs are simulated, except for one real run, which is slow.

test_cpu_ladder.py runs the program that times kernels, course/test_comparison.py the milestones.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from subprocess import CompletedProcess

import pytest
from played import GPU_LINES, HEAD, NO_DRIVER, THEIRS, TIME, failing, milestone, played_ladder

from ece408_op.cli import main
from ece408_op.course.course_terms import TERMS
from ece408_op.errors import InvalidSetting, InvalidSize, NotesUnreadable, ReportUnwritable
from ece408_op.host import this_python
from ece408_op.report import ladder, make, plan


def _section(text, title):
    """Return the text below a heading of the second level."""
    parts = re.split(r"^## ", text, flags=re.M)
    return next(part for part in parts if part.startswith(title))


@pytest.fixture
def report(player, options, tmp_path):
    """Make a report; return its Markdown."""

    def made():
        make.make(options, tmp_path)
        return (tmp_path / "report.md").read_text()

    return made


def _programs(player):
    """Return the requested programs, in order."""
    return [this_python.parts(command)[1][0] for command in player.commands]


def test_what_the_cpu_computed(report, monkeypatch):
    """Outputs are verbatim; op times by size with correctness; settings without places."""
    monkeypatch.setenv("ECE408_ISA", "avx2")
    monkeypatch.setenv("ECE408_DATA", "/somewhere")
    text = report()
    settings = _section(text, "Machine and versions")
    assert "| ECE408_ISA | avx2 |" in settings
    assert "/somewhere" not in settings
    assert f"```text\n{HEAD}EvalMetric: {{'accuracy': 0.9031}}\n{THEIRS}{TIME}```" in text
    ours = HEAD + "Op Time: 0.670709\nOp Time: 0.561799\nCorrectness: 0.9031 Model: ece408\n"
    assert _section(text, "m2.1").count(f"```text\n{ours}{TIME}```") == 2
    assert "`ece408 m2.1 ece408 100 --term=2019fa`" in text
    section = _section(text, "m2.1")
    assert "| images | runs | correctness | conv1, ms | conv2, ms | sum, ms |" in section
    for size in (100, 1000):
        assert f"| {size} | 1 | 0.9031 | 671 | 562 | 1233 | 4.53 | 3179 |" in section
    assert "| 1000 | 1 | 0.9031 | 1500 | 500 | 2000 | 4.53 | 3179 |" in _section(text, "m1.1")
    assert "within the network, which is 2.2 and 0.9 times MXNet's speed" in text


def test_repeats_give_medians_and_quartiles(player, tmp_path):
    seconds = iter((0.1, 0.3, 0.2, 0.4, 9.0))

    def run():
        return milestone("m2.1", f"{next(seconds, 1.0)}")

    player.instead["m2.1 ece408 100"] = run
    make.make(plan.Options(TERMS["2019fa"], (100,), repeat=5), tmp_path)
    text = (tmp_path / "report.md").read_text()
    row = "| 100 | 5 | 0.9031 | 300 (200 to 400) | 562 (562 to 562) |"
    assert row in _section(text, "m2.1")
    assert "medians of 5 runs, with the quartiles in brackets" in _section(text, "Results")
    assert "single run;" not in _section(text, "Results")
    timed = [each for each in _programs(player) if each in ("m1.1", "m2.1", "m3.1")]
    # Interleaved; programs that cannot run are tried once.
    assert timed == ["m1.1", "m2.1", "m3.1", *4 * ["m1.1", "m2.1"]]


def test_first_come_one_sentence_and_one_chart(report, player):
    player.gpu = True
    text = report()
    title, finding, chart, caption = text.partition("<!-- notes")[0].strip().split("\n\n")
    assert title.startswith("# ")
    assert finding == (
        "Our convolution takes 671 ms in conv1 and 562 ms in conv2 for 1000 images on the CPU, "
        "within the network, which is 2.2 and 0.9 times MXNet's speed; 2.00 ms in conv1 and 8.00 "
        "ms in conv2 for 1000 images on the GPU, called alone, which is 2.0 and 0.6 times cuDNN's "
        "speed."
    )
    assert chart.startswith("![Op times")
    assert "a hollow dot a single run" in caption
    # Entries beyond most of the time, and outputs, are folded.
    section = _section(text, "m3.1")
    shown = re.sub(r"<details>.*?</details>", "", section, flags=re.S)
    assert "cuStreamSynchronize" in shown
    for folded in ("cuLaunchKernel", "Op Time"):
        assert folded in section
        assert folded not in shown
    assert "<details><summary>1 more</summary>" in section


def test_the_sentence_has_the_times_and_the_numbers_of_images_that_were_measured(player, tmp_path):
    player.gpu = True
    own = replace(played_ladder("gpu"), batch=1)
    player.instead["measure_ladder gpu"] = CompletedProcess([], 0, ladder.to_json(own), "")
    make.make(plan.Options(TERMS["2019fa"], (100,)), tmp_path)
    _, sentence, *_ = (tmp_path / "report.md").read_text().split("\n\n")
    assert "takes 671 ms in conv1 and 562 ms in conv2 for 100 images on the CPU, " in sentence
    assert "; 2.00 ms in conv1 and 8.00 ms in conv2 for 1 image on the GPU, " in sentence


def test_without_times_the_sentence_says_so(player, options, tmp_path):
    for word in ("m2.1", "measure_ladder"):
        player.instead[word] = failing(17, "it failed")
    make.make(options, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "\n\nNo convolution of ours was timed here.\n\n" in text


def test_what_cannot_run_is_said_in_place(report, player):
    text = report()
    for title in ("m1.2", "m3.1", "m4.1", "final"):
        assert "It cannot run here: the reason is given above." in _section(text, title)
    results = _section(text, "Results")
    assert f"m1.2, m3.1, m4.1, final cannot run here: {NO_DRIVER}." in results
    assert text.count(NO_DRIVER) == 1
    assert "Both tables are missing here: the reason is given above." in text
    assert "Not measured: the reason is given above." in text
    # One program of each kind found that out; the others were skipped.
    scripts = _programs(player)
    assert [s for s in scripts if s in ("m1.2", "m3.1", "m4.1", "final", "gpu")] == ["m1.2", "m3.1"]
    assert "Times of cuDNN through PyTorch are not at hand either" in _section(text, "m1.2")


def test_on_a_gpu_both_tables_and_what_the_difference_is(report, player):
    player.gpu = True
    text = report()
    section = _section(text, "m3.1")
    gpu, calls = section.index("GPU activities, m3.1"), section.index("CUDA API calls, m3.1")
    assert gpu < section.index("[CUDA memcpy HtoD]") < calls < section.index("cuStreamSynchronize")
    assert section.count("the entries above make up 90% of the time") == 2
    assert "A played note." in section
    assert "Kernels: conv1: 13_column_pairs, conv2: 14_wgmma." in section
    assert GPU_LINES + TIME in section
    difference = _section(text, "Kernels and CUDA API calls")
    assert "49.0 ms in sum, 40.0 ms of them copies" in difference
    assert "the most of it in `cuStreamSynchronize`" in difference
    # The effect of each kernel.
    section = _section(text, "Optimisations")
    three = "8.000 (8.000 to 8.000)"
    assert f"| 1_naive | {three} |  | {three} |  |" in section
    gain = "8.00x over 1_naive"
    assert f"| 10_tf32 (below float32) | 1.000 (1.000 to 1.000) | {gain} |" in section
    # Relative to 1_naive, the accurate one before it.
    assert "Effect: conv1 2.000 ms (4.00x over 1_naive).\n" in section
    assert (
        "The idea of reference. Why reference.\n\nEffect: conv1 60.0 ms; conv2 60.0 ms.\n"
        in section
    )
    assert "conv2 3.000 ms by winograd (20.00x over reference)." in section
    assert "| cuDNN NCHW, a library | 4.000 (1 run) |  |" in section
    assert re.search(
        r"^\| conv1 \| 13_column_pairs \| \d+ \| \d+ \| 0.500 \| 25% \|$", section, re.M
    )
    assert "above 100%" not in text


def test_above_the_floor_is_explained(report, player):
    player.gpu = True
    fast = replace(played_ladder("cpu"), floors_ms={"conv1": 4.0, "conv2": 9.0})
    player.instead["measure_ladder cpu"] = CompletedProcess([], 0, ladder.to_json(fast), "")
    slower = "this machine was slower when its ceilings were measured."
    own = replace(played_ladder("gpu"), floors_ms={"conv1": 4.0, "conv2": 9.0})
    player.instead["measure_ladder gpu"] = CompletedProcess([], 0, ladder.to_json(own), "")
    section = _section(report(), "Optimisations")
    fewer = "13_column_pairs multiplies less than the textbook loops, for which the floor counts"
    assert f"conv1 is above 100% of the floor: {fewer}, or {slower}" in section
    assert re.search(r"^\| conv2 \| avx2 \|.*\| 300% \|$", section, re.M)
    assert f"conv1 is above 100% of the floor: {slower}" in section
    assert "conv2 is above 100% of the floor: winograd multiplies less than" in section


def test_notes_survive(report, tmp_path):
    path = tmp_path / "report.md"
    note = "## A heading\n\n\n| a | b |\n| --- | --- |\n| `c` | {{ d }} |"
    first = report()
    assert first.count("<!-- notes: ") == first.count("<!-- end of notes -->") > 10
    path.write_text(first.replace("<!-- notes: m2.1 -->\n", f"<!-- notes: m2.1 -->\n{note}\n"))
    second = report()
    assert f"<!-- notes: m2.1 -->\n{note}\n<!-- end of notes -->" in second
    assert report().count(note) == 1
    html = (tmp_path / "report.html").read_text()
    assert "<td><code>c</code></td>\n<td>{{ d }}</td>" in html
    assert "<!--" not in html


def test_notes_on_a_section_that_is_gone_are_kept(report, player, tmp_path):
    path = tmp_path / "report.md"
    player.gpu = True
    text = report()
    path.write_text(text.replace("<!-- notes: 1_naive -->\n", "<!-- notes: 1_naive -->\nSlow.\n"))
    player.gpu = False
    assert "<!-- notes: 1_naive -->\nSlow.\n<!-- end of notes -->" in _section(
        report(), "Other notes"
    )
    player.gpu = True
    text = report()
    assert "Slow." in _section(text, "Optimisations")
    assert "Other notes" not in text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<!-- notes: a -->\nlost\n", "has notes on a without an end"),
        ("<!-- end of notes -->\n", "line 1: '<!-- end of notes -->' is out of place"),
        ("<!-- notes: a -->\n<!-- notes: b -->\n<!-- end of notes -->\n", "line 2"),
        (2 * "<!-- notes: a -->\n<!-- end of notes -->\n", "line 3"),
    ],
)
def test_notes_that_would_be_lost_stop_the_report(player, options, tmp_path, text, reason):
    (tmp_path / "report.md").write_text(text)
    with pytest.raises(NotesUnreadable, match=re.escape(reason)):
        make.make(options, tmp_path)
    assert not player.commands
    assert (tmp_path / "report.md").read_text() == text


def test_a_report_that_was_interrupted_goes_on(player, options, tmp_path):
    def stop():
        raise KeyboardInterrupt

    player.instead["profile"] = stop
    with pytest.raises(KeyboardInterrupt):
        make.make(options, tmp_path)
    ran = len(player.commands)
    assert make.results_kept(options, tmp_path) == (3, 15)
    assert not (tmp_path / "report.md").exists()
    player.instead.clear()
    player.commands.clear()
    make.make(options, tmp_path)
    timed = [each for each in _programs(player) if each != "profile"]
    assert "m1.1" not in timed
    assert "m2.1" not in timed
    assert ran + len(player.commands) > 8
    assert "EvalMetric" in (tmp_path / "report.md").read_text()


def test_a_complete_report_is_run_again(report, player, tmp_path):
    report()
    count = len(player.commands)
    report()
    assert len(player.commands) == 2 * count
    assert json.loads((tmp_path / "results" / "state.json").read_text())["finished"]


def test_other_options_do_not_go_on(player, options, tmp_path):
    player.instead["profile"] = failing(1, "not now")
    make.make(options, tmp_path)
    other = plan.Options(options.term, (100,))
    make.make(other, tmp_path)
    kept = {path.name for path in (tmp_path / "results").glob("m2.1*")}
    assert kept == {"m2.1-100.json"}


def test_written_again_without_running_anything(report, player, tmp_path):
    text = report()
    player.commands.clear()
    (tmp_path / "report.html").unlink()
    (tmp_path / "report.md").write_text(
        text.replace("<!-- notes: results -->\n", "<!-- notes: results -->\nMine.\n")
    )
    make.write(tmp_path)
    assert not player.commands
    assert "<p>Mine.</p>" in (tmp_path / "report.html").read_text()


def test_a_run_that_fails_is_said_in_place(player, options, tmp_path):
    player.instead["m1.1"] = failing(12, "10000 images need 4 GiB")
    made = make.make(options, tmp_path)
    assert [f.partition(":")[0] for f in made.failures] == ["m1.1, 1000 images", "profile of m1.1"]
    section = _section((tmp_path / "report.md").read_text(), "m1.1")
    assert "| 1000 | 1 | failed: 10000 images need 4 GiB |" in section
    assert "No profile of this run: the reason is given above." in section


def test_without_a_profiler_the_rest_is_there(report, player, options, tmp_path):
    player.gpu = True
    player.instead["profile-m3.1"] = failing(26, "CUPTI for Python is not installed")
    assert not make.make(options, tmp_path).failures
    text = (tmp_path / "report.md").read_text()
    reason = "CUPTI for Python is not installed."
    assert f"Both tables are missing here: {reason}" in text
    assert "No profile of this run: the reason is given above." in _section(text, "m3.1")
    assert text.count(reason) == 1
    assert "Correctness: 0.9031 Model: ece408" in _section(text, "m3.1")


def test_models_that_are_not_run_are_named(player, tmp_path):
    make.make(plan.Options(TERMS["2017fa"], (100,)), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "Of this term's models, ece408-high is run; `ece408 compare` runs them all." in text


def test_sizes():
    assert plan.parse_sizes("1000, 10,1000") == (10, 1000)
    for text in ("", "0", "10001", "a", "10,,20", "-1"):
        with pytest.raises(InvalidSize, match="is not a list of sizes"):
            plan.parse_sizes(text)


def test_what_cannot_be_read_back_is_no_ladder():
    with pytest.raises(InvalidSetting, match="no times of kernels"):
        ladder.from_json("{}")


@pytest.mark.parametrize("name", ["report.md", "report.html", "results"])
def test_something_in_the_way(player, options, tmp_path, name):
    path = tmp_path / name
    path.touch() if name == "results" else path.mkdir()
    with pytest.raises(ReportUnwritable, match=r"cannot write the report to .*; choose another"):
        make.make(options, tmp_path)
    assert not player.commands


def test_the_command(player, tmp_path, capsys, refused):
    (tmp_path / "file").touch()
    folder = str(tmp_path / "out")
    assert main.execute(["report", "--output", folder, "--sizes", "100"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"{folder}/report.html", f"{folder}/report.md"]
    player.instead["m2.1"] = failing(17, "the operator failed")
    assert main.execute(["report", "--output", folder, "--sizes", "100"]) == 1
    assert "ece408: m2.1, 100 images: the operator failed" in capsys.readouterr().err
    for arguments, code, message in (
        (["--output", str(tmp_path / "file" / "out")], 29, "cannot write the report to"),
        (["--output", str(tmp_path / "new"), "--reuse"], 29, "no complete results in"),
        (["--output", folder, "--sizes", "ten"], 3, "'ten' is not a list of sizes"),
        (["--output", folder, "--repeat", "0"], 3, "0 is not a number of runs; give 1 or more"),
        (["--output", folder, "--term", "1999fa"], 4, "unknown term"),
    ):
        refused(code, message, "report", *arguments)


def test_ctrl_c_says_what_is_kept(player, tmp_path, capsys):
    def stop():
        raise KeyboardInterrupt

    player.instead["m4.1"] = stop
    player.gpu = True
    arguments = ["report", "--output", str(tmp_path), "--sizes", "100"]
    assert main.execute(arguments) == 130
    error = capsys.readouterr().err
    assert f"ece408: 3 of 12 results are kept in {tmp_path}; the same command goes on" in error


@pytest.mark.parametrize("module", ["jinja2", "markdown_it", "matplotlib.figure"])
def test_without_a_library(player, options, tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidSetting, match=r"pip install 'ece408_op\[report\]'"):
        make.make(options, tmp_path)
    assert not player.commands


@pytest.mark.slow
def test_a_real_report(fashion_mnist, tmp_path):
    command = [sys.executable, "-m", "ece408_op", "report", "--sizes", "20", "--term", "2018sp"]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*command, "--output", str(tmp_path)], capture_output=True, text=True,
                         env=hidden, timeout=300)  # fmt: skip
    assert run.returncode == 0, run.stderr
    text = (tmp_path / "report.md").read_text()
    for script in ("m1.1", "m2.1"):
        section = _section(text, script)
        assert re.search(r"^\| 20 \| 1 \| (0\.\d+|1\.0) \|", section, re.M)
        assert "make up 90% of the time" in section
    steps = _section(text, "Optimisations")
    assert "conv1 is computed by " in steps
    single = r"[\d.]+ \(1 run\)"
    assert re.search(rf"^\| reference \| {single} \|  \| {single} \|  \|$", steps, re.M)
    several = r"[\d.]+ \([\d.]+ to [\d.]+\)"
    assert re.search(rf"^\| baseline \| {several} \| [\d.]+x over reference \|", steps, re.M)
    assert re.search(r"conv1 [\d.]+ ms by \w+ \([\d.]+x over reference\)", steps)
