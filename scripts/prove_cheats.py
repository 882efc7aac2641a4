"""Time files that cheat the clock beside honest ones, repeatedly; count how often each is detected
or accepted."""

import collections
import tempfile
from pathlib import Path

from studies import options
from tqdm import trange

from ece408_op.backends import kernel_file
from ece408_op.bench import results
from ece408_op.cli import arguments, program
from ece408_op.files import markdown
from ece408_op.files.resources import kernels_dir
from ece408_op.lab import timing
from ece408_op.problem import ConvProblem

CHEATS = Path(__file__).parents[1] / "tests" / "cheats"
BOTH = ("works_once", "writes_nothing", "remembers_pointers", "samples_pixels", "half_precision")
BOTH += ("repeats_the_first_image", "tf32", "answers_one_call_later")
NAMES = {
    "cpu": (*BOTH, "answers_first_when_it_is_timed", "skips_images_when_it_is_timed"),
    "cuda": (*BOTH, "computes_calls_together", "stops_after_some_calls", "works_in_a_thread"),
}
HONEST = {
    "cpu": ("cpu-new-forward.cc", "new-forward.h"),
    "cuda": ("start.cu", "new-forward.cu", "new-forward.cuh"),
}
LAYER = {"cpu": "b60,c6,h40,w40,m16,k5", "cuda": "b200,c12,h33,w33,m24,k5"}


def main():
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("device", choices=NAMES)
    parser.option("--runs N", "races (default: 20)", default=20)
    parser.option("--copies N", "honest files (default: 10)", default=10)
    options.add_output(parser)
    given = parser.parse_args()
    counts, said = collections.Counter(), {}
    with tempfile.TemporaryDirectory() as folder:
        files = [
            *cheats(given.device),
            *honest(given.device, given.copies, Path(folder)),
        ]
        layers = [("layer", ConvProblem.parse(LAYER[given.device]))]
        for _ in trange(given.runs, leave=False, disable=None):
            _, *found = timing.measure(files, layers, 3)
            for each in found:
                name = each.name.partition("-copy")[0]
                # A cheat whose copies count as work gains nothing.
                told = bool(each.failure or "count" in each.note)
                counts[name, told] += 1
                said[name] = each.failure or each.note or said.get(name, "")
    rows = [
        [name, str(counts[name, True]), str(counts[name, False]), said[name]]
        for name in sorted(said)
    ]
    table = markdown.table(["file", "found out", "accepted", "the last reason"], rows, {1, 2})
    title = f"Files that cheat the clock, {given.runs} races on {LAYER[given.device]}"
    results.show(given.output, title, table, {"files": rows})


def cheats(device):
    folder = CHEATS / "cuda" if device == "cuda" else CHEATS
    paths = [path for name in NAMES[device] for path in folder.glob(f"{name}.c*")]
    return [kernel_file.find(str(path)) for path in paths]


def honest(device, copies, folder):
    """Return `copies` copies of our starter files."""
    for number in range(copies):
        name = HONEST[device][number % len(HONEST[device])]
        path = kernels_dir() / "files" / "starters" / name
        copy = folder / f"{path.stem}-copy{number}{path.suffix}"
        copy.write_text(path.read_text())
        yield kernel_file.find(str(copy))


if __name__ == "__main__":
    program.run("prove_cheats", main)
