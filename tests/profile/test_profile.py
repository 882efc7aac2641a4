"""Profiles: their records, tables in nvprof's columns, and files."""

import dataclasses
import json
import sys
import types

import pytest
from cases import every
from places import DATA

from ece408_op import errors
from ece408_op.operator import environment
from ece408_op.profile import (
    activities,
    cupti_recorder,
    kernel_figures,
    layers,
    mxnet_recorder,
    ncu,
    occupancy,
    profile_summary,
    recording,
    tables,
    trace,
)
from ece408_op.profile.activities import Activity, Profile
from ece408_op.profile.demangle import demangle
from ece408_op.profile.gpu_ceilings import GpuCeilings

RECORDED = {name: DATA / f"profile_{name}.json" for name in ("cpu", "gpu")}
HOPPER = occupancy.Limits(threads=2048, blocks=32, registers=65536, shared=233472, reserved=1024)
CEILINGS = GpuCeilings(copy_gbs=4000, fp32_gflops=50_000, tf32_gflops=400_000)


@pytest.fixture(params=sorted(RECORDED))
def recorded(request):
    return activities.read(RECORDED[request.param])


def _kernel(name="k", start=0, duration=1, **details):
    shape = {"grid": [9, 1, 1], "block": [256, 1, 1], "registers": 32, "static_shared": 0}
    details = {**shape, "dynamic_shared": 0, "local": 0, "device": 0, **details}
    return Activity("kernel", name, start, duration, "GPU 0 stream 7", details)


def _call(layer, start, duration, kernel="13_column_pairs", **details):
    details = {"layer": layer, "direction": "forward", "kernel": kernel, **details}
    details = {"problem": "b1,c1,h9,w9,m3,k5x5", "flops": 8_000, "bytes": 4_000, **details}
    return Activity("op_call", f"{layer} forward", start, duration, "thread 1", details)


def _profile(*found, **more):
    return Profile(tuple(found), ("m2.1",), 1.5, 0, {"cpu": "one"}, **more)


def test_a_table_has_nvprofs_columns_and_order(recorded):
    """The line is below the first entries that make up 90 percent."""
    assert len(tables.sections(recorded)) in (1, 3)
    for section in tables.sections(recorded):
        header, *lines = tables.text(section.rows).splitlines()
        assert header.split() == ["Time(%)", "Time", "Calls", "Avg", "Min", "Max", "Name"]
        rows = [line for line in lines if not line.startswith("---")]
        shares = [float(row.split("%")[0]) for row in rows]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(100, abs=0.01 * len(shares))
        # Numbers are right-aligned to their titles, names left-aligned.
        for end in (7, 17, 27, 37, 47, 57):
            assert all(row[end - 1] != " " and row[end] == " " for row in [header, *rows])
        assert all(row[57:59] == "  " and row[59] != " " for row in [header, *rows])
        for row in section.rows:
            each = [a.duration_ns for a in recorded.activities if a.name == row.name]
            assert (row.calls, row.total_ns) == (len(each), sum(each))
            assert (row.min_ns, row.max_ns) == (min(each), max(each))
            assert row.avg_ns == sum(each) / len(each)
        (mark,) = (number for number, line in enumerate(lines) if line.startswith("---"))
        total = sum(row.total_ns for row in section.rows)
        above = [row.total_ns for row in section.rows[:mark]]
        assert sum(above) >= 0.9 * total > sum(above[:-1])
        assert lines[mark].endswith(f"make up 90% of the time ({sum(above) / total:.2%})")


def test_exactly_90_percent_is_enough_and_equal_entries_are_sorted_by_name():
    times = {"c": 10, "b": 45, "a": 45}
    rows = tables.summarize(_kernel(name, duration=ns) for name, ns in times.items())
    assert [row.name for row in rows] == ["a", "b", "c"]
    assert tables.marked(rows) == 2
    assert tables.marked(()) == 0


@every(
    case=[
        *((0, "0ns"), (224, "224ns"), (999.6, "1.0000us"), (1153, "1.1530us")),
        *((737_970, "737.97us"), (999_994, "999.99us"), (999_996, "1.0000ms")),
        *((9_999_960, "10.000ms"), (16_793_000, "16.793ms"), (1_994_640_000, "1.99464s")),
        *((61_994_640_000, "61.9946s"), (1_234_567_890_000, "1234.57s")),
    ]
)
def test_times_look_as_nvprofs(case):
    assert tables.time(case[0]) == case[1]


def test_a_profile_survives_its_file(recorded, written):
    path = written("p.json", activities.to_json(recorded, tables=["ignored"]))
    assert activities.read(path) == recorded


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no profile of ours"),
        ("[]", "no profile of ours"),
        ('{"schema": 1}', "no profile of ours"),
        ('{"schema": 99}', "schema 99 cannot be read"),
    ],
)
def test_other_files_are_no_profiles(text, message, tmp_path):
    with pytest.raises(errors.InvalidSetting, match=message):
        activities.from_json(text)
    with pytest.raises(errors.InvalidSetting, match="cannot be read"):
        activities.read(tmp_path / "none.json")


def test_a_trace_has_every_activity_on_its_track(recorded):
    events = json.loads(trace.to_trace(recorded))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(complete) == len(recorded.activities)
    for event, activity in zip(complete, recorded.activities):
        assert (event["name"], event["cat"]) == (activity.name, activity.kind)
        assert names[event["pid"], event["tid"]] == activity.track
        assert event["ts"] == pytest.approx(activity.start_ns / 1e3)
        assert event["dur"] == pytest.approx(activity.duration_ns / 1e3)
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"CPU", "GPU"}


def test_activities_of_one_track_follow_or_enclose_each_other(recorded):
    """Perfetto drops activities that overlap partially."""
    by_track = {}
    for each in activities.in_order(recorded.activities):
        open_ones = by_track.setdefault(each.track, [])
        while open_ones and open_ones[-1].end_ns <= each.start_ns:
            open_ones.pop()
        # MXNet's profiler and the operator's log end a call within microseconds of each other.
        assert not open_ones or each.end_ns <= open_ones[-1].end_ns + 1000
        open_ones.append(each)


def test_work_on_the_gpu_gets_the_layer_of_the_call_around_it():
    found = layers.with_layers(
        [
            _kernel("before", 0, 5),
            _kernel("first", 12, 5),
            _kernel("second", 42, 5),
            _kernel("in both", 56, 2),
            _call("conv1", 10, 20),
            _call("conv2", 40, 20),
            _call("conv3", 55, 20),
        ]
    )
    assert {a.name: a.details.get("layer") for a in found if a.kind == "kernel"} == {
        "before": None,
        "13_column_pairs:first": "conv1",
        "13_column_pairs:second": "conv2",
        "in both": None,
    }


def test_figures_of_a_kernel():
    found = layers.with_layers(
        [
            _call("conv1", 0, 10_000, flops=6_000_000_000, bytes=4_000_000),
            _kernel("pairs", 1_000, 2_000),
            _kernel("pairs", 2_000, 2_000, local=8),  # 1 us of it beside the other
            _call("conv1", 20_000, 10_000, flops=6_000_000_000, bytes=4_000_000),
            _kernel("pairs", 21_000, 3_000),
        ]
    )
    (figure,) = kernel_figures.figures(found, CEILINGS, lambda device: HOPPER)
    assert (figure.layer, figure.kernel, figure.calls) == ("conv1", "13_column_pairs", 2)
    assert figure.milliseconds == pytest.approx(0.003)
    assert figure.gflops == pytest.approx(6_000_000_000 / 0.003 / 1e6)
    assert figure.gbs == pytest.approx(4_000_000 / 0.003 / 1e6)
    assert figure.memory_floor_ms == pytest.approx(0.001)
    # Three TF32 products are faster than one multiply-add on this GPU.
    assert figure.compute_floor_ms == pytest.approx(6_000_000_000 * 3 / 400_000 / 1e6)
    assert figure.floor_share == pytest.approx(0.045 / 0.003)
    (function,) = figure.functions
    assert (function.launches, function.threads, function.occupancy) == (3, 256, 1.0)
    text = kernel_figures.table([figure], CEILINGS)
    assert "copies 4000 GB/s" in text
    assert "conv1" in text
    assert "pairs" in text


def test_figures_name_the_kernel_as_the_log_does():
    call = _call("conv1", 0, 10, kernel="1_naive (no faster one fits)")
    assert kernel_figures.figures(
        layers.with_layers([call, _kernel("n", 1, 2)]), CEILINGS, lambda device: HOPPER
    )


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "expected"),
    [
        (256, 32, 0, 1.0),
        (256, 33, 0, 0.75),  # 40 registers per thread: 12 warps in each quarter of a multiprocessor
        (1024, 64, 0, 0.5),
        (128, 255, 0, 0.125),
        (256, 32, 100 * 1024, 0.25),
        (32, 32, 0, 0.5),  # no more than 32 blocks
    ],
)
def test_occupancy(threads, registers, shared, expected):
    kernel = {"block": [threads, 1, 1], "registers": registers, "static_shared": 0}
    assert occupancy.occupancy({**kernel, "dynamic_shared": shared}, HOPPER) == expected


def test_recorded_figures_are_as_the_gpu_allows():
    recorded = activities.read(RECORDED["gpu"])
    assert recorded.kernel_figures
    for figure in recorded.kernel_figures:
        assert 0 < figure["compute_floor_ms"] < figure["milliseconds"]
        assert 0 < figure["memory_floor_ms"] < figure["milliseconds"]
        for function in figure["functions"]:
            assert 0 < function["occupancy"] <= 1
            assert 0 < function["registers"] <= 255
    text = profile_summary.text(recorded)
    assert "GPU activities\n" in text
    assert "CUDA API calls\n" in text
    assert "Our kernels on the GPU\n" in text


NCU = DATA / "ncu.csv"


def test_ncus_counters_are_read_by_function():
    found = ncu.by_function(ncu.rows(NCU.read_text()))
    assert found
    assert [c.launches * c.milliseconds for c in found] == sorted(
        (c.launches * c.milliseconds for c in found), reverse=True
    )
    for each in found:
        assert each.launches >= 1
        assert 0 < each.milliseconds < 100
        assert 0 < each.warps_share <= 1
        assert 0 < each.possible_warps_share <= 1
        assert each.name in ncu.table(found)
    assert ncu.rows("==PROF== nothing") == []


def test_ncus_refusal_and_failure_are_one_line(tmp_path, monkeypatch):
    fake = tmp_path / "ncu"
    for word, error in (
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", errors.ProfilingNotPermitted),
        ("==ERROR== The application died", errors.ProfilerMissing),
    ):
        fake.write_text(f"#!/bin/sh\necho '{word}' >&2\nexit 1\n")
        fake.chmod(0o755)
        with pytest.raises(error) as caught:
            ncu.count(["true"], str(fake))
        assert len(str(caught.value).splitlines()) == 1
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu, "_USUAL_FOLDERS", (str(tmp_path),))
    assert ncu.find() == str(fake)
    fake.unlink()
    with pytest.raises(errors.ProfilerMissing, match="ncu is not on PATH"):
        ncu.find()


def test_mxnets_events_are_paired_thread_by_thread():
    def event(phase, name, ts, thread=1):
        return {"ph": phase, "name": name, "ts": ts, "pid": 0, "tid": thread}

    document = {
        "traceEvents": [
            {"ph": "M", "pid": 0, "args": {"name": "cpu/0"}},
            event("B", "outer", 10),
            event("B", "other", 11, thread=2),
            event("B", "inner", 12),
            event("B", "ece408_convolution", 13),
            event("E", "ece408_convolution", 13),
            event("E", "inner", 14),
            event("E", "other", 18, thread=2),
            event("E", "outer", 19),
            event("E", "from before", 20),
        ]
    }
    found = mxnet_recorder.parse(document)
    assert [(a.name, a.start_ns, a.duration_ns, a.track) for a in found] == [
        ("inner", 12_000, 2_000, "MXNet cpu/0 thread 1"),
        ("other", 11_000, 7_000, "MXNet cpu/0 thread 2"),
        ("outer", 10_000, 9_000, "MXNet cpu/0 thread 1"),
    ]


def test_c_plus_plus_names_are_those_of_the_source():
    assert demangle("_Z9transposePfi") == "transpose(float*, int)"
    assert demangle("column_pairs") == "column_pairs"
    assert demangle("_Znonsense") == "_Znonsense"


class FakeCupti(types.ModuleType):
    """A fake `cupti.cupti`: delivers `records` when it is flushed."""

    KINDS = ("CONCURRENT_KERNEL", "MEMCPY", "MEMCPY2", "MEMSET", "DRIVER", "RUNTIME")

    class cuptiError(Exception):
        pass

    def __init__(self, records=(), failure=None):
        super().__init__("cupti.cupti")
        self.ActivityKind = types.SimpleNamespace(**{k: i for i, k in enumerate(self.KINDS)})
        self.CallbackDomain = types.SimpleNamespace(DRIVER_API="driver", RUNTIME_API="runtime")
        self.records, self.failure, self.enabled = list(records), failure, set()
        self.activity_enable, self.activity_disable = self.enabled.add, self.enabled.remove
        self.get_timestamp = lambda: 1_000
        self.get_callback_name = "{}_{}".format

    def activity_register_callbacks(self, requested, completed):
        if self.failure is not None:
            raise self.failure
        assert requested()[0] > 0
        self.completed = completed

    def activity_flush_all(self, flag):
        self.completed(self.records)


def _record(kind, start, end, **fields):
    fields = {"device_id": 0, "stream_id": 7, "bytes": 64, "copy_kind": 1, **fields}
    number = FakeCupti.KINDS.index(kind)
    return types.SimpleNamespace(kind=number, start=start, end=end, **fields)


@pytest.fixture
def cupti(monkeypatch):
    def install(fake):
        monkeypatch.setitem(sys.modules, "cupti", types.ModuleType("cupti"))
        monkeypatch.setitem(sys.modules, "cupti.cupti", fake)
        monkeypatch.setattr(sys, "version_info", (3, 11, 0))
        return fake

    return install


def test_cuptis_records_become_activities(cupti, monkeypatch):
    kernel = {f"grid_{axis}": 1 for axis in "xyz"} | {f"block_{axis}": 1 for axis in "xyz"}
    kernel |= {"registers_per_thread": 40, "static_shared_memory": 1, "dynamic_shared_memory": 2}
    call = {"cbid": 5, "thread_id": 0x1_0000_0002 & 0xFFFFFFFF}
    fake = cupti(
        FakeCupti(
            [
                _record("CONCURRENT_KERNEL", 1_500, 1_700, name="_Z1kv",
                        local_memory_per_thread=0, **kernel),
                _record("MEMCPY", 1_200, 1_300),
                _record("MEMSET", 1_210, 1_220),
                _record("RUNTIME", 1_100, 1_200, **call),
                _record("DRIVER", 1_120, 1_180, **call),  # made by the runtime
                _record("DRIVER", 1_300, 1_400, **call),
                _record("MEMCPY", 1_250, 0),  # has not ended
            ]
        )
    )  # fmt: skip
    monkeypatch.setattr(cupti_recorder.time, "time_ns", lambda: 51_000)
    recorder = cupti_recorder.CuptiRecorder()
    recorder.start()
    assert len(fake.enabled) == 6
    found = recorder.stop()
    assert not fake.enabled
    assert [(a.kind, a.name, a.start_ns, a.duration_ns, a.track) for a in found] == [
        ("api", "runtime_5", 51_100, 100, "thread 00000002"),
        ("memcpy", "[CUDA memcpy HtoD]", 51_200, 100, "GPU 0 stream 7"),
        ("memset", "[CUDA memset]", 51_210, 10, "GPU 0 stream 7"),
        ("api", "driver_5", 51_300, 100, "thread 00000002"),
        ("kernel", "k()", 51_500, 200, "GPU 0 stream 7"),
    ]
    assert found[-1].details["registers"] == 40
    # At most _MOST_PENDING records wait to be read.
    monkeypatch.setattr(cupti_recorder, "_MOST_PENDING", 2)
    again = cupti_recorder.CuptiRecorder()
    again.start()
    assert again.stop() == found


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        ("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES: no", errors.ProfilingNotPermitted, "administrator"),
        ("CUPTI_ERROR_NOT_INITIALIZED", errors.ProfilerMissing, "CUPTI does not start"),
    ],
)
def test_cuptis_refusals_are_one_line(cupti, failure, error, message):
    cupti(FakeCupti(failure=FakeCupti.cuptiError(failure)))
    recorder = cupti_recorder.CuptiRecorder()
    with pytest.raises(error, match=message) as caught:
        recorder.start()
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("python", "message"),
    [((3, 10, 0), r"pip install 'ece408_op\[profile\]'"), ((3, 9, 18), "Python 3\\.10 or later")],
)
def test_without_cupti_what_is_needed_is_named(monkeypatch, python, message):
    monkeypatch.setattr(sys, "version_info", python)
    monkeypatch.setitem(sys.modules, "cupti", None)
    monkeypatch.setitem(sys.modules, "cupti.cupti", None)
    with pytest.raises(errors.ProfilerMissing, match=message):
        cupti_recorder.CuptiRecorder()


def test_one_process_may_record_several_times(mx):
    def program():
        mx.nd.dot(mx.nd.ones((9, 9)), mx.nd.ones((9, 9))).wait_to_read()

    for _ in range(3):
        profile = recording.record(program, ["p"], gpu=False).profile
        assert profile.notes == ()
        assert sum(a.name == "dot" for a in profile.activities) == 1


def test_a_recorded_program_may_fail(monkeypatch):
    monkeypatch.setattr(environment, "machine", lambda: {})
    for failure, code in (
        (None, 0),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("why"), 1),
        (ValueError("no"), 1),
        (errors.InvalidSize("0"), 3),
    ):

        def program(failure=failure):
            if failure is not None:
                raise failure

        outcome = recording.record(program, ["p"], gpu=False)
        assert (outcome.failure, outcome.profile.exit_code) == (failure, code)


def test_notes_and_counters_are_told():
    counters = ncu.Counters("column_pairs", (128, 1, 1), 96, 2, 0.5, 1, 2, 0.9, 0.4, 0.3, 0.5)
    found = _profile(notes=("why",), counters=(dataclasses.asdict(counters),))
    text = profile_summary.text(found)
    assert text.startswith("Profile of m2.1: 1.500 s\n")
    assert "column_pairs" in text
    assert text.endswith("Note: why")


SCRIPT = """\
import sys
import helper
import mxnet as mx
import ece408_op
print("arguments", sys.argv[1:], __name__)
x, w = mx.nd.ones((2, 1, 9, 9)), mx.nd.ones((3, 1, 5, 5))
ece408_op.Convolution(x, w, kernel=(5, 5), num_filter=3, no_bias=True).wait_to_read()
helper.end(sys.argv[1:])
"""
HELPER = """\
import sys
def end(arguments):
    if "exit" in arguments:
        sys.exit(7)
    if "raise" in arguments:
        raise ValueError("on purpose")
"""


@pytest.fixture
def script(tmp_path, written):
    (tmp_path / "helper.py").write_text(HELPER)
    path = written("script.py", SCRIPT)
    return path


def test_any_script_is_profiled(run_ece408, script, tmp_path):
    files = (f"--json={tmp_path / 'p.json'}", f"--trace={tmp_path / 't.json'}")
    result = run_ece408("profile", "--no-gpu", *files, str(script), "--json", "mine")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    first, empty, title, *_ = result.stdout.splitlines()
    assert (first, empty) == ("arguments ['--json', 'mine'] __main__", "")
    assert title.startswith(f"Profile of {script} --json mine: ")
    assert "ece408_conv forward by cpu" in result.stdout
    found = activities.read(tmp_path / "p.json")
    assert {a.kind for a in found.activities} == {"operator", "op_call"}
    (call,) = found.of_kinds("op_call")
    assert call.details["problem"] == "b2,c1,h9,w9,m3,k5x5"
    # Both clocks are the system's: the call is within the program.
    assert 0 < call.start_ns < call.end_ns < 1e9 * found.elapsed_s
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("how", "code", "words"), [("exit", 7, ""), ("raise", 1, "ValueError: on purpose")]
)
def test_a_script_that_fails_keeps_its_exit_code_and_error(run_ece408, script, how, code, words):
    result = run_ece408("profile", "--no-gpu", str(script), how)
    assert result.returncode == code
    assert words in result.stderr
    assert "runpy" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last == (
        f"ece408: {script} ended with exit code {code}; the profile is of what it did until then"
    )
    assert "ece408_conv forward" in result.stdout


def test_what_recorded_nothing_has_no_tables_and_no_files(run_ece408, tmp_path):
    script, file = tmp_path / "s.py", tmp_path / "p.json"
    script.write_text("print('hello')")
    result = run_ece408("profile", "--no-gpu", f"--json={file}", str(script))
    assert (result.returncode, result.stdout, result.stderr) == (0, "hello\n", "")
    assert not file.exists()


def test_bad_requests_are_one_line_before_anything_runs(refused, script, tmp_path):
    (tmp_path / "file").touch()
    for arguments, code, message in (
        (["nothing.py"], 28, "'nothing.py' is neither a milestone nor a file"),
        (["--json", str(tmp_path / "file" / "p.json"), str(script)], 10, "cannot write"),
        (["--trace", str(tmp_path), str(script)], 10, "cannot write"),
        (["m2.1", "0"], 3, "'0' is not a size"),
    ):
        refused(code, message, "profile", *arguments)


def test_ctrl_c_leaves_nothing_behind(run_ece408, script, tmp_path):
    (tmp_path / "helper.py").write_text(
        "import os, signal, time\n"
        "def end(arguments):\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    )
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    result = run_ece408("profile", "--no-gpu", str(script), TMPDIR=str(scratch))
    assert result.returncode == 130
    assert result.stderr == "ece408: error: interrupted\n"
    assert "Profile of" not in result.stdout
    assert not list(scratch.iterdir())


def test_a_milestones_own_output_stays_as_it_is(run_ece408, run_here, fashion_mnist, tmp_path):
    file = tmp_path / "p.json"
    alone = run_ece408("m2.1", "20", "--profile", f"--json={file}")
    assert alone.returncode == 0, alone.stderr
    course = alone.stdout.splitlines()
    assert [line.split(":")[0] for line in course] == [
        *("Loading fashion-mnist data... done", "Loading model... done", "New Inference"),
        *("Op Time", "Op Time", "Correctness"),
    ]
    assert "\nProfile of m2.1 20: " in alone.stderr
    within = run_here("profile", "m2.1", "20")
    assert within.returncode == 0
    assert len(within.stdout.split("\n\nProfile of m2.1 20: ")[0].splitlines()) == len(course)
    assert "Profile of" not in within.stderr
    names = [row.name for s in tables.sections(activities.read(file)) for row in s.rows]
    # Convolutions appear by layer and kernel, and in the time of their part.
    assert "ece408_convolution" not in names
    assert any(name.startswith("conv1 forward by cpu ") for name in names)
    assert any(name.startswith("conv2 forward by cpu ") for name in names)
    assert "ece408_part" in names


@pytest.mark.parametrize("arguments", [["m3.1", "5", "--profile"], ["profile", "m3.1", "5"]])
def test_without_a_gpu_a_gpu_milestones_error_is_its_own(run_ece408, arguments, tmp_path):
    file = tmp_path / "p.json"
    result = run_ece408(*arguments, f"--json={file}", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 18
    assert result.stderr.startswith("ece408: error: ")
    assert not file.exists()


def test_occupancy_is_what_ncu_says():
    """ncu.csv and profile_gpu.json are of the same milestone on the same GPU."""
    recorded = activities.read(RECORDED["gpu"])
    counters = layers.with_kernel_names(
        ncu.by_function(ncu.rows(NCU.read_text())), recorded.activities
    )
    functions = [f for figure in recorded.kernel_figures for f in figure["functions"]]
    assert {each.name for each in counters} == {f["name"] for f in functions}
    possible = {each.name: each.possible_warps_share for each in counters}
    for function in functions:
        assert function["occupancy"] == pytest.approx(possible[function["name"]], abs=1e-3)


@pytest.mark.gpu
def test_a_milestone_on_the_gpu(run_ece408, fashion_mnist, tmp_path):
    pytest.importorskip("cupti")
    json_file = tmp_path / "p.json"
    result = run_ece408("profile", f"--json={json_file}", "m3.1", "50", ECE408_KERNEL="1_naive")
    assert result.returncode == 0, result.stderr
    for title in ("GPU activities", "CUDA API calls", "Operators", "Our kernels on the GPU"):
        assert f"\n{title}" in result.stdout
    found = activities.read(json_file)
    kernels, calls = found.of_kinds("kernel"), found.of_kinds("op_call")
    assert {kernel.details["layer"] for kernel in kernels} == {"conv1", "conv2"}
    assert all(kernel.name.startswith("1_naive:") for kernel in kernels)
    for kernel in kernels:
        assert any(c.start_ns < kernel.start_ns and kernel.end_ns < c.end_ns for c in calls)
    copies = [each for each in found.of_kinds("memcpy") if "layer" in each.details]
    # Inputs and weights are copied in, outputs out; chunks may copy weights several times.
    expected = 4 * 50 * (70 * 70 + 12 * 33 * 33)
    assert sum(c.details["bytes"] for c in copies if c.name.endswith("HtoD]")) >= expected
    assert sum(c.details["bytes"] for c in copies if c.name.endswith("DtoH]")) == 4 * 50 * (
        12 * 66 * 66 + 24 * 29 * 29
    )
    launches = sum(each.name == "cuLaunchKernel" for each in found.of_kinds("api"))
    assert launches == len(kernels)
