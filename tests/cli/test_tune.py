"""`ece408 tune`: its options, its measurements, and its behaviour without a GPU."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import socket
import threading

import pytest
from fake_gpu import FakeGpu, tiled

import ece408_op
from ece408_op import settings
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.kernels import catalog, tuned
from ece408_op.backends.cuda.runtime import compiler, device
from ece408_op.bench import side_by_side, tune_targets, tuner
from ece408_op.bench.cuda_timer import Timing
from ece408_op.bench.shapes import SHAPES
from ece408_op.cli.main import execute
from ece408_op.errors import GpuFailed, TuningFailed
from ece408_op.problem import ConvProblem

FA19 = [SHAPES["fa19_1"], SHAPES["fa19_2"]]
FA19_AT_32 = [dataclasses.replace(each, batch=32) for each in FA19]


def _texts(problems):
    return [str(problem) for problem in problems]


def test_a_terms_layers_are_its_shapes(mx):
    assert tune_targets.problems(["2019fa"], [10000]) == FA19
    assert tune_targets.problems(["2019fa", "fa19_2", "fa19_1"], [10000]) == FA19
    assert _texts(tune_targets.problems(["sp19_2"])) == [
        *("b100,c6,h22,w22,m16,k5x5", "b10000,c6,h22,w22,m16,k5x5")
    ]
    assert _texts(tune_targets.problems(["b7,c2,h9,w9,m3,k3,bias"])) == ["b7,c2,h9,w9,m3,k3x3"]


def test_a_checkpoints_layers_ours_and_mxnets(mx, tmp_path):
    data = mx.sym.Variable("data")
    net = mx.sym.Convolution(data, kernel=(5, 5), num_filter=4, stride=(2, 2), name="a")
    net = mx.sym.BatchNorm(net, name="norm")
    halves = mx.sym.split(net, num_outputs=2, axis=1, name="split")
    net = ece408_op.Convolution(halves[1], kernel=(3, 3), num_filter=6, pad=(1, 1), name="b")
    net = mx.sym.Convolution(net, kernel=(1, 3), num_filter=2, num_group=2, no_bias=True)
    net.save(str(tmp_path / "net-symbol.json"))
    expected = [
        *("b9,c3,h21,w20,m4,k5x5,s2x2", "b9,c2,h9,w8,m6,k3x3,p1x1", "b9,c6,h9,w8,m2,k1x3,g2")
    ]
    for name in ("net", "net-symbol.json"):
        found = tune_targets.problems([str(tmp_path / name)], [9], "3x21x20")
        assert _texts(found) == expected


def test_what_is_no_target_is_one_line(mx, refused, tmp_path):
    mx.sym.Convolution(mx.sym.Variable("data"), kernel=(5, 5), num_filter=4).save(
        str(tmp_path / "net-symbol.json")
    )
    net = str(tmp_path / "net")
    for arguments, code, message in [
        (["2030fa"], 16, "'2030fa' is not a term (2017fa, "),
        (["b1,c2"], 14, "'b1,c2' lacks height"),
        ([net], 16, "add --image, such as --image 3x224x224"),
        ([net, "--image", "large"], 16, "'large' is not channels, height and width"),
        ([net, "--image", "1x3x3"], 9, "the network does not accept images of 1x3x3"),
        (["fa19_1", "--batch-size", "0"], 3, "0 is not a batch size"),
        (["fa19_1", "--precision", "half"], 16, "unknown precision 'half'"),
    ]:
        refused(code, message, "tune", *arguments)


def test_without_a_gpu_it_says_so(refused, monkeypatch):
    monkeypatch.setattr(device, "find_driver", lambda: (_ for _ in ()).throw(_no_gpu()))
    monkeypatch.setattr(device, "_gpus", {})
    refused(18, "error: there is no GPU here\n", "tune", "fa19_1")


def _no_gpu():
    return ece408_op.errors.NoUsableGpu("there is no GPU here")


class FakeBench:
    """Fake times by kernel, wrong results and failing launches; counts the timed candidates."""

    def __init__(self, gpu, problem, direction):
        self.gpu, self.problem, self.direction = gpu, problem, direction
        self.timed = []

    def time(self, kernel, samples, plan):
        self.timed.append((kernel.name, samples))
        if kernel.name == "7_channel_tree":
            raise GpuFailed("kernel 7_channel_tree cannot be launched: too many resources")
        ms = {"5_implicit_gemm": 0.5, "4_im2col": 0.4, "10_tf32": 0.2, "9_half": 0.1}
        failure = "the relative L2 error is 1.0e+00" if kernel.name == "4_im2col" else None
        return Timing([ms.get(kernel.name, 3.0)] * samples, 1e-7, failure)


@pytest.fixture
def play(monkeypatch):
    """Give candidates times by a function of the problem, the kernel's name and its macros; a text
    is what is wrong with the result."""

    def played(of):
        def time(self, kernel, samples, plan):
            self.timed.append((kernel.name, dict(plan.defines).get("ROWS")))
            found = of(self.problem, kernel.name, dict(plan.defines))
            wrong = found if isinstance(found, str) else None
            return Timing([1.0 if wrong else found] * samples, 1e-7, wrong)

        monkeypatch.setattr(FakeBench, "time", time)

    return played


@pytest.fixture
def benches(monkeypatch, tmp_path):
    made = []

    @contextlib.contextmanager
    def bench(gpu, problem, direction):
        made.append(FakeBench(gpu, problem, direction))
        yield made[-1]

    monkeypatch.setattr(tuner, "bench", bench)
    monkeypatch.setattr(tuner, "compile_all", lambda gpu, plans: None)
    monkeypatch.setattr(device, "get", lambda index: FakeGpu())
    monkeypatch.setattr(compiler, "require", lambda file: None)
    tuned.forget()
    with settings.override(cache=tmp_path / "cache"):
        yield made
    tuned.forget()


def test_candidates_are_all_that_can_compute_it_each_once():
    problem = FA19[1]
    names: dict[str, list] = {precision: [] for precision in ("float32", "tf32", "float16")}
    for precision, found in names.items():
        choices = tuner.candidates(tuner.Task(problem), FakeGpu(), precision)
        found += [str(choice) for choice in choices]
        plans = [c.kernel.plan(problem, (9, 0), False, c.layout) for c in choices]
        assert len(set(plans)) == len(plans)
        assert all(choice.kernel.permitted(precision, problem) for choice in choices)
    assert set(names["float32"]) < set(names["tf32"]) < set(names["float16"])
    assert "13_column_pairs" not in names["float16"]


def test_the_fastest_right_one_of_each_precision_wins(benches):
    found, results = tuner.tune(FakeGpu(), tuner.Task(FA19[1]), ["float32", "tf32", "float16"])
    best = {each.precision: (each.kernel, each.ms) for each in results}
    assert best == {
        "float32": ("5_implicit_gemm", 0.5),
        "tf32": ("10_tf32", 0.2),
        "float16": ("9_half", 0.1),
    }
    counts = [each.candidates for each in results]
    assert counts == sorted(counts)
    times = [c.timing.median_ms for c in found if c.timing.failure is None]
    assert times == sorted(times)
    assert {c.choice.kernel.name for c in found if c.timing.failure} == {
        *("4_im2col", "7_channel_tree")
    }
    (bench,) = benches
    # Fast candidates are timed at length, slow ones are not.
    assert ("5_implicit_gemm", 20) in bench.timed
    assert ("1_naive", 20) not in bench.timed


def test_other_tiles_are_timed_where_a_kernels_own_come_near(benches, play, monkeypatch):
    monkeypatch.setattr(catalog, "KERNELS", (tiled("1_naive"), tiled("5_implicit_gemm")))
    near = {0: 1.0, 1: 0.5, 2: 3.0}
    play(lambda problem, name, macros: near[macros["ROWS"]] if name == "1_naive" else 2.5)
    counted = []
    task = tuner.Task(FA19[0])
    _, (result,) = tuner.tune(FakeGpu(), task, ["float32"], lambda: counted.append(1))
    assert (result.kernel, dict(result.tunables), result.ms) == ("1_naive", {"rows": 1}, 0.5)
    assert len(counted) == len(tuner.candidates(task, FakeGpu(), "float32")) == 6
    assert set(benches[0].timed) == {
        *(("1_naive", 0), ("1_naive", 1), ("1_naive", 2), ("5_implicit_gemm", 0))
    }


def test_when_none_is_right_it_fails(benches, play):
    play(lambda *_: "all is NaN")
    with pytest.raises(TuningFailed, match=r"none of \d+ candidates computes b10000.*: all is NaN"):
        tuner.tune(FakeGpu(), tuner.Task(FA19[0]), ["float32"])


def test_the_command_keeps_what_it_measured(benches, capsys, tmp_path):
    arguments = [
        *("tune", "fa19_2", "--batch-size", "100", "--precision", "tf32", "--precision", "float32")
    ]
    out = tmp_path / "found.json"
    assert execute([*arguments, "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert "best for b100,c12,h33,w33,m24,k5x5 in tf32: 10_tf32, 0.2000 ms of " in printed.out
    assert "not used: the relative L2 error is 1.0e+00" in printed.out
    assert str(tuned.file(FakeGpu())) in printed.err
    document = json.loads(out.read_text())
    assert [each["kernel"] for each in document["problems"][0]["best"]] == [
        *("10_tf32", "5_implicit_gemm")
    ]
    problem = dataclasses.replace(FA19[1], batch=128)
    assert tuned.best(problem, FakeGpu(), "tf32").kernel.name == "10_tf32"
    assert tuned.best(problem, FakeGpu(), "float32").kernel.name == "5_implicit_gemm"

    assert execute(arguments) == 0
    assert "10_tf32, 0.2000 ms of" in (again := capsys.readouterr().out)
    assert again.count("(kept; --force measures it again)") == 2
    assert len(benches) == 1
    assert execute([*arguments, "--force"]) == 0
    assert len(benches) == 2


def test_results_can_go_to_a_file_of_ones_own(benches, tmp_path):
    out = tmp_path / "shipped.json"
    # A run that was ended goes on.
    for name in ("fa19_2", "sp19_2", "fa19_2"):
        assert execute(["tune", name, "--batch-size", "100", "--output", str(out)]) == 0
    assert len(json.loads(out.read_text())["results"]) == len(benches) == 2
    assert not tuned.file(FakeGpu()).exists()


def test_where_there_is_one_kernel_nothing_is_measured(benches, capsys):
    assert execute(["tune", "b9,c4,h9,w9,m4,k3,g2,float64", "b9,c3,h9,w9,m4,k3,float16"]) == 0
    assert capsys.readouterr().err.count("there is one kernel for b9,") == 2
    assert benches == []


def test_gradients_are_tuned_where_they_are_asked_for(benches, capsys, play):
    play(lambda _, name, macros: 0.1 if name.startswith("implicit_gemm_prepacked") else 0.2)
    problem = ConvProblem.parse("b32,c64,h14,w14,m32,k3,p1")
    assert execute(["tune", str(problem), "--gradients", "--quick"]) == 0
    assert [bench.direction for bench in benches] == [
        *("forward", "backward_data", "backward_weight")
    ]
    printed = capsys.readouterr().out
    best = f"best for {problem} backward_data in float32: "
    assert f"{best}implicit_gemm_prepacked_backward_data, 0.1000" in printed
    for images in (32, 50):
        asked = dataclasses.replace(problem, batch=images, bias=True)
        (plan,) = work.backward_data(asked, 0, 0, 0, False).plans(FakeGpu(), images)
        assert plan.kernel.name == "implicit_gemm_prepacked_backward_data"
        plans = work.backward_weight(asked, 0, 0, 0, 0, False, False).plans(FakeGpu(), images)
        assert [each.kernel.name for each in plans] == [
            *("implicit_gemm_prepacked_backward_weight", "general_backward_bias")
        ]
    # A less exact precision, or another layer, follows the catalog's rules.
    (plan,) = work.backward_data(asked, 0, 0, 0, False, "tf32").plans(FakeGpu(), 32)
    assert plan.kernel.name == "implicit_gemm_prepacked_half_backward_data"
    assert execute(["tune", str(problem), "--gradients", "--quick"]) == 0
    assert capsys.readouterr().out.count("(kept; --force measures it again)") == 3
    assert len(benches) == 3


def test_few_candidates_are_those_that_may_run_untuned():
    problem = ConvProblem.parse("b32,c64,h14,w14,m32,k3,p1")
    for direction in ("forward", "backward_data", "backward_weight"):
        task = tuner.Task(problem, direction, quick=True)
        found = tuner.candidates(task, FakeGpu(), "float32")
        assert {each.kernel.direction for each in found} == {direction}
        assert all(each.kernel.rank is not None for each in found)
        assert "strict" not in {each.kernel.precision for each in found}
        gemm = [each for each in found if "prepacked" in each.kernel.name]
        assert len(gemm) == 6
        assert gemm[0].layout is None
        # These serve GPUs without better kernels.
        assert not {each.kernel.name for each in found} & {"general", "6_register_tiles"}
        assert set(found) < set(tuner.candidates(tuner.Task(problem, direction), FakeGpu(), "tf32"))


def test_what_fails_is_left_out_and_said(benches, capsys, play):
    play(lambda problem, *_: "all is NaN" if problem.channels == 3 else 0.5)
    names = ["b9,c3,h9,w9,m4,k3", "b9,c4,h9,w9,m4,k3"]
    assert execute(["tune", *names]) == TuningFailed.exit_code
    printed = capsys.readouterr()
    assert "best for b9,c4,h9,w9,m4,k3x3" in printed.out
    assert "ece408: b9,c3,h9,w9,m4,k3x3 is left out: none of" in printed.err


def test_the_zoos_layers_each_once(mx):
    found = tune_targets.problems(["zoo"], [32])
    assert len(found) == len(set(found)) > 200
    assert {each.batch for each in found} == {32}
    resnet = tune_targets.problems(["resnet18_v1"], [32])
    assert "b32,c3,h224,w224,m64,k7x7,s2x2,p3x3" in _texts(resnet)
    assert len(resnet) == 11
    assert {*resnet, *FA19_AT_32} <= set(found)


@pytest.fixture
def in_threads(benches, monkeypatch):
    """Run threads in place of GPUs' processes; return the GPUs used in each."""
    asked = {}

    def start(gpu, theirs):
        def serve():
            asked[threading.current_thread()] = []
            with theirs, contextlib.suppress(EOFError, OSError):
                side_by_side.serve(gpu, theirs)

        def end():
            # Only its own thread may close it: the number of a closed file is soon reused, and that
            # thread would read the other file.
            with contextlib.suppress(OSError):
                socket.socket(fileno=os.dup(theirs.fileno())).shutdown(socket.SHUT_RDWR)
            thread.join(30)
            assert not thread.is_alive()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        return end

    def get(number):
        asked.get(threading.current_thread(), []).append(number)
        gpu = FakeGpu()
        gpu.name = "an older GPU" if number == 9 else gpu.name
        return gpu

    monkeypatch.setattr(side_by_side, "_start", start)
    monkeypatch.setattr(device, "get", get)
    return asked


def test_several_gpus_share_the_problems(benches, in_threads, monkeypatch, capsys, tmp_path):
    here = threading.Barrier(2, timeout=20)
    time = FakeBench.time

    def timed(self, *arguments):
        if not self.timed and str(self.problem).startswith("b100,"):
            # Both work at the same time.
            here.wait()
        return time(self, *arguments)

    monkeypatch.setattr(FakeBench, "time", timed)
    out = tmp_path / "found.json"
    problems = ["b100,c12,h33,w33,m24,k5", "b100,c6,h22,w22,m16,k5", "b7,c6,h22,w22,m16,k5"]
    assert execute(["tune", *problems, "--gpu", "0,3", "--json", str(out)]) == 0
    assert sorted(set(numbers) for numbers in in_threads.values()) == [{0}, {3}]
    printed = capsys.readouterr().out
    assert printed.count("5_implicit_gemm, 0.5000 ms of ") == 3
    document = json.loads(out.read_text())
    assert [each["problem"] for each in document["problems"]] == [f"{each}x5" for each in problems]
    for text in problems:
        kept = tuned.kept(ConvProblem.parse(text), FakeGpu(), "float32")
        assert kept.kernel == "5_implicit_gemm"
    assert execute(["tune", *problems, "--gpu", "0,3"]) == 0
    assert capsys.readouterr().out.count("(kept; ") == 3


def test_gpus_of_two_kinds_do_not_share(in_threads, capsys):
    assert execute(["tune", "fa19_1", "--gpu", "0,9"]) == 16
    assert capsys.readouterr().err == (
        "ece408: error: GPU 0 is a fake GPU and GPU 9 an older GPU: what is measured on one "
        "does not hold for the other; tune for them one by one (--gpu)\n"
    )


def test_a_process_of_its_own_says_what_its_gpu_lacks():
    asked = (tuner.Task(FA19[0]), ["float32"])
    answers = [answer for _, answer in side_by_side.tune_all([98, 99], [asked, asked])]
    assert [type(answer) for answer in answers] == [ece408_op.errors.NoUsableGpu] * 2
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("reads", [True, False])
def test_a_process_that_dies_is_told(monkeypatch, reads):
    def start(gpu, theirs):
        def die():
            theirs.recv() if reads else theirs.poll(30)
            theirs.close()

        threading.Thread(target=die, daemon=True).start()
        return lambda: None

    monkeypatch.setattr(side_by_side, "_start", start)
    asked = (tuner.Task(FA19[0]), ["float32"])
    with pytest.raises(GpuFailed, match="the process of GPU 4 ended while it tuned b10000"):
        list(side_by_side.tune_all([4], [asked]))


@pytest.mark.gpu
def test_tuning_on_a_gpu(tmp_path, capsys):
    problem = ConvProblem.parse("b50,c3,h20,w20,m8,k3x3")
    tuned.forget()
    with settings.override(cache=tmp_path):
        assert execute(["tune", str(problem), "--precision", "float16"]) == 0
        found = tuned.kept(problem, device.get(0), "float16")
        assert found is not None
        assert found.candidates >= 10
        assert found.ms < 1
    tuned.forget()
    assert "not used" not in capsys.readouterr().out


TUNABLE = """
// ece408: launch conv<<<dim3(ceil_div(OH * OW, TILE), M, B), TILE>>>(y, x, w, C, H, W, K)
// ece408: tunable TILE = 2048, 256, 64
// ece408: tunable UNROLL = 1, 2
extern "C" __global__ void conv(float *y, const float *x, const float *w, int C, int H, int W,
                                int K) {}
"""


@pytest.fixture
def tunable(written):
    path = written("mine.cu", TUNABLE)
    return path


def test_a_file_s_tunables_are_its_layouts(tunable):
    kernel = catalog.get(str(tunable))
    layouts = kernel.layouts(FA19[1], (9, 0))
    # No block can have 2048 threads.
    assert [dict(each.tunables) for each in layouts] == [
        {"TILE": tile, "UNROLL": unroll} for tile in (256, 64) for unroll in (1, 2)
    ]
    plan = kernel.plan(FA19[1], (9, 0), False, layouts[3])
    assert plan.launches[0].block == (64, 1, 1)
    assert {("TILE", 64), ("UNROLL", 2)} <= set(plan.defines)
    assert kernel.plan(FA19[1], (9, 0), False).launches[0].block == (256, 1, 1)


def test_tunables_that_mean_nothing_have_their_line(tunable):
    for old, new, says in (
        ("TILE = 2048, 256, 64", "TILE = large", "mine.cu:3: .* should be tunable NAME = 1, 2"),
        ("UNROLL = 1, 2", f"UNROLL = {', '.join(map(str, range(99)))}", "297 combinations, more"),
        ("extern", "#define TILE 16\nextern", "put #ifndef TILE there"),
        (", 256, 64", "", r"would be \(2048, 1, 1\)"),
    ):
        tunable.write_text(TUNABLE.replace(old, new))
        with pytest.raises(ece408_op.errors.Ece408Error, match=says):
            work.plan(FA19[1], "forward", (9, 0), False, str(tunable))


def test_a_file_runs_with_the_tunables_that_were_measured(benches, play, tunable, capsys):
    play(lambda problem, name, macros: {256: 3.0, 64: 2.0}.get(macros.get("TILE"), 0.5))
    assert execute(["tune", "fa19_2", "--batch-size", "100", "--kernel", str(tunable)]) == 0
    printed = capsys.readouterr().out
    assert "in float32: mine.cu TILE=64 UNROLL=1, 2.0000 ms of 4 candidates" in printed
    # The default kernel is timed beside it.
    assert "float32    0.5000" in printed
    ran = work.forward(FA19[1], 0, 0, None, 0, False, str(tunable)).plans(FakeGpu(), 10000)
    assert dict(ran[0].defines)["TILE"] == 64
    # Choices for other kernels are unchanged, and those for another text of the file, too.
    assert tuned.best(FA19[1], FakeGpu(), "float32").kernel.name != "mine.cu"
    assert tuned.kept(dataclasses.replace(FA19[1], batch=100), FakeGpu(), "float32") is None
    assert execute(["tune", "fa19_2", "--batch-size", "100", "--kernel", str(tunable)]) == 0
    assert "(kept; --force measures it again)" in capsys.readouterr().out
    tunable.write_text(TUNABLE + "// changed\n")
    ran = work.forward(FA19[1], 0, 0, None, 0, False, str(tunable)).plans(FakeGpu(), 10000)
    assert dict(ran[0].defines)["TILE"] == 256
    assert execute(["tune", "fa19_2", "--kernel", "6_register_tiles"]) == 16
    assert execute(["tune", "b3,c2,h9,w9,m2,k3,p1", "--kernel", str(tunable)]) == 0
    assert "its launch mentions no PH and PW" in capsys.readouterr().err
