import shutil

import numpy as np
import pytest

from ece408_op import errors
from ece408_op.course import course_terms, scoring
from ece408_op.errors import CheckpointMismatch, CheckpointMissing
from ece408_op.files import resources

TERM = course_terms.TERMS["2019fa"]


@pytest.fixture
def folder(tmp_path):
    """Return a copy of the shipped checkpoint, to damage."""
    return shutil.copytree(resources.models_dir() / TERM.name, tmp_path / "copy")


def _parameters(folder):
    return next(folder.glob("baseline-*.params"))


def test_the_network_is_the_courses(mx):
    symbol = course_terms.network(TERM)
    arguments, outputs, _ = symbol.infer_shape(data=(2, 1, 70, 70))
    shapes = dict(zip(symbol.list_arguments(), arguments))
    assert shapes["conv1_weight"] == (12, 1, 5, 5)
    assert shapes["conv2_weight"] == (24, 12, 5, 5)
    assert shapes["fc1_weight"] == (160, 24 * 29 * 29)
    assert shapes["fc2_weight"] == (10, 160)
    assert outputs == [(2, 10)]
    assert not {"conv1_bias", "conv2_bias"} & set(shapes)


@pytest.mark.slow
def test_stock_mxnet_opens_the_baseline_and_agrees(mx, run_python, rng):
    """Module.load of an MXNet without this package, with float16 parameters."""
    prefix = resources.models_dir() / TERM.name / "baseline"
    epoch = int(_parameters(prefix.parent).stem.split("-")[1])
    code = (
        "import sys, numpy as np; np.bool = bool; import mxnet as mx\n"
        f"module = mx.mod.Module.load({str(prefix)!r}, {epoch})\n"
        "module.bind([('data', (3, 1, 70, 70))], for_training=False)\n"
        "pixels = np.random.default_rng(1).integers(0, 256, (3, 1, 70, 70))\n"
        "module.forward(mx.io.DataBatch([mx.nd.array(pixels)]), is_train=False)\n"
        "print(module.get_outputs()[0].asnumpy().tolist())\n"
        "assert 'ece408_op' not in sys.modules\n"
    )
    result = run_python(code, MXNET_SUBGRAPH_VERBOSE="0")
    assert result.returncode == 0, result.stderr
    pixels = np.random.default_rng(1).integers(0, 256, (3, 70, 70))
    for model in TERM.models:
        checkpoint = course_terms.load_model(TERM, model)
        module = mx.mod.Module(checkpoint.symbol)
        module.bind([("data", (3, 1, 70, 70))], for_training=False)
        module.set_params(checkpoint.arg_params, checkpoint.aux_params)
        batch = mx.io.DataBatch([mx.nd.array(scoring.as_input(pixels))])
        with errors.surfaced():
            module.forward(batch, is_train=False)
            answers = module.get_outputs()[0].asnumpy()
        np.testing.assert_allclose(answers, eval(result.stdout), rtol=1e-4, atol=1e-6)


def test_one_parameter_file_of_float16_serves_both_models(mx):
    folder = resources.models_dir() / TERM.name
    assert len(list(folder.glob("*.params"))) == 1
    arrays = mx.nd.load(str(_parameters(folder)))
    assert {array.dtype for array in arrays.values()} == {np.float16}


def test_every_image_counts_once_whatever_the_batch_size(mx, rng):
    checkpoint = course_terms.load_model(TERM, "baseline")
    images = rng.integers(0, 256, (7, 70, 70)).astype(np.uint8)
    labels = rng.integers(0, 10, 7).astype(np.uint8)
    scores = {
        scoring.evaluate(
            checkpoint.symbol, checkpoint.arg_params, {}, images, labels, batch_size
        ).get()[1]
        for batch_size in (1, 3, 7)
    }
    assert len(scores) == 1


def test_a_model_with_parameters_of_its_own_uses_them(mx, folder):
    shutil.copy(_parameters(folder), folder / "ece408-0002.params")
    arrays = mx.nd.load(str(_parameters(folder)))
    arrays["arg:conv1_weight"] *= 0
    mx.nd.save(str(folder / "ece408-0002.params"), arrays)
    checkpoint = course_terms.load_model(TERM, "ece408", folder)
    assert not checkpoint.arg_params["conv1_weight"].asnumpy().any()


def test_missing_files(mx, folder):
    with pytest.raises(CheckpointMissing, match=r"baseline-symbol\.json is not there"):
        course_terms.load_model(TERM, "baseline", folder / "nowhere")
    _parameters(folder).unlink()
    with pytest.raises(CheckpointMissing, match=r"ece408-0001\.params .* is not there"):
        course_terms.load_model(TERM, "ece408", folder)


def test_files_that_cannot_be_read(mx, folder):
    parameters = _parameters(folder)
    whole = parameters.read_bytes()
    for part in (whole[: len(whole) // 2], b"not parameters", b""):
        parameters.write_bytes(part)
        with pytest.raises(CheckpointMismatch, match=re_name(parameters)):
            course_terms.load_model(TERM, "ece408", folder)
    (folder / "ece408-symbol.json").write_text("{")
    with pytest.raises(CheckpointMismatch, match=r"ece408-symbol\.json is not a network"):
        course_terms.load_model(TERM, "ece408", folder)


def re_name(path):
    return path.name.replace(".", r"\.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("arg:fc2_bias"), "parameter fc2_bias is missing"),
        (
            lambda arrays: arrays.update({"arg:conv1_weight": arrays["arg:conv1_weight"][:6]}),
            r"parameter conv1_weight has shape \(6, 1, 5, 5\), but .* \(12, 1, 5, 5\)",
        ),
        (lambda arrays: arrays.update({"odd": arrays["arg:fc2_bias"]}), "holds 'odd'"),
    ],
)
def test_parameters_that_do_not_fit(mx, folder, change, message, capfd):
    arrays = mx.nd.load(str(_parameters(folder)))
    change(arrays)
    mx.nd.save(str(_parameters(folder)), arrays)
    with pytest.raises(CheckpointMismatch, match=message):
        course_terms.load_model(TERM, "ece408", folder)
    assert capfd.readouterr().out == ""


def test_a_checkpoint_of_another_term(mx, folder):
    with pytest.raises(CheckpointMismatch, match=r"the network does not take|has shape"):
        course_terms.load_model(course_terms.TERMS["2018sp"], "ece408", folder)
