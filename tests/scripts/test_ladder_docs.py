"""Headers, catalog, the README's table and what was measured say the same."""

from __future__ import annotations

import re

import pytest
from places import ROOT
from studies import ladder_docs

from ece408_op.backends.cuda.kernels import catalog
from ece408_op.bench import cuda_report
from ece408_op.files.resources import kernels_dir

RESULTS = ROOT / "docs" / "results" / "cuda_bench.json"
LADDER = cuda_report.LADDER


@pytest.fixture(scope="module")
def document():
    return cuda_report.load(RESULTS)


@pytest.mark.parametrize("kernel", catalog.KERNELS, ids=lambda kernel: kernel.name)
def test_a_header_has_the_idea_the_change_and_the_measured_effect(kernel, document):
    source = (kernels_dir() / "cuda" / kernel.source).read_text()
    header = source[: re.search(r"^(?!//)", source, re.M).start()]
    assert len(re.findall(r"^// Measured: ", header, re.M)) == 1
    assert ladder_docs.header(source, kernel, document) == source, "run bench_cuda.py --headers"
    if kernel in LADDER:
        assert header.startswith(f"// {kernel.name.split('_')[0]}. ")
        assert re.search(r"^// Changed(:| against \d+_)", header, re.M)


def test_a_kernel_builds_on_one_before_it():
    for number, kernel in enumerate(LADDER, 1):
        assert kernel.name.startswith(f"{number}_")
        assert kernel.source == f"{kernel.name}.cu"
        header = (kernels_dir() / "cuda" / kernel.source).read_text()
        for before in re.findall(r"Changed against (\w+)\.cu", header):
            assert before in [each.name for each in LADDER[: number - 1]]


def test_the_readme_has_the_measured_table(document):
    text = (kernels_dir() / "README.md").read_text()
    assert ladder_docs.readme(text, document) == text, "run bench_cuda.py --headers"
    for kernel in catalog.KERNELS:
        assert f"| {kernel.name} | {kernel.summary} |" in text


def test_every_kernel_was_measured_right_on_every_shape_it_takes(document):
    from ece408_op.bench.shapes import SHAPES

    assert set(document["results"]) == set(SHAPES)
    for shape, entry in document["results"].items():
        assert entry["batch"] == SHAPES[shape].batch
        for kernel in catalog.KERNELS:
            if kernel.direction == "forward" and kernel.rejects(SHAPES[shape], (9, 0)) is None:
                timing = entry["kernels"][kernel.name]
                assert timing["failure"] is None
                assert timing["ms"]["n"] >= 20


@pytest.mark.parametrize("shape", cuda_report.STEPS)
def test_the_ladder_climbs(document, shape):
    """The float32-accurate kernels alone, from the first to the fastest."""
    steps = cuda_report.steps(document["results"], shape)
    accurate = [steps[k.name][0] for k in LADDER if k.float32_accurate and k.name in steps]
    assert accurate[0] / min(accurate) >= 8


def test_a_report_with_a_failure_shows_it():
    samples = {"samples_ms": [1.0, 3.0, 2.0], "error": 1e-7, "failure": None}
    timing = cuda_report.kept(samples)
    wrong = {**timing, "failure": "2 elements are not finite"}
    results = {"s": {"batch": 1, "kernels": {"1_naive": timing, "general": wrong}, "cudnn": {}}}
    text = cuda_report.tables(results)
    assert "| 1_naive | 2.000 |" in text
    assert "| general | failed |" in text


def test_a_results_file_that_is_none_is_an_error(tmp_path):
    from ece408_op.errors import InvalidSetting

    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InvalidSetting, match="is no results file"):
        cuda_report.load(tmp_path / "x.json")
    assert cuda_report.load(tmp_path / "y.json") == {}
