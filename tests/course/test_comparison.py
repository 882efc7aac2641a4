"""`ece408 compare`: child processes are simulated by recorded outputs, except for one real run."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ece408_op.cli import main
from ece408_op.course import comparison, comparison_files, comparison_plot, comparison_table
from ece408_op.course.comparison import Options, Row, Run, plan, read_run
from ece408_op.course.course_terms import BASELINE, TERMS
from ece408_op.course.milestone import MILESTONES
from ece408_op.errors import NoUsableGpu
from ece408_op.host import this_python
from ece408_op.host.interruptible import interrupts_later

NATIVE = """\
Loading fashion-mnist data... done
Loading model... done
New Inference
EvalMetric: {'accuracy': 0.9031}
"""
NATIVE_TIME = """\
ece408: MXNet's convolution: 1.006064 s
ece408: MXNet's convolution: 0.500000 s
12.74user 3.51system 0:09.36elapsed 174%CPU (0avgtext+0avgdata 3257008maxresident)k
2048inputs+0outputs (4major+793326minor)pagefaults 0swaps
"""
OURS = """\
Loading fashion-mnist data... done
Loading model... done
New Inference
Op Time: 0.670709
Op Time: 0.561799
Correctness: 0.9031 Model: ece408
"""
OURS_TIME = """\
4.33user 3.01system 1:02:03elapsed 162%CPU (0avgtext+0avgdata 3255240maxresident)k
672inputs+0outputs (2major+793056minor)pagefaults 0swaps
"""
NO_DRIVER = "no NVIDIA driver (libcuda.so.1 is not there); the CPU milestones need none"


def _result(stdout="", stderr="", code=0):
    return subprocess.CompletedProcess([], code, stdout, stderr)


def _jobs(*terms, **options):
    return plan([TERMS[name] for name in terms or ("2019fa",)], Options(**options))


def _job(script, **options):
    return next(job for job in _jobs(**options) if job.milestone.name == script)


def _play(command):
    """Return a milestone's result on a machine without a GPU."""
    milestone = MILESTONES[this_python.parts(command)[1][0]]
    if milestone.on_gpu:
        return _result(stderr=f"ece408: error: {NO_DRIVER}\n", code=NoUsableGpu.exit_code)
    layers = 1 if "--term=2017fa" in command else 2
    if milestone.own_operator:
        stdout = OURS if layers == 2 else OURS.replace("Op Time: 0.561799\n", "")
        return _result(stdout, OURS_TIME)
    second = "ece408: MXNet's convolution: 0.500000 s\n"
    return _result(NATIVE, NATIVE_TIME.replace(second, "") if layers == 1 else NATIVE_TIME)


@pytest.fixture
def played(monkeypatch, elsewhere):
    """Replace child processes by simulated ones; return the list of their commands."""
    commands = []

    def run(command):
        commands.append(command)
        return _play(command)

    monkeypatch.setattr(comparison, "run_process", run)
    return commands


@pytest.fixture
def no_data(monkeypatch):
    """Simulated runs load no data, so none need be prepared."""
    monkeypatch.setattr(comparison, "prepare_data", lambda jobs: None)


def test_milestones_are_read():
    run = read_run(_job("m1.1"), _result(NATIVE, NATIVE_TIME))
    times = (1.006064, 0.5)
    assert run == Run("m1.1", "2019fa", "baseline", 10000, 0.9031, times, 9.36, 3257008 * 1024)
    assert not run.failed
    run = read_run(
        _job("m2.1", size="100"), _result(OURS, f"[12:00:00] a warning\n{OURS_TIME}hint\n")
    )
    times = (0.670709, 0.561799)
    assert run == Run("m2.1", "2019fa", "ece408", 100, 0.9031, times, 3723.0, 3255240 * 1024)
    # The batches of a layer are summed.
    stdout = OURS.replace("Correctness", "Op Time: 1.000000\nOp Time: 2.000000\nCorrectness")
    run = read_run(_job("m2.1"), _result(stdout, OURS_TIME))
    assert run.op_seconds == pytest.approx((1.670709, 2.561799))


@pytest.mark.parametrize(
    ("stdout", "stderr"),
    [
        ("", OURS_TIME),
        (OURS, ""),
        (OURS.replace("Op Time: 0.561799\n", ""), OURS_TIME),
        (NATIVE, OURS_TIME),
        (OURS.replace("Correctness: 0.9031", "Correctness: nonsense"), OURS_TIME),
    ],
)
def test_output_that_cannot_be_read_is_a_failure(stdout, stderr):
    run = read_run(_job("m2.1"), _result(stdout, stderr))
    assert run.error.startswith("cannot read what it printed: ")
    assert run.failed
    assert run.accuracy is None


@pytest.mark.parametrize(
    ("code", "stderr", "error"),
    [
        (12, "a hint\nece408: error: 10000 images need 4 GiB\n", "10000 images need 4 GiB"),
        (1, "Traceback\n  somewhere\nKeyError: 'x'\n", "KeyError: 'x'"),
        (1, "", "exit code 1, without a message"),
        (-signal.SIGKILL, "", "killed (SIGKILL), perhaps because memory ran out; --batch-size"),
        (-signal.SIGSEGV, "half a line", "ended by signal 11 (Segmentation fault)"),
    ],
)
def test_a_run_that_fails_says_why(code, stderr, error):
    run = read_run(_job("m1.1"), _result(NATIVE, stderr, code))
    assert run.error.startswith(error)
    assert run.exit_code == code
    assert run.failed
    assert run.accuracy is None


def test_a_missing_gpu_is_no_failure():
    run = read_run(_job("m3.1"), _play(_job("m3.1").command))
    assert run.error == NO_DRIVER
    assert run.lacks_gpu
    assert not run.failed


def test_every_milestone_runs_with_every_model_of_its_kind():
    found = {(job.milestone.name, job.request.model) for job in _jobs("2017fa")}
    own = {name for name, milestone in MILESTONES.items() if milestone.own_operator}
    expected = {(name, BASELINE) for name in MILESTONES if name not in own}
    expected |= {(name, model) for name in own for model in ("ece408-high", "ece408-low")}
    assert found == expected
    terms = [job.request.term.name for job in _jobs(*TERMS)]
    assert list(dict.fromkeys(terms)) == list(TERMS)


def test_commands():
    start = tuple(this_python.running("ece408_op"))
    assert _job("m1.1").command == (*start, "m1.1", "baseline", "10000", "--term=2019fa")
    options = {"batch_size": "50", "threads": "1", "data": "-dir"}
    ours = _job("m2.1", size="100", backend="reference", **options)
    common = ("--threads=1", "--data=-dir")
    assert ours.command == (
        *(*start, "m2.1", "ece408", "100", "--term=2019fa", "--batch-size=50"),
        *("--backend=reference", *common),
    )
    native = _job("m1.1", size="100", backend="reference", **options)
    assert native.command[-3:] == ("--batch-size=50", *common)


def test_kernels_go_to_the_milestones_that_run_them_and_precision_to_ours():
    for kernel, scripts in (
        ("mine.cc", {"m2.1"}),
        ("mine.cu", {"m3.1", "m4.1", "final"}),
        ("1_naive", {"m3.1", "m4.1", "final"}),
    ):
        jobs = _jobs(kernel=kernel, precision="tf32", gpu="1")
        taken = {job.milestone.name for job in jobs if f"--kernel={kernel}" in job.command}
        assert taken == scripts
        own = {job.milestone.name for job in jobs if "--precision=tf32" in job.command}
        assert own == {"m2.1", "m3.1", "m4.1", "final"}
        on_gpu = {job.milestone.name for job in jobs if "--gpu=1" in job.command}
        assert on_gpu == {"m1.2", "m3.1", "m4.1", "final"}


def _clocked(*seconds):
    """Return a runner whose runs take these times, in order."""
    clocks = iter(seconds)

    def run(command):
        milli = f"{next(clocks):05.2f}"
        stdout = OURS.replace("0.670709", f"0.{milli[:2]}")
        return _result(stdout, OURS_TIME.replace("1:02:03", f"0:{milli}"))

    return run


def test_repeats_give_the_median_of_each_figure_and_keep_all_samples():
    (row,) = comparison.compare([_job("m2.1")], 3, _clocked(10.5, 40, 20))
    assert [run.elapsed_s for run in row.samples] == [10.5, 40, 20]
    assert row.summary.elapsed_s == 20
    assert row.summary.op_seconds == (0.20, 0.561799)
    assert row.summary.accuracy == 0.9031
    assert row.summary.peak_bytes == 3255240 * 1024
    (even,) = comparison.compare([_job("m2.1")], 2, _clocked(10, 20))
    assert even.summary.elapsed_s == 15


def test_repeats_go_in_rounds_and_what_failed_is_not_repeated():
    scripts = []

    def run(command):
        scripts.append(this_python.parts(command)[1][0])
        return _play(command)

    jobs = [_job(script) for script in ("m1.1", "m1.2", "m2.1")]
    rows = comparison.compare(jobs, 3, run)
    assert scripts == ["m1.1", "m1.2", "m2.1", *2 * ["m1.1", "m2.1"]]
    assert [len(row.samples) for row in rows] == [3, 1, 3]


def test_a_later_run_that_fails_is_the_rows_summary():
    results = iter([_result(OURS, OURS_TIME), _result(code=1, stderr="ece408: error: oh\n")])
    (row,) = comparison.compare([_job("m2.1")], 3, lambda command: next(results))
    assert row.summary.error == "oh"
    assert row.summary.failed
    assert len(row.samples) == 2


def _rows():
    runs = [
        Run("m1.1", "2019fa", "baseline", 10000, 0.9031, (1.006064, 0.5), 9.36, 3180 << 20),
        Run("m2.1", "2019fa", "ece408", 10000, 0.9, (0.670709, 0.001), 104.5, 96 << 20),
        Run("m2.1", "2017fa", "ece408-high", 10000, 0.87, (0.0004,), 1.5, 150 << 20),
        Run("m3.1", "2019fa", "ece408", 10000, exit_code=18, error="no NVIDIA driver; none"),
        Run("m4.1", "2019fa", "ece408", 10000, exit_code=1, error="out of luck"),
    ]
    return [Row((run,)) for run in runs]


def test_table():
    head = "script  term    model        images  accuracy  conv1 ms  gain  conv2 ms    gain"
    lines = [
        f"{head}  program s  peak MiB",
        "m1.1    2019fa  baseline      10000    0.9031  1006.064         500.000               "
        "9.36      3180",
        "m2.1    2019fa  ece408        10000    0.9000   670.709  1.5x     1.000  500.0x     "
        "104.50        96",
        "m2.1    2017fa  ece408-high   10000    0.8700     0.400               -               "
        "1.50       150",
        "m3.1    2019fa  ece408        10000       (1)",
        "m4.1    2019fa  ece408        10000       (2)",
        *("m4.1    2017fa  ece408-high   10000       (1)", ""),
        "gain: how many times as fast as MXNet's own convolution on the CPU (m1.1).",
        *("Single runs; --repeat N gives medians.", "(1) not run: no NVIDIA driver; none"),
        "(2) failed: out of luck",
    ]
    lacking = Run(
        "m4.1", "2017fa", "ece408-high", 10000, exit_code=18, error=_rows()[3].summary.error
    )
    assert comparison_table.table([*_rows(), Row((lacking,))]).splitlines() == lines


def test_table_says_how_many_runs_its_medians_have():
    rows = comparison.compare([_job("m2.1")], 3, _clocked(10.5, 40, 20))
    assert comparison_table.table(rows).splitlines()[-1] == "Medians of 3 runs."


def test_json(tmp_path, mx):
    path = tmp_path / "new" / "runs.json"
    (row,) = comparison.compare([_job("m2.1")], 2, _clocked(10, 20))
    comparison_files.write_json(path, [row, *_rows()[-2:]], Options(size="10000", threads="2"))
    content = json.loads(path.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", content["date"])
    assert set(content["machine"]) == {
        *("cpu", "cores", "gpus", "python", "numpy", "mxnet", "ece408_op")
    }
    assert content["machine"]["mxnet"] == mx.__version__
    assert content["options"]["threads"] == "2"
    ours, lacking, failed = content["runs"]
    assert ours["elapsed_s"] == 15
    assert [run["elapsed_s"] for run in ours["samples"]] == [10, 20]
    assert ours["op_seconds"][1] == 0.561799
    assert (lacking["exit_code"], lacking["accuracy"]) == (18, None)
    assert failed["samples"][0]["error"] == "out of luck"


@pytest.mark.parametrize(
    ("name", "magic"),
    [("plot.png", b"\x89PNG\r\n"), ("plot.SVG", b"<?xml"), ("new/plot.pdf", b"%PDF-")],
)
def test_plot_is_written(tmp_path, name, magic):
    path = tmp_path / name
    assert comparison_plot.write_plot(path, _rows())
    assert path.read_bytes().startswith(magic)
    assert list(path.parent.iterdir()) == [path]


def test_plot_shows_every_run_with_figures_and_its_units():
    figure = comparison_plot.draw([row.summary for row in _rows()[:3]], repeat=5)
    ops, program = figure.axes
    labels = ["m1.1 baseline (2019fa)", "m2.1 ece408 (2019fa)", "m2.1 ece408-high (2017fa)"]
    assert [label.get_text() for label in ops.get_yticklabels()] == labels
    assert (ops.get_xlabel(), program.get_xlabel()) == ("op time (ms)", "program time (s)")
    conv1, conv2 = ops.containers
    assert [bar.get_width() for bar in conv1] == pytest.approx([1006.064, 670.709, 0.4])
    assert [bar.get_x() for bar in conv2] == pytest.approx([1006.064, 670.709, 0.4])
    assert [bar.get_width() for bar in conv2] == pytest.approx([500, 1, 0])
    assert [bar.get_width() for bar in program.containers[0]] == [9.36, 104.5, 1.5]
    (title,) = figure.texts
    assert title.get_text() == "10000 images, terms 2019fa, 2017fa, median of 5 runs"


def test_plot_without_matplotlib(tmp_path, played, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main.execute(["compare", "5", "--plot", str(tmp_path / "plot.png")]) == 16
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("pip install 'ece408_op[plot]'\n")
    assert (captured.out, played) == ("", [])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["0"], 3, "'0' is not a size"),
        (["5", "--batch-size", "0"], 3, "'0' is not a batch size"),
        (["5", "--repeat", "0"], 3, "0 is not a number of runs; give 1 or more"),
        (["5", "--threads", "none"], 3, "'none' is not a number of threads"),
        (["5", "--term", "1999fa"], 4, "unknown term '1999fa'"),
        (["5", "--data", "/nowhere"], 5, "/nowhere"),
        (["5", "--backend", "quantum"], 16, "unknown backend 'quantum'"),
        (["5", "--plot", "plot.bmp"], 16, "plot.bmp does not say which kind of picture"),
        (["5", "--json", "{file}/runs.json"], 10, "cannot write"),
        (["5", "--plot", "{file}/plot.png"], 10, "cannot write"),
        (["5", "--json", "/dev/null"], 10, "cannot write /dev/null: something that is not a file"),
    ],
)
def test_what_cannot_work_is_said_before_the_runs(
    tmp_path, played, refused, arguments, code, message
):
    (tmp_path / "file").touch()
    arguments = [text.replace("{file}", str(tmp_path / "file")) for text in arguments]
    refused(code, message, "compare", *arguments)
    assert played == []


def test_the_command_prints_the_table_only(tmp_path, played, capsys, no_data):
    files = ["--json", str(tmp_path / "runs.json"), "--plot", str(tmp_path / "plot.svg")]
    assert main.execute(["compare", "20", "--term", "2017fa", "--term", "2019fa", *files]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.split("\n\n")[0].splitlines()
    assert len(lines) == 1 + len(_jobs("2017fa", "2019fa"))
    assert sum(line.endswith("  (1)") for line in lines) == sum(
        job.milestone.on_gpu for job in _jobs("2017fa", "2019fa")
    )
    assert captured.out.endswith(f"\n(1) not run: {NO_DRIVER}\n")
    assert len(json.loads((tmp_path / "runs.json").read_text())["runs"]) == len(lines) - 1
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


def test_a_failure_makes_the_exit_code_1_after_all_rows(no_data, monkeypatch, capsys):
    def run(command):
        return (
            _result(stderr="ece408: error: oh\n", code=9) if "m1.1" in command else _play(command)
        )

    monkeypatch.setattr(comparison, "run_process", run)
    assert main.execute(["compare", "20"]) == 1
    captured = capsys.readouterr()
    assert re.search(r"^m1\.1 .*  \(1\)$", captured.out, re.M)
    assert "\n(1) failed: oh\n" in captured.out
    assert re.search(r"^m2\.1 .*  0\.9031 ", captured.out, re.M)


def test_a_plot_without_figures_is_said(no_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison, "run_process", lambda command: _result(code=9))
    path = tmp_path / "plot.png"
    assert main.execute(["compare", "20", "--plot", str(path)]) == 1
    assert capsys.readouterr().err == f"ece408: no run has figures to draw to {path}\n"


def test_each_size_of_images_is_prepared_once(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        comparison.fashion_data, "load", lambda kind, size: sizes.append((kind, size))
    )
    comparison.prepare_data(_jobs("2019fa", "2017fa"))
    assert sizes == [("t10k", 70), ("t10k", 28)]


@pytest.mark.slow
def test_compare_for_real(run_ece408, fashion_mnist, tmp_path):
    files = ("--json", str(tmp_path / "runs.json"), "--plot", str(tmp_path / "plot.png"))
    result = run_ece408("compare", "50", "--threads", "1", *files)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()[: len(MILESTONES) + 1]
    assert max(map(len, lines)) <= 100
    rows = {line.split()[0]: line.split() for line in lines}
    assert list(rows) == ["script", *MILESTONES]
    native, ours = rows["m1.1"], rows["m2.1"]
    assert native[1:5] == ["2019fa", "baseline", "50", ours[4]]
    assert ours[1:4] == ["2019fa", "ece408", "50"]
    assert all(float(each) > 0 for each in native[5:8])
    for at, theirs in ((5, native[5]), (7, native[6])):
        assert float(ours[at + 1][:-1]) == pytest.approx(float(theirs) / float(ours[at]), abs=0.1)
    # Python with MXNet loaded takes more than 100 MiB, and 50 images add little.
    assert 100 < int(ours[10]) < 1000
    runs = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert [run["script"] for run in runs] == list(MILESTONES)
    assert (tmp_path / "plot.png").stat().st_size > 10000


def test_a_child_deaf_to_ctrl_c_is_killed(monkeypatch):
    monkeypatch.setattr(comparison, "_SECONDS_TO_END", 0.1)
    ignore = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN);"
    command = [sys.executable, "-c", ignore + "print('deaf', flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "deaf\n"
        comparison._end(process)
    assert process.returncode == -signal.SIGKILL


def test_ctrl_c_takes_effect_when_a_process_has_been_started():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupts_later() as interrupt:
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupt()
        with interrupts_later() as interrupt:
            pass
        interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_child_too(fashion_mnist):
    with subprocess.Popen(
        [sys.executable, "-m", "ece408_op", "compare"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job, as in continuous integration, ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := children.read_text().split()):
            assert process.poll() is None
            time.sleep(0.05)
        # To this process alone; a terminal would interrupt the child, too.
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert (stdout, stderr) == ("", "ece408: error: interrupted\n")
    assert process.returncode == 130
    assert not Path(f"/proc/{found[0]}").exists()
