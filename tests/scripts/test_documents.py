"""Measured times in documents, and the steps to add a CUDA kernel to the ladder."""

import os
import shutil
import subprocess
import sys

import pytest
from places import ROOT
from studies import documents

from ece408_op.bench import cuda_report, results
from ece408_op.errors import InvalidSetting
from ece408_op.files.resources import kernels_dir
from ece408_op.host.gpu import find_nvcc

CATALOG_TESTS = [
    f"tests/{name}.py"
    for name in (
        *("backends/cuda/kernels/test_catalog", "bench/test_checker", "scripts/test_documents"),
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
    slow, fast = ({"median": each, "min": 1.0, "n": 3} for each in (2.0, 0.5))
    row = {"case": "fa19_1", "batch": 5, "ms": {"1_naive": slow, "2_constant_weights": fast}}
    document = {"machine": {"gpus": ["a GPU"]}, "rows": [row]}
    ms = {"ours": fast, "mxnet": slow, "torch NCHW": slow, "torch NHWC": fast}
    forward = {"direction": "forward", "floor_ms": 0.25, "ms": ms}
    cpu = {"rows": [{**row, **forward}, {"case": "c1,h9,w9,m1,k3", "batch": 5, **forward}]}
    outdated = documents.outdated(ROOT, cpu, document)
    texts = {path.relative_to(ROOT).as_posix(): text for path, text in outdated.items()}
    headers = {path.rpartition("/")[2]: text for path, text in texts.items()}
    assert "\n// Measured: fa19_1 2.00 ms; batch 5, a GPU.\n" in headers["1_naive.cu"]
    assert "fa19_1 0.50 ms (4.00x); batch 5" in headers["2_constant_weights.cu"]
    assert "\n// Measured: not yet.\n" in headers["3_shared_tiles.cu"]
    ladder = "| 2_constant_weights | weights in constant memory | float32 | 0.50 | 4.00x |"
    assert ladder in texts["kernels/README.md"]
    own, _ = texts["README.md"].split(documents.TIMES[1])
    assert own.endswith("\n| fa19_1 | `b5,c1,h70,w70,m12,k5x5` | 0 ms | 50% | 4.0x | 1.0x |\n")


def test_documents_without_marks_are_said():
    with pytest.raises(InvalidSetting, match=r"the text lacks the lines <!-- .* and <!-- .*"):
        documents.between("text", documents.TIMES, "new")


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
from ece408_op.backends.cuda.runtime import compiler
from ece408_op.bench.shapes import SHAPES
kernel = catalog.get("20_new")
plan = kernel.plan(SHAPES["fa19_2"], (9, 0), False)
compiler.compile_plan(kernel.source, plan.defines, "90", __import__("pathlib").Path("kept"))
"""


@pytest.mark.slow
def test_a_new_kernel_is_a_source_and_an_entry(tmp_path):
    """It needs no GPU, and no other file changes."""
    for folder in ("ece408_op", "kernels", "scripts", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "kernels" / "cuda" / "ladder" / "20_new.cu").write_text(NEW_KERNEL)
    family = tmp_path / "ece408_op" / "backends" / "cuda" / "kernels" / "runtime_shapes.py"
    entries = "KERNELS = (\n"
    assert entries in family.read_text()
    entry = '    entry("20_new", "nothing new", Naive()),\n'
    family.write_text(family.read_text().replace(entries, entries + entry))
    # Other kernels' plans are unchanged.
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
    ms = {name: results.summary([1.0, 3.0, 2.0]) for name in ("1_naive", "general")}
    row = {"case": "s", "batch": 1, "ms": ms, "errors": dict.fromkeys(ms, 1e-7)}
    text = cuda_report.tables([{**row, "failures": {"general": "2 elements are not finite"}}])
    assert "| 1_naive | 2.000 |" in text
    assert "| general | failed |" in text


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_results_file_that_is_none_is_an_error(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InvalidSetting, match="is no results file"):
        results.load(tmp_path / "x.json")
    assert results.load(tmp_path / "y.json") == {}
