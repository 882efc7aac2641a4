"""The ladder of CUDA kernels: headers, what was measured, and what it takes to add a kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from places import ROOT
from studies import ladder_docs

from ece408_op.bench import cuda_report
from ece408_op.files.resources import kernels_dir
from ece408_op.host.gpu import find_nvcc

CATALOG_TESTS = [
    f"tests/{name}.py"
    for name in (
        "backends/cuda/kernels/test_catalog",
        "bench/test_checker",
        "scripts/test_ladder_docs",
    )
]
LADDER = cuda_report.LADDER


def test_a_kernels_header_has_the_idea_and_names_its_parent():
    """The diff with the parent is the idea."""
    names = [kernel.name for kernel in LADDER]
    for kernel in LADDER:
        header = (kernels_dir() / "cuda" / kernel.source).read_text()
        assert kernel.macros or kernel.source.endswith(f"/{kernel.name}.cu")
        assert header.startswith(f"// {kernel.name.split('_')[0]}. "), kernel.name
        parent = cuda_report.parent(kernel)
        if kernel is LADDER[0]:
            assert parent is None
        else:
            assert parent in names[: names.index(kernel.name)], kernel.name
    assert all(kernel.name in cuda_report.tree() for kernel in LADDER)


def test_what_was_measured_goes_into_headers_and_readme():
    timing = {"ms": {"median": 2.0, "min": 1.0, "n": 3}, "error": 1e-7, "failure": None}
    results = {"fa19_1": {"batch": 5, "kernels": {"1_naive": timing}, "cudnn": {}}}
    half = {**timing, "ms": {"median": 0.5, "min": 0.5, "n": 1}}
    results["fa19_1"]["kernels"]["2_constant_weights"] = half
    document = {"machine": {"gpus": ["a GPU"]}, "results": results}
    outdated = ladder_docs.outdated(kernels_dir(), document)
    texts = {path.name: text for path, text in outdated.items()}
    assert "\n// Measured: fa19_1 2.00 ms; batch 5, a GPU.\n" in texts["1_naive.cu"]
    assert "fa19_1 0.50 ms (4.00x); batch 5" in texts["2_constant_weights.cu"]
    assert "\n// Measured: not yet.\n" in texts["3_shared_tiles.cu"]
    assert (
        "| 2_constant_weights | weights in constant memory | float32 | 0.50 | 4.00x |"
        in (texts["README.md"])
    )


NEW_KERNEL = """\
// 20. Nothing new.
//
// Changed against 1_naive.cu: the name.
//
// Measured: not yet.
#include "1_naive.cu"
"""


COMPILES = """
from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import nvcc_compiler
from ece408_op.bench.shapes import SHAPES
kernel = catalog.get("20_new")
plan = kernel.plan(SHAPES["fa19_2"], (9, 0), False)
nvcc_compiler.compile_plan(kernel.source, plan.defines, "90", __import__("pathlib").Path("kept"))
"""


def test_a_new_kernel_is_a_source_and_an_entry(tmp_path):
    """On a machine without a GPU, and nothing else has to be told of it."""
    for folder in ("ece408_op", "kernels", "scripts", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "kernels" / "cuda" / "ladder" / "20_new.cu").write_text(NEW_KERNEL)
    family = tmp_path / "ece408_op" / "backends" / "cuda" / "kernels" / "runtime_shapes.py"
    entries = "KERNELS = (\n"
    assert entries in family.read_text()
    entry = '    entry("20_new", "nothing new", Naive()),\n'
    family.write_text(family.read_text().replace(entries, entries + entry))
    # Other kernels' plans are as they were.
    chosen = "not a_new and (20_new or not plans_stay)"
    commands = [["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *CATALOG_TESTS]]
    if find_nvcc() is not None:
        commands.append(["-c", COMPILES])
    for command in commands:
        result = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


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
