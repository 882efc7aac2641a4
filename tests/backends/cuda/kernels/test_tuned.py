"""Results of tuning: stored, found for the nearest batch, and ignored when outdated."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_gpu import FakeGpu, Rows, tiled

from ece408_op import settings
from ece408_op.backends.cuda import work
from ece408_op.backends.cuda.kernels import catalog, tuned
from ece408_op.backends.cuda.kernels.tuned import Result
from ece408_op.bench.shapes import SHAPES
from ece408_op.files.resources import kernels_dir
from ece408_op.problem import ConvProblem

PROBLEM = SHAPES["fa19_2"]


@pytest.fixture(autouse=True)
def gpu(tmp_path):
    tuned.forget()
    with settings.override(cache=tmp_path):
        yield FakeGpu()
    tuned.forget()


def _result(kernel, batch=10000, precision="float32", tunables=(), problem=PROBLEM):
    problem = dataclasses.replace(problem, batch=batch)
    return Result(problem, precision, kernel, tunables, 1.25, 7)


def _best(gpu, batch=10000, precision="float32", **changes):
    problem = dataclasses.replace(PROBLEM, batch=batch, **changes)
    return tuned.best(problem, gpu, precision)


def test_without_results_the_catalog_has_the_choice(gpu):
    assert _best(gpu).kernel == catalog.default(PROBLEM, "forward", gpu.capability)
    assert _best(gpu).tunables == ()
    assert not tuned.file(gpu).parent.exists()


def test_a_result_is_used_for_its_layer_and_precision_only(gpu):
    path = tuned.save([_result("5_implicit_gemm")], gpu)
    assert path == tuned.file(gpu)
    assert str(_best(gpu)) == "5_implicit_gemm"
    assert _best(gpu, bias=True).kernel.name == "5_implicit_gemm"
    for other in (_best(gpu, precision="tf32"), _best(gpu, filters=23), _best(gpu, height=34)):
        assert other.kernel.name != "5_implicit_gemm"
    for asked, name in ((None, "5_implicit_gemm"), ("1_naive", "1_naive")):
        (plan,) = work.forward(PROBLEM, 0, 0, None, 0, False, asked).plans(gpu, 5000)
        assert plan.kernel.name == name


def test_the_nearest_batch_decides(gpu):
    tuned.save([_result("5_implicit_gemm", 100), _result("1_naive", 1)], gpu)
    tuned.save([_result("6_register_tiles", 300)], gpu)
    found = {batch: _best(gpu, batch).kernel.name for batch in (1, 4, 25, 170, 180, 1200)}
    assert list(found.values()) == [
        *("1_naive", "1_naive", "5_implicit_gemm", "5_implicit_gemm"),
        *("6_register_tiles", "6_register_tiles"),
    ]
    # No result is near enough to this batch.
    for batch in (5, 24, 1201):
        problem = dataclasses.replace(PROBLEM, batch=batch)
        assert _best(gpu, batch).kernel == catalog.default(problem, "forward", gpu.capability)


def test_tunables_reach_the_plan_and_must_be_valid(gpu, monkeypatch):
    kernel = tiled("5_implicit_gemm")
    monkeypatch.setitem(catalog._BY_NAME, kernel.name, kernel)
    tunables = (("rows", 2),)
    tuned.save([_result(kernel.name, tunables=tunables)], gpu)
    (plan,) = work.forward(PROBLEM, 0, 0, None, 0, False).plans(gpu, PROBLEM.batch)
    assert plan == kernel.plan(PROBLEM, gpu.capability, False, Rows(2))
    assert plan != kernel.plan(PROBLEM, gpu.capability, False)
    assert str(_best(gpu)) == "5_implicit_gemm rows=2"
    for invalid in ((("rows", 3),), (("columns", 2),)):
        tuned.save([_result(kernel.name, tunables=invalid)], gpu)
        assert _best(gpu).kernel.name != kernel.name


@pytest.mark.parametrize("kernel", ["99_from_the_future", "10_tf32", "13_column_pairs", "general"])
def test_what_cannot_be_used_is_passed_over(gpu, kernel):
    # A missing kernel, a less exact one, one that rejects the problem; the last is usable.
    tuned.save([_result(kernel, 100), _result("5_implicit_gemm", 30)], gpu)
    expected = "general" if kernel == "general" else "5_implicit_gemm"
    assert _best(gpu, 100).kernel.name == expected


def test_a_new_result_replaces_the_old_one_of_its_problem(gpu):
    tuned.save([_result("1_naive"), _result("1_naive", 100)], gpu)
    tuned.save([_result("5_implicit_gemm")], gpu)
    assert tuned.kept(PROBLEM, gpu, "float32") == _result("5_implicit_gemm")
    assert tuned.kept(dataclasses.replace(PROBLEM, bias=True), gpu, "float32") is not None
    assert tuned.kept(PROBLEM, gpu, "tf32") is None
    assert len(json.loads(tuned.file(gpu).read_text())["results"]) == 2


def test_several_may_write_at_once(gpu):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: tuned.save([_result("1_naive", n)], gpu), range(1, 33)))
    assert len(json.loads(tuned.file(gpu).read_text())["results"]) == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"driver": 12000}, "are of another driver; `ece408 tune` measures again"),
        ({"kernels": "0123"}, "are of another kernels"),
        ({"gpu": "a better one"}, "are of another gpu"),
        ({"results": [{"problem": "b1"}]}, "cannot be read (KeyError: 'tunables')"),
        ({"results": [{"problem": "b1", "tunables": {}}]}, "cannot be read (InvalidProblem"),
        ({"results": None}, "cannot be read (TypeError"),
        ({"results": []}, "cannot be read (ValueError: its content is not that of its checksum"),
        ({"sha256": "0"}, "cannot be read (ValueError"),
        ("{", "cannot be read (JSONDecodeError"),
        ("[]", "cannot be read (TypeError"),
    ],
)
def test_a_file_out_of_date_or_damaged_is_left_alone_with_one_warning(gpu, caplog, change, message):
    path = tuned.save([_result("1_naive")], gpu)
    content = json.loads(path.read_text())
    path.write_text(change if isinstance(change, str) else json.dumps({**content, **change}))
    tuned.forget()
    for batch in (1, 100, 10000):
        assert _best(gpu, batch).kernel.name != "1_naive"
    (record,) = caplog.records
    assert message in record.getMessage()
    assert str(path) in record.getMessage()
    assert "\n" not in record.getMessage()
    # The next result is written again.
    tuned.save([_result("5_implicit_gemm")], gpu)
    assert _best(gpu).kernel.name == "5_implicit_gemm"


def test_results_do_not_depend_on_comments(tmp_path, monkeypatch):
    folder = tmp_path / "kernels" / "cuda"
    folder.mkdir(parents=True)
    monkeypatch.setattr(tuned, "kernels_dir", lambda: tmp_path / "kernels")

    def word(text):
        (folder / "a.cu").write_text(text)
        tuned._kernels.cache_clear()
        return tuned._kernels()

    words = [word("int a; // one\n"), word("// another\nint a;\n"), word("int b; // one\n")]
    tuned._kernels.cache_clear()
    assert words[0] == words[1] != words[2]


SHIPPED = sorted((kernels_dir() / "tuned").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_results_can_be_used_and_are_overruled_by_own_ones(path):
    document = json.loads(path.read_text())
    shipped = FakeGpu()
    shipped.name = document["gpu"]
    shipped.capability = tuple(map(int, document["capability"].split(".")))
    assert tuned._file(path.parent, shipped.name) == path
    for each in document["results"]:
        problem = ConvProblem.parse(each["problem"])
        direction = each.get("direction", "forward")
        choice = tuned.best(problem, shipped, each["precision"], direction)
        assert choice.kernel.name == each["kernel"]
        assert dict(choice.tunables) == each["tunables"]
        assert choice.kernel.permitted(each["precision"], problem)
    tuned.save([_result("1_naive")], shipped)
    assert _best(shipped).kernel.name == "1_naive"


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"])
def test_gpus_of_a_kind_share_what_is_shipped(gpu, name):
    gpu.name = "NVIDIA H200"
    of_h200 = _best(gpu, 16)
    assert of_h200.kernel != catalog.default(PROBLEM, "forward", gpu.capability)
    gpu.name = name
    assert _best(gpu, 16) == of_h200
