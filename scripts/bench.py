"""Measure this package beside others, interleaved in one run.

  layers      layers of networks: each direction, by every suitable kernel
  networks    whole networks
  operator    the operator alone, beside MXNet's Convolution; on a GPU on MXNet's own GPU arrays
  ladder      the kernels from the simplest: instruction sets on the CPU, all kernels on a GPU
  training    steps of training
  programs    milestones as whole programs

Without CASE it measures the lines of scripts/cases/WHAT.txt; of layers a CASE may be
random:SEED:COUNT. `ece408 compare` shows files of --output side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from studies import (
    bench_request,
    gpu_layers,
    gpu_networks,
    ladder,
    layers,
    networks,
    operator_cpu,
    operator_gpu,
    options,
    programs,
    training,
)
from studies.bench_request import Request
from tqdm import tqdm

from ece408_op import settings
from ece408_op.backends import DIRECTIONS
from ece408_op.bench import cuda_report, results
from ece408_op.cli import arguments, program
from ece408_op.operator.variables import set_environment


@dataclasses.dataclass(frozen=True)
class Kind:
    """A benchmark on a device: its function, and its default options."""

    rows: Callable[[Request], Iterator[results.Row]]
    about: str
    against: Sequence[str]
    repeat: int
    batches: Sequence[int] = (1,)
    table: Callable[[Sequence[results.Row]], str] = results.table


KINDS = {
    ("layers", "cpu"): Kind(layers.rows, layers.ABOUT, ("torch",), 5, (1, 16)),
    ("layers", "gpu"): Kind(
        gpu_layers.rows, gpu_layers.ABOUT, ("cudnn",), 20, (1, 32, 256), gpu_layers.table
    ),
    ("networks", "cpu"): Kind(
        networks.rows, networks.ABOUT, ("mxnet", *networks.ENGINES), 7, (1, 32)
    ),
    ("networks", "gpu"): Kind(gpu_networks.rows, gpu_networks.ABOUT, ("torch",), 10, (1, 32, 256)),
    ("operator", "cpu"): Kind(
        operator_cpu.rows, operator_cpu.ABOUT, ("mxnet", "torch"), 20, (10000,)
    ),
    ("operator", "gpu"): Kind(
        operator_gpu.rows, operator_gpu.ABOUT, ("mxnet",), 20, (1, 10, 100, 10000)
    ),
    ("ladder", "cpu"): Kind(ladder.rows_on_cpu, ladder.ABOUT_CPU, ("mxnet", "torch"), 5, (1000,)),
    ("ladder", "gpu"): Kind(
        ladder.rows_on_gpu, ladder.ABOUT_GPU, ("cudnn",), 20, (10000,), cuda_report.tables
    ),
    ("training", "cpu"): Kind(training.rows, training.ABOUT, ("mxnet", "torch"), 50),
    ("training", "gpu"): Kind(training.rows_on_gpu, training.ABOUT_GPU, ("torch",), 20),
    ("programs", "cpu"): Kind(programs.rows, programs.ABOUT, ("torch",), 5),
    ("programs", "gpu"): Kind(programs.rows, programs.ABOUT, ("torch",), 5),
}


def parse():
    parser = arguments.Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", metavar="WHAT", choices=sorted({what for what, _ in KINDS}))
    parser.add_argument("cases", nargs="*", metavar="CASE", help="instead of the file's lines")
    parser.add_argument("--on", choices=("cpu", "gpu"), default="cpu", help="default: cpu")
    parser.option(
        "--against PEER,PEER",
        f"of {', '.join(results.PEERS)}, or none (default: all that are installed)",
    )
    parser.option("--repeat N", "timed runs of each (default: by WHAT, 5 to 50)")
    parser.option("--batch-size N", "images at once (default: by WHAT)", nargs="+")
    parser.option("--threads N", "threads of all (default: the usable cores)")
    parser.option(
        "--peer-python PYTHON", "a Python with the peers (default: %(default)s)", default="python3"
    )
    parser.add_argument(
        "--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="of layers"
    )
    parser.option(
        "--kernels NAME",
        "CUDA kernels: of the ladder only these, of layers these as well",
        nargs="+",
        default=[],
    )
    parser.option(
        "--devices LIST",
        "of networks on a GPU: also time the images divided among these GPUs, such as 0,1",
        nargs="+",
        default=[],
    )
    parser.option(
        "--details", "of networks on a GPU: show when copies and kernels end, and each step's time"
    )
    parser.option("--resume", "of the ladder on a GPU: keep what PREFIX.json has")
    options.add_gpu(parser)
    options.add_output(parser)
    # Positional arguments may follow options.
    found = parser.parse_intermixed_args()
    if found.repeat is not None and found.repeat < 1:
        parser.error(f"--repeat {found.repeat}: give 1 or more")
    if found.resume and (found.output is None or (found.what, found.on) != ("ladder", "gpu")):
        parser.error("--resume is for ladder --on gpu --output PREFIX")
    unknown = set(_named(found.against)) - {*KINDS[found.what, found.on].against, "none"}
    if unknown:
        known = ", ".join(KINDS[found.what, found.on].against)
        parser.error(f"--against {','.join(sorted(unknown))}: give some of {known}, or none")
    return found


def _named(text: str | None) -> list[str]:
    return text.split(",") if text else []


def main():
    found = parse()
    if found.threads:
        settings.configure(threads=found.threads)
    set_environment(settings.threads())
    kind = KINDS[found.what, found.on]
    rows: list[results.Row] = []
    request = make_request(found, kind)
    with contextlib.closing(kind.rows(request)) as measured:
        for row in tqdm(measured, unit="row", disable=None):
            rows.append(row)
            # Rows are written immediately, in case a later one exceeds a time limit.
            if found.output is not None:
                write(found, kind, request, request.whole(rows))
    rows = request.whole(rows)
    print(text(kind, request, rows))
    if found.output is not None:
        write(found, kind, request, rows)
    return bool(results.failures(rows))


def make_request(found: argparse.Namespace, kind: Kind) -> Request:
    earlier = results.load(path_of(found.output)) if found.resume else {}
    return Request(
        found.cases or bench_request.cases(found.what, found.on),
        [name for name in _named(found.against) or kind.against if name != "none"],
        found.repeat or kind.repeat,
        found.batch_size or kind.batches,
        found.directions,
        found.kernels,
        found.gpu,
        found.devices,
        found.details,
        found.peer_python,
        found.against is not None,
        dict(earlier.get("versions", {})),
        earlier.get("rows", ()),
    )


def path_of(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".json")


def text(kind: Kind, request: Request, rows: Sequence[results.Row]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in request.versions.items())
    about = f"{settings.threads()} threads, medians of {request.repeat} runs. {kind.about}"
    return "\n\n".join([about, *([f"With {versions}."] if versions else []), kind.table(rows)])


def write(
    found: argparse.Namespace, kind: Kind, request: Request, rows: Sequence[results.Row]
) -> None:
    content = {"versions": request.versions, "repeat": request.repeat}
    content |= {"threads": settings.threads(), "rows": rows}
    title = f"{found.what.capitalize()} on the {found.on.upper()}"
    results.write(found.output, title, text(kind, request, rows), content)


if __name__ == "__main__":
    program.run("bench", main)
