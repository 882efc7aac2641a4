"""Correct kernels are accepted, and verdicts on incorrect ones name the error and its place."""

import json
import re
import sys

import programs
import pytest
from cases import first
from kernel_files import COURSE_2019, COURSE_2020, FORMS
from places import ROOT

from ece408_op.backends import kernel_file
from ece408_op.lab import check as checking
from ece408_op.problem import ConvProblem

STARTERS = ROOT / "kernels" / "files" / "starters"
PROBLEM = "b3,c3,h10,w14,m5,k3x3"
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _few_images(monkeypatch):
    monkeypatch.setitem(checking._BATCH, "cpu", 2)
    monkeypatch.setattr(checking, "_ODD_PROBLEMS", 4)


@pytest.fixture
def check(written):
    """Check a text as a file; return its verdict."""

    def checked(name, text, problems=(PROBLEM,), **keywords):
        parsed = [ConvProblem.parse(each) for each in problems]
        return checking.check(kernel_file.find(str(written(name, text))), parsed, **keywords)

    return checked


def _said(verdict):
    return "\n".join(f.text for group in verdict.groups for f in group.failures)


@pytest.mark.parametrize(
    "name", ["new-forward.h", "cpu-new-forward.cc", pytest.param("with-stride.cc", marks=SLOW)]
)
def test_right_ones_are_right(check, name):
    steps = []
    verdict = check(name, FORMS[name], problems=(), progress=lambda: steps.append(1))
    assert verdict.is_right, _said(verdict)
    assert not verdict.elsewhere
    *terms, others, odd = verdict.groups
    assert sum(group.right for group in (*terms, others)) == 11
    later = [("2020fa and later", 2)]
    earlier = [("2017fa", 1), ("2018sp", 2), ("2019sp", 2), ("2019fa", 2)]
    expected = earlier if name == "new-forward.h" else later
    assert [(group.term, group.right) for group in terms] == expected
    assert odd.right + len(odd.refused) == 4
    assert bool(odd.refused) == (name != "with-stride.cc")
    assert 0 < verdict.error < 2e-6
    assert len(steps) == 15


# The change to a kernel, and the verdict, for `last` + 1 images.
WRONG = [
    ("h < Height_out", "h < Height_out - 1", "not written: all in row 7, the last"),
    (
        *("w < Width_out", "w < Width_out - 2"),
        "not written: all in columns 10 to 11, the last 2 of 12",
    ),
    ("int w = 0; w", "int w = 1; w", "not written: all in column 0, the first"),
    ("b < Batch", "b < Batch - 1", "not written: all in image {last}, the last"),
    ("m < Map_out", "m < Map_out / 2", "not written: all in filters 2 to 4, the last 3 of 5"),
    ("m++)", "m += 2)", "not written: all in 2 of 5 filters"),
    ("c < Channel", "c < Channel - 1", "the last channel is left out"),
    ("int c = 0", "int c = 1", "the first channel is left out"),
    ("c < Channel", "c < 1", "only the first channel is added up"),
    ("p < K", "p < K - 1", "the kernel's last row is left out"),
    ("q < K", "q < K - 1", "the kernel's last column is left out"),
    ("+ p) * K + q];", "+ K - 1 - p) * K + K - 1 - q];", "the kernel is turned round"),
    ("+ p) * K + q];", "+ q) * K + p];", "rows and columns of w are exchanged"),
    ("= sum;", "= 0;", "everything is 0"),
    ("= sum;", "= sum + (b == 1);", "all in image 1"),
    ("= sum;", "= sum + (m == 4 && w == 3);", "all in filter 4, the last, column 3"),
    ("= sum;", "= h % 2 ? sum + 1 : sum;", "every 2th row from 1 on"),
    ("= sum;", "= sum + 1;", "everywhere"),
    ("= sum;", "= (int)sum % 64;", "scattered over"),
    ("= sum;", "= (_Float16)sum;", "elements are wrong"),
    ("* Width + w + q]", "* Height + w + q]", "elements are wrong"),
    ("float sum = 0", "static float sum = 0", "elements are wrong"),
    ("float sum = 0;", "float sum; sum = output[0] * 0;", "nothing is written"),
]


def test_a_wrong_kernel_is_described(check):
    """All changes in one file, each for batches of a specific size."""
    head, kernel = COURSE_2020.split("void conv_forward_cpu(")
    text, calls = head, ""
    for number, (right, wrong, _) in enumerate(WRONG):
        assert right in kernel
        text += f"static void wrong_{number}({kernel.replace(right, wrong)}"
        calls += f"case {number + 3}: return wrong_{number}(y, x, w, B, M, C, H, W, K);"
    text += (
        "void conv_forward_cpu(float *y, const float *x, const float *w, const int B, const int M,"
    )
    text += f"const int C, const int H, const int W, const int K) {{ switch (B) {{{calls}}} }}"
    problems = [PROBLEM.replace("b3", f"b{number + 3}") for number in range(len(WRONG))]
    verdict = check("wrong.cc", text, problems)
    failures = {each.problem: each.text for each in verdict.groups[0].failures}
    for number, ((*_, says), problem) in enumerate(zip(WRONG, problems)):
        told = failures.get(str(ConvProblem.parse(problem)), "")
        assert says.format(last=number + 2) in told, WRONG[number]


@pytest.mark.slow
def test_a_failure_is_repeated_by_its_problem_and_seed(check):
    text = COURSE_2020.replace("= sum;", "= sum + (m == 1 && w == 3 && b == 1);")
    verdict = check("wrong.cc", text, problems=(), term="2020fa")
    assert len(verdict.groups[0].failures) == 2
    # Odd sizes are random: they may have no problem with such an element.
    for group in [each for each in verdict.groups if each.failures][:2]:
        failure = group.failures[0]
        assert failure.first.startswith("image 1, filter 1, row 0, column 3: ")
        again = check("wrong.cc", text, (failure.problem,), seed=failure.seed)
        assert again.groups[0].failures == [failure]
    # Otherwise its numbers are secret.
    other = check("wrong.cc", text, (failure.problem,))
    assert other.groups[0].failures[0].seed != failure.seed


@pytest.mark.slow
def test_one_that_crashes_now_and_then_is_gone_on_with(check, monkeypatch):
    text = COURSE_2020.replace(
        "float sum = 0;", "float sum = Map_out == 3 ? *(volatile float *)8 : 0;"
    )
    verdict = check(
        "wrong.cc", text, ("b1,c1,h5,w5,m2,k3", "b1,c1,h5,w5,m3,k3", "b1,c1,h6,w5,m2,k3")
    )
    assert (verdict.groups[0].right, len(verdict.groups[0].failures)) == (2, 1)
    assert "memory that is not its own (SIGSEGV)" in _said(verdict)
    monkeypatch.setattr(checking, "_MOST_STARTS", 4)
    said = _said(check("wrong.cc", text, ("b1,c1,h5,w5,m3,k3",) * 9)).splitlines()
    assert said[-1].startswith("its process hung, or ended too often")
    assert len(said) < 5


@SLOW
def test_one_that_hangs_on_another_terms_layers_is_right(check):
    text = COURSE_2019.replace("for (int b", "for (volatile int i = M == 50; i;) {}\n  for (int b")
    verdict = check("new-forward.h", text, problems=(), call_seconds=10)
    assert verdict.is_right, _said(verdict)
    right = [group.term for group in verdict.groups if group.is_right]
    assert right == ["2018sp", "2019sp", "2019fa", "", ""]
    assert "a call takes more than 10 s" in _said(verdict)


BY_TERM = [
    (
        *("new-forward.h", "c < C", "c < std::min(C, 6)", ()),
        "right for 2017fa, 2018sp, 2019sp; wrong for 2019fa",
    ),
    ("cpu-new-forward.cc", "p < K", "p < 7", (), "right for 2020fa and later"),
    ("cpu-new-forward.cc", "p < K", "p < 7", ("--term", "2025sp"), "right for 2025sp"),
    ("cpu-new-forward.cc", "p < K", "p < 7", ("--term", "2019sp"), "wrong"),
    ("new-forward.h", "p < K", "p < 5", ("--term", "2019fa"), "right for 2019fa"),
]


@pytest.mark.parametrize(("name", "old", "new", "options", "says"), first(1, BY_TERM))
def test_a_files_own_terms_decide(run_here, written, name, old, new, options, says):
    path = written(name, FORMS[name].replace(old, new))
    result = run_here("lab", "check", str(path), *options)
    assert f"\n  verdict: {says}\n" in result.stdout
    assert result.returncode == (23 if says == "wrong" else 0)
    other = says not in ("right", "wrong")
    assert ("\n  right on its own layers; " in result.stdout) == other


def test_a_term_is_one_of_the_course(run_here, tmp_path):
    (tmp_path / "mine.cc").write_text(COURSE_2020)
    for term in ("2020sp", "fa19", "2019"):
        for command in ("check", "rank"):
            result = run_here("lab", command, str(tmp_path / "mine.cc"), "--term", term)
            assert (result.returncode, result.stdout) == (4, "")
            assert result.stderr == (
                f"ece408: error: unknown term {term!r}; there are: 2017fa, 2018sp, 2019sp, 2019fa, "
                "2020fa and those after it\n"
            )
    both = ("--term", "2019fa", "--layer", "fa19_1")
    result = run_here("lab", "rank", str(tmp_path / "mine.cc"), *both)
    assert (result.returncode, result.stdout) == (16, "")


def test_the_command(run_here, tmp_path, written):
    for name, starter in (("mine.cc", "cpu-new-forward.cc"), ("mine.h", "new-forward.h")):
        path = tmp_path / name
        result = run_here("lab", "new", str(path))
        assert result.returncode == 0, result.stderr
        assert path.read_text() == (STARTERS / starter).read_text()
        assert f"ece408 lab check {path}" in result.stdout
    again = run_here("lab", "new", str(path))
    assert (again.returncode, "is there already" in again.stderr) == (16, True)
    wrong = written("wrong.cc", COURSE_2020.replace("= sum;", "= sum + (w == 2);"))
    broken = written("broken.cc", COURSE_2020.replace("float sum = 0;", "float sum = nothing;"))
    output = tmp_path / "verdicts.json"
    files = [str(tmp_path / "mine.cc"), str(wrong), str(broken)]
    options = ("--problem", PROBLEM, "--seed", "7", "--json", str(output))
    result = run_here("lab", "check", *files, *options)
    assert result.returncode == 23, result.stderr
    right, second = result.stdout.split(str(tmp_path))[1:3]
    assert "given problems: 1 of 1 right" in right
    assert "verdict: right" in right
    assert "120 of 1440 elements" in second
    assert "all in column 2" in second
    assert result.stdout.count("verdict: wrong\n") == 2
    assert f"--problem {PROBLEM} --seed 7" in result.stdout
    assert re.search("stopped: broken.cc:18: .nothing. was not declared", result.stdout)
    assert "wrong.cc, broken.cc: not right" in result.stderr
    verdicts = json.loads(output.read_text())
    right = [bool(each["groups"] and each["groups"][0]["right"]) for each in verdicts]
    assert right == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("new", "mine.py"), 16, "should end in one of .cu, .cuh, .cc, .h"),
        (("new", "mine.cc", "--form", "cuda"), 16, "should end in .cu"),
        (("new", "README.md/mine.cc"), 10, "cannot write"),
        (("check", "nothing.cc"), 16, "cannot be read"),
        (("check", "README.md"), 16, "should end in one of"),
        (("check",), 2, "the following arguments are required: FILE"),
    ],
)
def test_bad_input_is_one_line(refused, arguments, code, text):
    refused(code, text, "lab", *arguments)


def test_without_a_gpu_cuda_files_are_not_ranked(run_ece408, tmp_path):
    command = ("lab", "rank", str(STARTERS / "start.cu"), "--output", str(tmp_path / "ranking"))
    result = run_ece408(*command, CUDA_VISIBLE_DEVICES="")
    assert (result.returncode, result.stdout) == (18, "")
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "ranking").exists()


def test_what_lies_in_the_current_folder_is_not_imported(tmp_path, kept):
    """Neither the command nor the process that runs the file's code imports it."""
    (tmp_path / "mine.cc").write_text(COURSE_2020)
    for name in ("random.py", "json.py", "ece408_op.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.remove('')\n"
    code += "from ece408_op.__main__ import main; main()"
    command = [sys.executable, "-c", code, "lab", "check", "mine.cc", "--problem", PROBLEM]
    result = programs.run(*command, cwd=tmp_path, ECE408_CACHE=str(kept))
    assert "verdict: right" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize(
    "text",
    [
        "launch f<<<1, 1>>>(" + "-" * 5000 + "1)",
        "launch f<<<1, 1>>>(" + "+".join(["1"] * 3000) + ")",
        "launch f<<<" + "(" * 400 + "1" + ")" * 400 + ", 1>>>(y)",
        "launch f<<<" + "-" * 900 + "1, 1>>>(y)",
    ],
)
def test_declarations_that_are_nested_too_deeply_are_one_line(run_here, written, text):
    path = written("deep.cu", f'// ece408: {text}\nextern "C" __global__ void f(float *y) {{}}\n')
    result = run_here("tune", str(path))
    line = result.stderr.splitlines()
    assert (result.returncode, len(line)) == (16, 1), result.stderr
    assert len(line[0]) < 800


def test_blank_lines_take_no_time_to_read(written):
    """In linear time: a pattern that starts at each line would take minutes."""
    path = written("blank.cu", "\n" * 3_000_000 + "// ece408: launch f<<<1, 1>>>(y)\n")
    assert kernel_file.find(str(path)).form == "declared"


def test_folders_are_checked_too(run_here, tmp_path):
    for name in ("ann/mine.cc", "bob/mine.cc"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("void conv_forward_cpu( {")
    result = run_here("lab", "check", str(tmp_path), "--problem", "b3,c2,h9,w8,m4,k3")
    assert result.stdout.count("verdict: wrong") == 2, result.stdout
    (tmp_path / "none").mkdir()
    result = run_here("lab", "check", str(tmp_path / "none"))
    assert result.stderr.endswith(f"no kernel file in {tmp_path / 'none'}\n")
