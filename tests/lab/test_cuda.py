"""On a GPU: correct files are accepted, incorrect ones rejected, and no cheat is right or fast."""

import shutil

import pytest
from kernel_files import CUDA_FORMS
from places import ROOT

from ece408_op.backends import kernel_file
from ece408_op.backends.kernel_file import KernelFile
from ece408_op.lab import check as checking
from ece408_op.lab import explanation, sanitizer, timing
from ece408_op.problem import ConvProblem

pytestmark = pytest.mark.gpu

STARTERS = ROOT / "kernels" / "files" / "starters"
CHEATS = ROOT / "tests" / "cheats" / "cuda"
WRONG = ROOT / "tests" / "wrong_kernel_files"
SMALL = [ConvProblem.parse(text) for text in ("b3,c2,h9,w12,m4,k3", "b10,c6,h30,w30,m16,k5")]
UNEVEN = [ConvProblem.parse(text) for text in ("b3,c3,h21,w18,m6,k7", "b2,c12,h40,w40,m24,k5")]
TIMED = "b200,c12,h33,w33,m24,k5"
# The verdict on each.
SAYS = {
    **dict.fromkeys(("writes_nothing", "works_once", "half_precision", "ends_the_process"), ""),
    **dict.fromkeys(("works_in_a_thread", "answers_early", "answers_with_nonsense"), ""),
    "remembers_pointers": "the result of the call before",
    "tf32": "real ones are off by",
    **dict.fromkeys(
        ("changes_its_inputs", "changes_its_inputs_on_the_host"), "writes into its input w"
    ),
    **dict.fromkeys(("writes_behind", "writes_behind_on_the_host"), "64 bytes behind y"),
    "reads_behind": "1 of 840 elements",
    "looks_for_the_answer": "nothing is written",
    "fills_gpu_memory": "takes more than 50% of the GPU's free memory",
    "forks": "no process",
    "opens_a_socket": "no socket",
    "writes_elsewhere": "no file",
    "kills_its_parent": "the parent lives",
    "crashes_the_context": "an illegal memory access",
    "asserts": "device-side assert",
    "traps": "unspecified launch failure",
    "hangs": "takes more than 3 s",
    "repeats_the_first_image": "images 1 to 2",
    "samples_pixels": "every 2th row from 1 on",
}
# Right as long as they are only checked: the verdict of timing.
TIMING_SAYS = {
    "stops_after_some_calls": "elements are wrong",
    # Its output is missing when it is read.
    "patches_the_synchronisation": "",
    "resets_the_device": "",
    **dict.fromkeys(("answers_one_call_later", "computes_calls_together"), "elements are wrong"),
}
# Right, and no faster for their attempt.
HONEST = (
    *("works_on_another_stream", "leaves_work_behind", "replaces_the_clock", "slows_the_others"),
    *("remembers_first_values", "persists_l2"),
)
WITH_ITS_COPIES = ("works_in_the_prolog", "works_in_the_epilog", "hides_its_arrays")
WRONG_SAYS = {
    **dict.fromkeys(("reads_its_tile_too_early", "copies_too_little"), ""),
    "needs_small_images": "over 1024 threads in a block",
}
RIGHT = """
// ece408: launch conv<<<dim3(ceil_div(OH * OW, 256), M, B), 256>>>(y, x, w, M, C, H, W, K)
extern "C" __global__ void conv(float *y, const float *x, const float *w, int M, int C, int H,
                                int W, int K) {
    const int rows = H - K + 1, columns = W - K + 1, b = blockIdx.z, m = blockIdx.y;
    const int n = blockIdx.x * 256 + threadIdx.x, i = n / columns, j = n % columns;
    if (n >= rows * columns) return;
    float sum = 0;
    for (int c = 0; c < C; c++)
        for (int p = 0; p < K; p++)
            for (int q = 0; q < K; q++)
                sum += x[((b * C + c) * H + i + p) * W + j + q] * w[((m * C + c) * K + p) * K + q];
    y[(b * M + m) * rows * columns + n] = sum;
}
"""
# A part of it, what students write there, and what is said of that.
CHANGES = [
    ("] = sum", "] += sum", ""),
    ("< K; ", "< min(K, 5); ", ""),
    ("ceil_div(OH * OW, 256)", "max(1, OH * OW / 256)", ""),
    ("c < C", "c < 1", "only the first channel is added up"),
    ("c < C", "c < C / 2 * 2", "the last channel is left out"),
    ("(m * C + c)", "(m + c)", "filters 1 to 5, the last 5 of 6"),
    ("256), M, B", "256), M / 4 * 4, B", "filters 4 to 5, the last 2 of 6"),
    ("M, B)", "M, max(1, B / 2 * 2))", "image 2, the last"),
    ("columns) return", "columns || j == columns - 1) return", "column 11, the last"),
    ("(n >= rows", "(n >= (rows - 1)", "row 14, the last"),
    ("+ p) * K + q]", "+ K - 1 - p) * K + K - 1 - q]", "the kernel is turned round"),
]


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    """Return a folder of the incorrect files and the header that they include: a file sees its own
    alone."""
    folder = tmp_path_factory.mktemp("wrong")
    for path in (*WRONG.iterdir(), CHEATS / "honest.cuh"):
        shutil.copy(path, folder)
    return folder


def _file(folder, name):
    (path,) = folder.glob(f"{name}.cu*")
    return kernel_file.find(str(path))


def _said(verdict):
    texts = [failure.text for group in verdict.groups for failure in group.failures]
    return "\n".join([*texts, verdict.broken])


def test_every_file_is_tried():
    tried = {*SAYS, *TIMING_SAYS, *HONEST, *WITH_ITS_COPIES}
    assert sorted(tried) == sorted(p.stem for p in CHEATS.iterdir() if p.stem != "honest")
    assert sorted(WRONG_SAYS) == sorted(path.stem for path in WRONG.iterdir())


@pytest.mark.parametrize("name", ["start.cu", "new-forward.cu", "new-forward.cuh"])
def test_a_starter_is_right(name):
    verdict = checking.check(kernel_file.find(str(STARTERS / name)))
    assert verdict.is_right, _said(verdict)
    assert verdict.error < 1e-6


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.alone if n == "fills_gpu_memory" else ()) for n in SAYS],
)
def test_a_cheat_is_not_right(name):
    verdict = checking.check(_file(CHEATS, name), SMALL, call_seconds=3)
    assert not verdict.is_right
    assert SAYS[name] in _said(verdict)


@pytest.mark.parametrize("name", WRONG_SAYS)
def test_a_wrong_kernel_is_described(wrong, name):
    verdict = checking.check(_file(wrong, name), UNEVEN)
    assert not verdict.is_right
    assert WRONG_SAYS[name] in _said(verdict)


def test_a_change_to_a_right_kernel_is_described(tmp_path):
    path = tmp_path / "kernel.cu"
    for old, new, says in [("", "", None), *CHANGES]:
        path.write_text(RIGHT.replace(old, new) if old else RIGHT)
        verdict = checking.check(kernel_file.find(str(path)), UNEVEN)
        assert verdict.is_right == (says is None), new
        assert (says or "") in _said(verdict), new


def test_compute_sanitizer_names_lines():
    found = {each.tool: each for each in sanitizer.sanitize(_file(CHEATS, "reads_behind"))}
    (finding,) = found["memcheck"].findings
    assert "Invalid __global__ read of size 4 bytes" in finding.text
    assert finding.place.startswith("reads_behind.cu")
    assert "thread" in finding.thread
    found = {
        each.tool: each for each in sanitizer.sanitize(_file(WRONG, "reads_its_tile_too_early"))
    }
    assert "race of a" in found["racecheck"].findings[0].text
    assert found["racecheck"].findings[0].place.startswith("reads_its_tile_too_early.cu:")
    assert found["memcheck"].is_clean


@pytest.mark.parametrize("name", ["start.cu", "new-forward.cu", "new-forward.cuh"])
def test_a_starter_is_clean_and_slow_for_a_reason(name):
    file = kernel_file.find(str(STARTERS / name))
    assert [each for each in sanitizer.sanitize(file) if not each.is_clean] == []
    found = explanation.explain(file, ConvProblem.parse(TIMED))
    assert not found.failure
    assert [each.launches for each in found.kernels] == [1]
    assert found.kernels[0].figures["registers"] > 0
    assert "L1 cache" in found.sentence or "instruction issue" in found.sentence
    assert next(iter(found.resources.values())).registers > 0


def _times(*files: KernelFile, rounds=2):
    layers = [(TIMED, ConvProblem.parse(TIMED))]
    ours, *others = timing.measure(files, layers, rounds)
    assert not ours.failure
    assert len(ours.seconds) >= rounds
    return others


@pytest.mark.parametrize("name", TIMING_SAYS)
def test_what_cheats_the_clock_is_not_timed(name):
    (found,) = _times(_file(CHEATS, name))
    # Copies that a file needs to be right are counted.
    assert found.failure or "prolog and epilog count" in found.note
    assert TIMING_SAYS[name] in found.failure


def test_who_is_right_is_not_faster_by_a_trick():
    found = _times(*(_file(CHEATS, name) for name in HONEST))
    failed = {each.name: each.failure for each in found if each.failure}
    # Its work after its calls may coincide with a pause between them.
    assert "its call is not over" in failed.pop("slows_the_others.cu", "its call is not over")
    assert not failed
    plain = found[HONEST.index("persists_l2")].median
    assert min(each.median for each in found if not each.failure) > 0.7 * plain


@pytest.mark.parametrize("name", WITH_ITS_COPIES)
def test_what_works_beside_its_kernel_counts_as_a_whole(name):
    found, plain = _times(_file(CHEATS, name), _file(CHEATS, "persists_l2"))
    assert not found.failure
    assert "prolog and epilog count" in found.note
    assert found.median > plain.median
    assert not plain.note
    assert len(plain.around) == 2


@pytest.mark.parametrize("name", CUDA_FORMS)
def test_every_form_is_timed(name, written):
    path = written(name, CUDA_FORMS[name])
    (found,) = _times(kernel_file.find(str(path)))
    assert not found.failure
    assert 1e-5 < found.median < 0.1


@pytest.mark.alone
def test_others_are_ranked_beside_what_goes_wrong(run_ece408, tmp_path):
    folder = tmp_path / "class"
    folder.mkdir()
    for name in ("crashes_the_context.cu", "fills_gpu_memory.cu", "forks.cu", "honest.cuh"):
        shutil.copy(CHEATS / name, folder)
    for name in ("start.cu", "new-forward.cu"):
        shutil.copy(STARTERS / name, folder)
    arguments = ("lab", "rank", str(folder), "--batch-size", "100", "--repeat", "2")
    result = run_ece408(*arguments, "--output", str(tmp_path / "ranking"))
    assert result.returncode == 0, result.stderr
    ranked, left = result.stdout.split("not ranked: ", 1)
    assert "start.cu" in ranked
    assert "new-forward.cu" in ranked
    assert left.count(": ") >= 3
