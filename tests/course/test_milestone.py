from __future__ import annotations

import re

import pytest

from ece408_op.course.milestone import MILESTONES, make_request
from ece408_op.errors import InvalidSize, UnknownModel

pytestmark = pytest.mark.usefixtures("fashion_mnist")
LOADING = r"Loading fashion-mnist data\.\.\. done\nLoading model\.\.\. done\nNew Inference\n"
OP_TIME = r"Op Time: \d+\.\d{6}\n"
RUN_TIME = (
    r"\d+\.\d\duser \d+\.\d\dsystem \d+:\d\d\.\d\delapsed \d+%CPU "
    r"\(0avgtext\+0avgdata \d+maxresident\)k\n"
    r"\d+inputs\+\d+outputs \(\d+major\+\d+minor\)pagefaults \d+swaps\n"
)


def test_m1_1_prints_the_courses_lines(run_ece408):
    result = run_ece408("m1.1", "100")
    assert re.fullmatch(LOADING + r"EvalMetric: \{'accuracy': 0\.\d+\}\n", result.stdout)
    assert re.fullmatch(RUN_TIME, result.stderr)
    assert result.returncode == 0


def test_m2_1_prints_the_courses_lines(run_ece408):
    result = run_ece408("m2.1", "100")
    correctness = r"Correctness: 0\.\d+ Model: ece408\n"
    assert re.fullmatch(LOADING + OP_TIME * 2 + correctness, result.stdout)
    assert re.fullmatch(RUN_TIME, result.stderr)
    assert result.returncode == 0


def test_an_op_time_line_for_every_call_and_one_correctness(run_ece408):
    result = run_ece408("m2.1", "100", "--batch-size", "40", "--backend", "reference")
    assert result.stdout.count("Op Time: ") == 3 * 2
    assert result.stdout.count("Correctness: ") == 1
    whole = run_ece408("m2.1", "100", "--threads", "1")
    assert result.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


@pytest.mark.parametrize("size", ["100", "1000", "10000"])
def test_correctness_equals_mxnets_own(run_ece408, size):
    batch = ("--batch-size", "2500")
    native = run_ece408("m1.1", size, *batch).stdout
    ours = run_ece408("m2.1", size, *batch).stdout
    accuracy = re.search(r"'accuracy': ([\d.]+)\}", native).group(1)
    assert ours.endswith(f"Correctness: {accuracy} Model: ece408\n")


@pytest.mark.parametrize(
    ("name", "arguments", "model", "size"),
    [
        ("m1.1", [], "baseline", 10000),
        ("m1.1", ["7"], "baseline", 7),
        ("m2.1", [], "ece408", 10000),
        ("m2.1", ["1"], "ece408", 1),
        ("m2.1", ["ece408"], "ece408", 10000),
        ("m2.1", ["ece408", "10000"], "ece408", 10000),
    ],
)
def test_both_argument_forms(name, arguments, model, size):
    request = make_request(MILESTONES[name], arguments)
    assert (request.model, request.size, request.batch_size) == (model, size, size)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["0"], InvalidSize, "'0' is not a size; give a whole number from 1 to 10000"),
        (["-1"], InvalidSize, "'-1' is not a size"),
        (["10001"], InvalidSize, "'10001' is not a size"),
        (["2.5"], InvalidSize, "'2.5' is not a size"),
        (["ece408", "abc"], InvalidSize, "'abc' is not a size"),
        (["abc"], UnknownModel, "unknown model 'abc'; term 2019fa has: baseline, ece408"),
        (["5", "6"], UnknownModel, "'5' is not a model"),
        (["baseline"], UnknownModel, "which is what m1.1 is for"),
        (["ece408", "1", "2"], InvalidSize, "3 arguments; give at most a model and a size"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make_request(MILESTONES["m2.1"], arguments)


def test_a_batch_is_at_most_the_size():
    request = make_request(MILESTONES["m2.1"], ["100"], batch_size="500")
    assert request.batch_size == 100
    with pytest.raises(InvalidSize, match="'0' is not a batch size"):
        make_request(MILESTONES["m2.1"], ["100"], batch_size="0")
