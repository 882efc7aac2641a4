"""Simulated output of a report's programs, on machines without a GPU and with one."""

from pathlib import Path
from subprocess import CompletedProcess

from ece408_op.course.course_terms import TERMS
from ece408_op.course.milestone import MILESTONES
from ece408_op.errors import NoUsableGpu
from ece408_op.host import this_python
from ece408_op.profile import activities
from ece408_op.profile.activities import Activity, Profile
from ece408_op.report import ladder

NO_DRIVER = "no NVIDIA driver (libcuda.so.1 is not there); the CPU milestones need none"
HEAD = "Loading fashion-mnist data... done\nLoading model... done\nNew Inference\n"
TIME = """\
4.33user 3.01system 0:04.53elapsed 162%CPU (0avgtext+0avgdata 3255240maxresident)k
672inputs+0outputs (2major+793056minor)pagefaults 0swaps
"""
THEIRS = """\
ece408: MXNet's convolution: 1.500000 s
ece408: MXNet's convolution: 0.500000 s
"""
GPU_LINES = """\
ece408: staged: convolutions run on a played GPU, the rest on the CPU
ece408: conv1 by 13_column_pairs: kernel 5.740 ms (5%), copies 51.360 ms (47%)
ece408: conv2 by 14_wgmma: kernel 4.010 ms (8%), copies 28.980 ms (57%)
"""


class Player:
    """Runs nothing: answers like the programs, and records the commands."""

    def __init__(self, gpu=False):
        self.gpu = gpu
        self.commands = []
        # Other answers, by a word of the command.
        self.instead = {}

    def __call__(self, command):
        self.commands.append(tuple(command))
        for word, answer in self.instead.items():
            if word in " ".join(command):
                return answer() if callable(answer) else answer
        if "ece408_op.report.measure_ladder" in command:
            return self._ladder(this_python.parts(command)[1][0])
        profile = next((word[7:] for word in command if word.startswith("--json=")), None)
        script = next(word for word in command if word in MILESTONES)
        if MILESTONES[script].on_gpu and (not self.gpu or script == "m1.2"):
            return failing(NoUsableGpu.exit_code, NO_DRIVER)
        if profile is not None:
            Path(profile).write_text(activities.to_json(_profile(script)), encoding="utf-8")
        return milestone(script)

    def _ladder(self, device):
        if device == "gpu" and not self.gpu:
            return failing(NoUsableGpu.exit_code, NO_DRIVER)
        return CompletedProcess([], 0, ladder.to_json(played_ladder(device)) + "\n", "")


def failing(code, error):
    return CompletedProcess([], code, "", f"ece408: error: {error}\n")


def milestone(script, first="0.670709"):
    """Return a milestone's output; `first` is our first layer's op time."""
    if not MILESTONES[script].own_operator:
        theirs = HEAD + "EvalMetric: {'accuracy': 0.9031}\n"
        return CompletedProcess([], 0, theirs, THEIRS + TIME)
    ours = HEAD + f"Op Time: {first}\nOp Time: 0.561799\nCorrectness: 0.9031 Model: ece408\n"
    return CompletedProcess([], 0, ours, (GPU_LINES if MILESTONES[script].on_gpu else "") + TIME)


def _profile(script):
    gpu = MILESTONES[script].on_gpu
    ms = 1_000_000
    if gpu:
        recorded = [
            Activity("memcpy", "[CUDA memcpy HtoD]", 0, 40 * ms, "GPU 0 stream 13", {}),
            Activity("kernel", "convolve", 40 * ms, 9 * ms, "GPU 0 stream 7", {"layer": "conv1"}),
            Activity("api", "cuStreamSynchronize", 1 * ms, 45 * ms, "thread 12", {}),
            Activity("api", "cuLaunchKernel", 39 * ms, 2 * ms, "thread 12", {}),
        ]
    else:
        details = {"layer": "conv1", "kernel": "direct_avx512"}
        recorded = [
            Activity("operator", "Convolution", 0, 90 * ms, "MXNet cpu/0 thread 1", {}),
            Activity("operator", "Pooling", 90 * ms, 9 * ms, "MXNet cpu/0 thread 1", {}),
            Activity("op_call", "conv1 forward", 99 * ms, 1 * ms, "thread 2", details),
        ]
    return Profile(tuple(recorded), ("ece408", script), 1.5, 0, {}, notes=("A played note.",))


def played_ladder(device):
    layers = {name: str(each) for name, each in ladder.problems(TERMS["2019fa"], 1000).items()}
    names = ("1_naive", "10_tf32", "13_column_pairs") if device == "gpu" else ("reference", "avx2")
    samples = {
        "1_naive": 8.0,
        "10_tf32": 1.0,
        "13_column_pairs": 2.0,
        "reference": 60.0,
        "avx2": 3.0,
    }
    by = {"avx2": {"conv1": "direct", "conv2": "winograd"}}
    steps = tuple(
        ladder.Step(name, f"the idea of {name}", name != "10_tf32", {
            layer: [samples[name]] * 3
            for layer in layers
            if (name, layer) != ("13_column_pairs", "conv2")
        }, why=f"Why {name}.", computed_by=by.get(name, {}))
        for name in names
    )  # fmt: skip
    library = "cuDNN NCHW" if device == "gpu" else "MXNet's Convolution"
    peer = ladder.Step(library, "a library", True, {"conv1": [4.0], "conv2": [5.0]})
    return ladder.Ladder(
        f"a played {device}", 1000, layers, steps, (peer,), {"float32": 900.0, "TF32": 7000.0},
        {"copy": 400.0}, {"conv1": 0.5, "conv2": 2.5}, ("A sentence on the times.",),
    )  # fmt: skip
