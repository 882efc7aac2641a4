"""The commands and lists in README.md and docs/manual.md are correct."""

import json
import re
import statistics
from unittest.mock import Mock

import numpy as np
import pytest
from places import ROOT
from studies import documents

from ece408_op import errors, settings
from ece408_op.backends import DIRECTIONS
from ece408_op.bench import results
from ece408_op.cli.main import _parser
from ece408_op.settings import _VARIABLES

README = (ROOT / "README.md").read_text()
MANUAL = (ROOT / "docs" / "manual.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README + MANUAL, re.S)


def test_the_python_examples_run(mx, capsys, tmp_path, monkeypatch):
    assert len(EXAMPLES) == 8
    monkeypatch.chdir(tmp_path)
    net = mx.gluon.model_zoo.vision.get_model("resnet18_v1")
    net.initialize()
    net.hybridize()
    images = mx.nd.ones((1, 3, 224, 224))
    expected = net(images).asnumpy()
    net.export("resnet18", 7)
    names: dict = {"images": images.asnumpy()}
    for block in EXAMPLES:
        exec(block, names)
        if "load_network" in block:
            np.testing.assert_allclose(names["y"], expected, atol=1e-5 * np.abs(expected).max())
    printed = capsys.readouterr().out
    assert "swapped 26: squeezenet" in printed
    assert "on the GPU: 66 of 66 nodes, in parts of: 66" in printed


def test_the_recipe_for_errors_shows_the_original_one(mx, capsys, monkeypatch):
    from ece408_op.backends import Backend
    from ece408_op.backends.cpu.cpu_backend import CpuBackend

    first, _, recipe, *_ = EXAMPLES
    names: dict = {}
    exec(first, names)
    mx.nd.waitall()
    failed = Mock(side_effect=ZeroDivisionError("inside the kernel"))
    monkeypatch.setattr(CpuBackend, "forward", failed)
    # Python calls a backend that has no compiled function.
    monkeypatch.setattr(CpuBackend, "native_function", Backend.native_function)
    with settings.override():
        exec(recipe, names)
    printed = capsys.readouterr().out
    assert printed == "the operator failed: ZeroDivisionError: inside the kernel\n"


def test_every_command_is_listed():
    commands = _parser()._subparsers._group_actions[0].choices
    for command in commands:
        assert f"`ece408 {command}" in README + MANUAL, command


@pytest.mark.parametrize("variable", _VARIABLES.values())
def test_every_setting_is_listed(variable):
    assert f"| `{variable}` |" in MANUAL


def _all_errors(base=errors.Ece408Error):
    for each in base.__subclasses__():
        yield each
        yield from _all_errors(each)


def test_every_exit_code_is_listed():
    listed = MANUAL[MANUAL.index("## Exit codes") : MANUAL.index("## Development")]
    for error in _all_errors():
        assert re.search(rf"\b{error.exit_code} ", listed), error


def _of(name):
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())


def test_the_table_of_times_is_what_was_measured():
    assert documents.between(README, documents.TIMES, documents.times(_of("cpu"))) == README


def _mean(name, batch, peer, direction=None):
    """Return our speed-up over a peer, as a geometric mean, from the results."""
    rows = [row for row in _of(name)["rows"] if row["batch"] == batch]
    return statistics.geometric_mean(
        results.peers(row)[peer] / row["ms"]["ours"]["median"]
        for row in rows
        if row.get("direction") == direction
    )


def test_what_it_says_of_layers_and_networks_is_what_was_measured():
    forward, data, weight = (
        f"{_mean('gpu_layers_h200', 32, 'cudnn', each):.2f}" for each in DIRECTIONS
    )
    text = " ".join(README.split())
    assert f"{forward} times as fast as cuDNN forward, {data} and {weight} times for gra" in text
    for peer, end in (("torch graph", "times as fast at batch"), ("torch tf32 graph", "times as")):
        means = [f"{_mean('gpu_networks_h200', each, peer):.2f}" for each in (1, 32, 256)]
        assert f"{means[0]}, {means[1]} and {means[2]} {end}" in text
    for batch in (1, 32, 256):
        variants = ("torch eager", "torch tf32 eager", "torch graph", "torch tf32 graph")
        cells = " | ".join(f"{_mean('gpu_networks_h200', batch, each):.2f}" for each in variants)
        assert f"\n| {batch} | {cells} |\n" in MANUAL


def test_links_lead_somewhere():
    for folder, text in ((ROOT, README), (ROOT / "docs", MANUAL)):
        for target in re.findall(r"\]\((?!https:)([^)]+)\)", text):
            name, _, heading = target.partition("#")
            path = folder / name
            assert path.exists(), target
            if heading:
                titles = re.findall(r"^##+ (.*)$", path.read_text(), re.M)
                assert heading in [title.lower().replace(" ", "-") for title in titles], target


def test_the_readme_is_short():
    assert README.count("\n") <= 150
