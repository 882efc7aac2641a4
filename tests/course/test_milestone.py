import dataclasses
import re
import sys

import pytest

from ece408_op import settings
from ece408_op.cli.main import execute
from ece408_op.course import milestone, scoring
from ece408_op.course.course_terms import BASELINE, TERMS, load_model, network
from ece408_op.course.dataset import fashion_data
from ece408_op.course.milestone import MILESTONES, make_request
from ece408_op.errors import InvalidSize
from ece408_op.files import resources
from ece408_op.op_log import GpuTime, OpTime
from ece408_op.problem import ConvProblem

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
    theirs = r"ece408: MXNet's convolution: \d+\.\d{6} s\n"
    assert re.fullmatch(theirs * 2 + RUN_TIME, result.stderr)
    assert result.returncode == 0


def test_m2_1_prints_the_courses_lines(run_ece408):
    result = run_ece408("m2.1", "100")
    correctness = r"Correctness: 0\.\d+ Model: ece408\n"
    assert re.fullmatch(LOADING + OP_TIME * 2 + correctness, result.stdout)
    assert re.fullmatch(RUN_TIME, result.stderr)
    assert result.returncode == 0


def test_an_op_time_line_for_every_call_and_one_correctness(run_here):
    result = run_here("m2.1", "100", "--batch-size", "40", "--backend", "reference")
    assert result.stdout.count("Op Time: ") == 3 * 2
    assert result.stdout.count("Correctness: ") == 1
    whole = run_here("m2.1", "100", "--threads", "1")
    assert result.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


@pytest.fixture
def in_kept(kept_with_data):
    with settings.override(cache=kept_with_data):
        yield


def test_final_runs_the_whole_network(run_here, emulated, in_kept):
    """In parts of a batch; a requested kernel computes convolutions alone."""
    result = run_here("final", "3", "--emulate", "--batch-size", "2", "--term", "2018sp")
    emulated = r"Op Time: \d+\.\d{6} \(emulated\)\n"
    assert re.fullmatch(LOADING + emulated * 4 + "Correctness: 1.0 Model: ece408\n", result.stdout)
    assert "CUDA kernels run on the CPU, by the emulator" in result.stderr
    one = run_here("final", "1", "--emulate", "--kernel", "1_naive", "--term", "2017fa")
    assert re.fullmatch(LOADING + emulated + r"Correctness: \d\.\d .*\n", one.stdout)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_has_a_bar_while_kernels_are_emulated(
    run_here, in_kept, monkeypatch, is_terminal
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    command = ("m3.1", "3", "--emulate", "--kernel", "1_naive", "--batch-size", "2")
    result = run_here(*command, "--term", "2018sp")
    emulated = r"Op Time: \d+\.\d{6} \(emulated\)\n"
    assert re.fullmatch(LOADING + emulated * 4 + r"Correctness: \d\.\d .*\n", result.stdout)
    assert [f"{step}/4" in result.stderr for step in range(5)] == [is_terminal] * 5
    assert ("emulating: " in result.stderr) == is_terminal


MODELS = [(term, model) for term in TERMS.values() for model in term.models if model != BASELINE]


def _stated_correctness(term, model):
    """Return the row of models/README.md: correctness at 100, 1000 and 10000."""
    text = (resources.models_dir() / "README.md").read_text()
    row = re.search(rf"^\| {term.name} \| {model} \| (.*?) \| (.*?) \| (.*?) \|", text, re.M)
    return dict(zip(("100", "1000", "10000"), row.groups()))


MODELS_OF_TERMS = pytest.mark.parametrize(
    ("term", "model"), MODELS, ids=lambda value: getattr(value, "name", value)
)
# The whole test set takes seconds, and longer by MXNet's own convolution.
UP_TO = pytest.mark.parametrize("most", [100, pytest.param(10000, marks=pytest.mark.slow)])


@UP_TO
@MODELS_OF_TERMS
def test_correctness_is_what_is_stated(mx, capsys, term, model, most):
    for size, stated in _stated_correctness(term, model).items():
        if int(size) <= most:
            asked = [model, size, "--batch-size", "2500", "--term", term.name]
            assert execute(["m2.1", *asked]) == 0
            correctness = f"Correctness: {stated} Model: {model}\n"
            assert capsys.readouterr().out.endswith(correctness), size


@UP_TO
@MODELS_OF_TERMS
def test_what_is_stated_is_mxnets_own(mx, capsys, term, model, most):
    if model == "ece408-low":
        return _check_weak_model(term, model, most)
    for size, stated in _stated_correctness(term, model).items():
        if int(size) <= most:
            assert execute(["m1.1", size, "--batch-size", "2500", "--term", term.name]) == 0
            native = capsys.readouterr().out
            assert native.endswith(f"EvalMetric: {{'accuracy': {stated}}}\n"), size


def _check_weak_model(term, model, most):
    """No milestone runs it through MXNet's own convolution."""
    images, labels = fashion_data.load("t10k", term.image_size)
    loaded = load_model(term, model)
    answers = scoring.answers(network(term), loaded.arg_params, {}, images[:most], 2500)
    for size, stated in _stated_correctness(term, model).items():
        if int(size) <= most:
            assert str((answers == labels[:most])[: int(size)].mean()) == stated


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
    ("arguments", "term", "expected"),
    [
        (["ece408-low", "1000"], None, ("2017fa", "ece408-low")),
        ([], "2017fa", ("2017fa", "ece408-high")),
        (["ece408"], None, ("2019fa", "ece408")),
        (["ece408"], "2018sp", ("2018sp", "ece408")),
    ],
)
def test_a_model_that_only_one_term_has_picks_the_term(arguments, term, expected):
    request = make_request(MILESTONES["m2.1"], arguments, term=term)
    assert (request.term.name, request.model) == expected


def test_a_batch_is_at_most_the_size():
    request = make_request(MILESTONES["m2.1"], ["100"], batch_size="500")
    assert request.batch_size == 100
    with pytest.raises(InvalidSize, match="'0' is not a batch size"):
        make_request(MILESTONES["m2.1"], ["100"], batch_size="0")


def test_a_milestone_says_what_the_gpu_did(capsys):
    problem = ConvProblem.parse("b2,c1,h9,w9,m4,k3")

    def entry(layer, seconds, gpu):
        return OpTime(layer, problem, "forward", "cuda", "1_naive", seconds, gpu)

    milestone._print_op_time(entry("conv1", 0.1, GpuTime(0.025, 0.05)))
    milestone._print_op_time(entry("conv2", 0.25, None))
    less_exact = dataclasses.replace(entry("conv3", 0.1, GpuTime(0.01)), precision="tf32")
    milestone._print_op_time(less_exact)
    out, err = capsys.readouterr()
    assert out == "Op Time: 0.100000\nOp Time: 0.250000\nOp Time: 0.100000\n"
    assert err.splitlines() == [
        "ece408: conv1 by 1_naive: kernel 25.000 ms (25%), copies 50.000 ms (50%)",
        "ece408: conv3 by 1_naive in tf32: kernel 10.000 ms (10%), copies 0.000 ms (0%)",
    ]
