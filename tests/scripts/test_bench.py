"""scripts/bench.py: its measurements, files, and messages about peers."""

import ctypes
import json
import subprocess
import sys

import pytest
from places import SCRIPTS
from studies import bench_request, ladder, layers, networks, operator_cpu, programs, training, zoo
from studies.bench_request import Request

from ece408_op import settings
from ece408_op.backends import DIRECTIONS
from ece408_op.backends.cpu import native
from ece408_op.bench import ceilings, cpu_timer
from ece408_op.errors import InvalidSetting, WrongResult

LAYER = "c8,h12,w30,m8,k3x3,p1x1"
ENGINE = """
from types import SimpleNamespace
from onnx.reference import ReferenceEvaluator

__version__ = "played"
SessionOptions = SimpleNamespace

class InferenceSession:
    def __init__(self, path, options, providers):
        assert options.intra_op_num_threads > 0
        self._evaluator = ReferenceEvaluator(path)
    def get_inputs(self):
        return [SimpleNamespace(name=self._evaluator.input_names[0])]
    def run(self, names, inputs):
        return self._evaluator.run(names, inputs)
"""
BARE = "raise ImportError"


def _bench(*arguments):
    command = [sys.executable, str(SCRIPTS / "bench.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def peer_python(tmp_path, monkeypatch):
    """Return a Python in which these modules are replaced by other texts."""

    def give(**modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return sys.executable

    return give


def test_it_writes_what_it_prints_and_how_it_was_made(tmp_path):
    arguments = ("--batch-size", 2, "--repeat", 3, "--threads", 2, "--against", "none")
    result = _bench("layers", LAYER, *arguments, "--output", tmp_path / "layers")
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "layers.md").read_text().splitlines()
    command = f"bench.py layers {LAYER} --batch-size 2 --repeat 3 --threads 2 --against none"
    assert lines[:3] == ["# Layers on the CPU", "", f"    {command} --output layers"]
    assert result.stdout.strip() in "\n".join(lines)
    document = json.loads((tmp_path / "layers.json").read_text())
    assert document["command"] == f"{command} --output layers"
    assert {"date", "machine", "versions", "threads", "repeat"} < set(document)
    rows = {row["direction"]: row for row in document["rows"]}
    assert set(rows) == set(DIRECTIONS)
    for direction, row in rows.items():
        assert (row["case"], row["batch"]) == (LAYER, 2)
        assert all(ms["n"] == 3 and 0 < ms["min"] <= ms["median"] for ms in row["ms"].values())
        assert f"## {direction}, batch 2\n\n" in result.stdout
    kernels = {*rows["forward"]["ms"], rows["forward"]["kernel"]}
    assert kernels >= {"ours", "direct", "winograd", "conv_fwd_oc"}


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("training", "--on", "gpu", "--against", "none"), 18, "no network trains on a GPU: "),
        (("layers", "--against", "openvino"), 2, "--against openvino: give some of"),
        (("layers", "--repeat", "0"), 2, "--repeat 0: give 1 or more"),
        (("operator", "fa20_3", "--against", "none"), 14, "is neither a shape's name"),
        (("layers", "--against", "torch", "--peer-python", "/no"), 16, "/no does not run"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(arguments, code, said):
    result = _bench(*arguments)
    assert result.returncode == code
    last = result.stderr.splitlines()[-1]
    assert said in last
    assert last.startswith("bench.py: error: " if code == 2 else "bench: error: ")


def test_a_peer_that_is_missing_is_said_and_left_out_unless_it_was_asked_for(peer_python, capsys):
    python = peer_python(torch=BARE)
    small = {"cases": [LAYER], "against": ["torch"], "repeat": 1, "directions": ["forward"]}
    (row,) = layers.rows(Request(**small, peer_python=python))
    assert "torch NCHW" not in row["ms"]
    said = capsys.readouterr().err
    assert said.startswith("without torch: ")
    assert len(said.splitlines()) == 1
    with pytest.raises(InvalidSetting, match="name a Python with PyTorch"):
        list(layers.rows(Request(**small, peer_python=python, insists=True)))


def test_layers_are_those_of_networks_by_name(mx):
    found = layers.problems(Request(["resnet18_v1", LAYER], batches=[1, 4]))
    assert len(found) == 2 * 12
    assert ("c64,h56,w56,m64,k3x3,p1x1", 4) in [each[:2] for each in found]
    assert not any(problem.bias for *_, problem in found)
    assert len({*layers.problems(Request(["random:408:9"] * 2))}) == 9


def test_kernels_that_disagree_are_not_timed(monkeypatch):
    run = native.run

    def wrong(direction, *arguments, kernel, **keywords):
        run(direction, *arguments, kernel=kernel, **keywords)
        if kernel == "im2col":
            ctypes.memset(arguments[-1], 0, 4)

    monkeypatch.setattr(native, "run", wrong)
    with pytest.raises(WrongResult, match=r"forward of b1,c3,.*: im2col and direct differ by"):
        list(layers.rows(Request(["c3,h9,w20,m3,k1x1"], repeat=1)))


def test_the_operator_is_timed_warm_fresh_and_backward(mx, monkeypatch):
    top = ceilings.Ceilings(gflops=100.0, store_gbs=10.0, read_gbs=20.0, fresh_gbs=2.0)
    monkeypatch.setattr(ceilings, "measure", lambda isa, threads: top)
    request = Request(["fa19_1", "c5,h29,w31,m20,k5"], ["mxnet"], 2, [3])
    rows = list(operator_cpu.rows(request))
    assert [row["case"] for row in rows] == [each for each in request.cases for _ in range(3)]
    assert rows[0]["error"] < cpu_timer.TOLERANCE
    for row in rows:
        assert {who: ms["n"] for who, ms in row["ms"].items()} == {"ours": 2, "mxnet": 2}
        assert row["floor_ms"] > 0
    assert "GFLOP/s" in request.versions["ceilings"]


def test_the_ladder_on_the_cpu_begins_with_the_textbook_loops(mx):
    (row,) = ladder.rows_on_cpu(Request(["fa19_1"], repeat=2, batches=[2]))
    assert list(row["ms"]) == ["reference", *reversed(native.isas()), "mxnet"]


def _small(mx):
    def build(name, batch):
        mx.random.seed(408)
        net = mx.gluon.nn.HybridSequential(prefix=f"{name}_")
        with net.name_scope():
            net.add(mx.gluon.nn.Conv2D(4, 3, activation="relu"), mx.gluon.nn.Dense(3))
        net.initialize()
        x = mx.nd.random.uniform(shape=(batch, 3, 9, 8))
        net(x).wait_to_read()
        return net, x

    return build


@pytest.mark.slow
def test_a_network_computes_the_same_in_mxnet_and_in_an_engine(
    mx, peer_python, monkeypatch, capsys
):
    python = peer_python(onnxruntime=ENGINE, openvino=BARE, torch=BARE)
    monkeypatch.setattr(zoo, "build", _small(mx))
    request = Request(["small"], ["mxnet", *networks.ENGINES], 3, [2], peer_python=python)
    (row,) = networks.rows(request)
    assert {who: ms["n"] for who, ms in row["ms"].items()} == {
        "ours": 3,
        "ours by to_cpu": 3,
        "mxnet": 3,
        "onnxruntime": 3,
    }
    assert 0 <= row["error"] < 1e-5
    assert request.versions == {"onnxruntime": "played"}
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "without openvino",
        "without torch",
    ]


def test_a_network_learns_with_ours_as_with_mxnets_own():
    request = Request(["2019fa 4 1x70x70"], ["mxnet"], 3)
    (row,) = training.rows(request)
    assert row["losses_differ_by"] < 1e-4
    assert all(row[f"{direction}_ms"] > 0 for direction in DIRECTIONS)
    assert {who: ms["n"] for who, ms in row["ms"].items()} == {"ours": 3, "mxnet": 3}


def _say(text, code=0):
    return [sys.executable, "-c", f"import sys; print({text!r}); sys.exit({code})"]


def test_programs_take_turns_and_each_is_beside_pytorchs(monkeypatch):
    played = {"m2.1": _say("Correctness: 0.5 Model: x"), "torch": _say("accuracy 0.4, PyTorch 9")}
    monkeypatch.setattr(programs, "commands", lambda request, folder: played)
    (row,) = programs.rows(Request(["m2.1"], repeat=3))
    assert (row["case"], row["accuracy"], row["torch_accuracy"]) == ("m2.1", 0.5, 0.4)
    assert {who: ms["n"] for who, ms in row["ms"].items()} == {"ours": 3, "torch": 3}


def test_a_program_that_fails_is_named():
    with pytest.raises(InvalidSetting, match=r"^m1\.1 failed: nothing printed$"):
        programs.run({"m1.1": _say("", 3)}, 1)
    with pytest.raises(InvalidSetting, match=r"^m1\.1 printed no accuracy: 'hello'$"):
        programs.run({"m1.1": _say("hello")}, 1)


def test_the_milestones_run_as_they_are(fashion_mnist, tmp_path):
    commands = programs.commands(Request(bench_request.cases("programs")), tmp_path)
    assert list(commands) == ["m1.1", "m2.1"]
    assert bench_request.cases("programs", "gpu") == ["m1.1", "m2.1", "m3.1", "m4.1", "final"]
    with settings.override():
        _, accuracy = programs.run({"m2.1": [*commands["m2.1"], "50"]}, 1)
    assert 0.8 < accuracy["m2.1"] < 1
