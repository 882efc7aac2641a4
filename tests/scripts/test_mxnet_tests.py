"""MXNet's own tests with our operator in place: the selection, crashes, the table."""

import json
import subprocess
import sys

import pytest
from places import SCRIPTS
from studies import mxnet_tests
from studies.mxnet_tests import FileResult, Outcome

from ece408_op.errors import DataMissing

SCRIPT = SCRIPTS / "run_mxnet_tests.py"
A_FILE = """
import os
import mxnet as mx
from nose.tools import assert_raises, eq_, make_decorator, raises

def seeded(test):
    @make_decorator(test)
    def run():
        test()
    return run

@seeded
def test_2d():
    mx.sym.Convolution(mx.sym.var("data"), kernel=(1, 1), num_filter=2, name="layer")

def test_3d():
    mx.sym.Convolution(mx.sym.var("data"), kernel=(1, 1, 1), num_filter=2)

def test_of_mxnets_operator():
    eq_(json_operator(), "Convolution")

def json_operator():
    layer = mx.gluon.nn.Conv2D(2, 1)
    return "Custom" if "Custom" in layer(mx.sym.var("data")).tojson() else "Convolution"

def test_layout():
    assert type(mx.gluon.nn.Conv2D(2, 1, layout="NHWC")).__module__.startswith("mxnet.")

def test_crash():
    os.abort()

@raises(ZeroDivisionError)
def test_after_it():
    assert_raises(KeyError, {}.__getitem__, 1)
    1 / 0
"""


def test_tests_about_convolution_are_found_by_what_they_call():
    source = """
def check(x): return mx.sym.Convolution(x)
def test_direct(): Conv2D(3)
def test_by_helper(): check(1)
def test_by_two(): test_helper()
def test_helper(): check(2)
def test_conversion(): converges(convert(3))
class TestLayers(Base):
    def test_it(self): nn.Conv1D(3)
"""
    assert mxnet_tests.about_convolution(source) == {
        *("test_direct", "test_by_helper", "test_by_two", "test_helper", "TestLayers")
    }


def test_files_are_run_whole_or_for_their_convolutions(tmp_path):
    _write_sources(tmp_path, "test_attr.py", "def test_any(): pass")
    _write_sources(tmp_path, "test_other.py", "def test_any(): pass\ndef test_conv(): pass")
    files = ["unittest/test_attr.py", "unittest/test_other.py"]
    assert mxnet_tests.selected(tmp_path, files) == {files[0]: None, files[1]: {"test_conv"}}
    with pytest.raises(DataMissing, match="test_none"):
        mxnet_tests.selected(tmp_path, ["unittest/test_none.py"])


CRASH = Outcome("crashed", "the process ended with SIGSEGV")
PASSED = {"test": "f::a", "outcome": "passed"}


@pytest.mark.parametrize(
    ("events", "blamed", "finished"),
    [
        ([], "f::(before any test)", False),
        ([{"started": "f::a"}], "f::a", False),
        ([{"started": "f::a"}, PASSED], "f::(after a)", False),
        ([{"started": "f::a"}, PASSED, {"finished": 0}], "f::(exit)", True),
    ],
)
def test_a_crash_is_blamed_on_what_was_going_on(events, blamed, finished):
    text = "\n".join(json.dumps(event) for event in events)
    outcomes, ended = mxnet_tests.read_events("f", text, CRASH, "the log")
    assert outcomes.pop(blamed) == Outcome("crashed", CRASH.error, "the log")
    assert list(outcomes.values()) == [Outcome("passed")] * (PASSED in events)
    assert ended is finished


def test_the_table_counts_by_file_and_names_what_failed_only_once():
    good, bad, skipped = Outcome("passed"), Outcome("failed", "why"), Outcome("skipped")
    ours = Outcome("failed", "why ours", calls={"ours": 2, "three dimensions": 3})
    own = {"f::a": good, "f::b": good, "f::c": bad, "f::d": bad, "f::e": skipped}
    with_ours = {"f::a": good, "f::b": ours, "f::c": bad, "f::d": good, "f::e": skipped}
    text = mxnet_tests.table({"f": FileResult(own, with_ours)})
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| f")]
    assert rows[1][1:] == ["5", "1", "1", "1", "1", "1", "1", "2", "3 |"]
    assert "Failed only with ours:\n\n- f::b: why ours\n" in text
    assert "Failed only with MXNet's own:\n\n- f::d: why\n" in text
    assert "- 3: three dimensions" in text


@pytest.mark.slow
def test_the_script_runs_each_test_with_both_and_gets_past_a_crash(tmp_path):
    _write_sources(tmp_path, "test_attr.py", A_FILE)
    prefix, file = tmp_path / "all", "unittest/test_attr.py"
    command = [sys.executable, SCRIPT, "--sources", tmp_path, "--files", file, "--output", prefix]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(prefix.with_suffix(".json").read_text())[file]
    named = {test.split("::")[1]: result for test, result in results.items()}
    assert {test: result["verdict"] for test, result in named.items()} == {
        "test_2d": "passed with both",
        "test_3d": "passed with both",
        "test_of_mxnets_operator": "failed only with ours",
        "test_layout": "passed with both",
        "test_crash": "failed with both",
        "test_after_it": "passed with both",
    }
    assert "- 1: a kernel of 3 dimensions" in ended.stdout
    assert "Custom" in named["test_of_mxnets_operator"]["ours"]
    assert "SIGABRT" in named["test_crash"]["own"]


def _write_sources(folder, name, text):
    (folder / "unittest").mkdir(exist_ok=True)
    (folder / "unittest" / name).write_text(text)
