import json
import shutil

import numpy as np
import pytest

import ece408_op
from ece408_op.course import course_terms, scoring
from ece408_op.errors import CheckpointMismatch, CheckpointMissing
from ece408_op.files import resources

FOLDER = resources.models_dir() / "2019fa"


def _as_the_course_stored_it(text, key="attrs"):
    """Return the symbol with the operator `New` and only the attributes `kernel` and
    `num_filter`."""
    graph = json.loads(text)
    for node in graph["nodes"]:
        given = node.pop("attrs", {})
        if node["op"] == "Custom":
            node["op"] = "New"
            given = {name: given[name] for name in ("kernel", "num_filter")}
        elif node["op"] == "null":
            given = {}
        if given:
            node[key] = given
    return json.dumps(graph)


@pytest.fixture
def course_folder(tmp_path):
    """Return a folder with a checkpoint as the course distributed it: ece408-symbol.json,
    ece408-0002.params."""
    text = (FOLDER / "ece408-symbol.json").read_text()
    (tmp_path / "ece408-symbol.json").write_text(_as_the_course_stored_it(text))
    shutil.copy(next(FOLDER.glob("baseline-*.params")), tmp_path / "ece408-0002.params")
    return tmp_path


@pytest.mark.parametrize("key", ["attrs", "attr", "param"])
def test_the_courses_operator_loads_and_computes_the_same(mx, course_folder, rng, key):
    text = (FOLDER / "ece408-symbol.json").read_text()
    (course_folder / "ece408-symbol.json").write_text(_as_the_course_stored_it(text, key))
    symbol, arg_params, aux_params = ece408_op.load_checkpoint(course_folder / "ece408", 2)
    shipped = course_terms.load_model(course_terms.TERMS["2019fa"], "ece408")
    assert symbol.list_arguments() == shipped.symbol.list_arguments()
    images = rng.integers(0, 256, (20, 70, 70)).astype(np.uint8)
    with ece408_op.op_times() as log:
        found = scoring.answers(symbol, arg_params, aux_params, images, 20)
    assert [entry.layer for entry in log] == ["conv1", "conv2"]
    expected = scoring.answers(shipped.symbol, shipped.arg_params, {}, images, 20)
    np.testing.assert_array_equal(found, expected)


def test_the_course_checkpoint_scores_the_same_in_the_milestone(
    run_here, course_folder, fashion_mnist
):
    result = run_here("m2.1", "200", "--model-dir", str(course_folder))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == run_here("m2.1", "200").stdout.splitlines()[-1]


def test_other_networks_load_as_mxnet_loads_them(mx):
    prefix = FOLDER / "baseline"
    epoch = int(next(FOLDER.glob("baseline-*.params")).stem.split("-")[1])
    symbol, arg_params, aux_params = ece408_op.load_checkpoint(str(prefix), epoch)
    stock, stock_params, _ = mx.model.load_checkpoint(str(prefix), epoch)
    assert symbol.tojson() == stock.tojson()
    assert arg_params.keys() == stock_params.keys()
    assert all(arg_params[name].dtype == stock_params[name].dtype for name in arg_params)
    assert aux_params == {}


def test_files_that_are_not_there(mx, course_folder):
    with pytest.raises(CheckpointMissing, match=r"ece408-0007\.params is not there"):
        ece408_op.load_checkpoint(course_folder / "ece408", 7)
    with pytest.raises(CheckpointMissing, match=r"other-symbol\.json is not there"):
        ece408_op.load_checkpoint(course_folder / "other", 2)


@pytest.mark.parametrize("text", ["{", "[]", '{"nodes": [{}]}', '{"nodes": [{"op": "No"}]}'])
def test_files_that_are_not_networks(mx, course_folder, text):
    (course_folder / "ece408-symbol.json").write_text(text)
    with pytest.raises(CheckpointMismatch, match=r"symbol\.json is not a network"):
        ece408_op.load_checkpoint(course_folder / "ece408", 2)
