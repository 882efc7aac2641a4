"""Command line of `ece408 lab`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..bench import shapes
from ..profile import occupancy
from . import arguments, lab, lab_rank


def add(commands: Any) -> None:
    """Add `ece408 lab` and its subcommands."""
    parser = arguments.add_command(
        commands,
        "lab",
        "start a kernel of your own, check it, time it, and rank many",
        epilog="A kernel is a .cu, .cuh, .cc or .h file; docs/manual.md, 'A kernel of your own', "
        "describes their forms. ece408 m2.1 and m3.1 run one with --kernel FILE.",
    )
    arguments.show_help_by_default(parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    _add_new(actions)
    _add_check(actions)
    _add_time(actions)
    _add_rank(actions)


def _add_new(actions: Any) -> None:
    new = arguments.add_command(
        actions,
        "new",
        "write a template of a kernel, which is right and slow",
        epilog="forms: " + "; ".join(f"{name}: {what}" for name, (_, what) in lab.FORMS.items()),
    )
    new.add_argument("name", metavar="NAME", help="the file, such as mine.cu")
    new.add_argument("--form", choices=lab.FORMS, help="its form (default: by the name's suffix)")
    new.set_defaults(run=lab.new)


def _add_check(actions: Any) -> None:
    check = arguments.add_command(
        actions,
        "check",
        "say whether kernel files are right, and where a wrong one is wrong",
        epilog="Each file is compiled and run in a sandbox without network and other processes, "
        "which can only write to its own folder. The checks use the course's layers and odd "
        "sizes: results must be exact for whole numbers, and as exact as float32 for real ones. "
        "The layers of the terms whose files have this form decide. Exit code: 0, 23 when a file "
        "is wrong, or else 34 when one cannot be tried here.",
    )
    check.add_argument("files", nargs="+", metavar="FILE|DIR")
    check.option(
        "--problem P",
        "check this one only, such as b2,c3,h9,w9,m4,k5 (may be repeated)",
        action="append",
        default=[],
    )
    check.option("--seed N", "seed of the numbers and odd sizes (default: a secret one)")
    _add_precision(check)
    _add_term(check, "whose layers decide (default: those of the file's form; odd sizes never do)")
    check.option(
        "--sanitize",
        "also run CUDA files under compute-sanitizer, which finds out-of-bounds accesses, "
        "races and the like, with source lines",
    )
    check.option(
        "--emulate",
        "run CUDA files on the CPU, and check each memory access (the default without a GPU)",
    )
    arguments.add_fast(check)
    arguments.add_gpu(check, "the first of several")
    check.add_argument(
        "--order",
        choices=("usual", "random"),
        default="usual",
        help="order in which the emulator runs threads and blocks; --seed repeats a random one "
        "(default: usual)",
    )
    check.option("--json FILE", "also write the verdicts to FILE", dest="output")
    check.set_defaults(run=lab.check)


def _add_time(actions: Any) -> None:
    timed = arguments.add_command(
        actions,
        "time",
        "time kernel files on layers of the course, beside this package's kernels, or count "
        "their work",
        epilog="Contenders take turns in a random order, each in its own process. Every call has "
        "new numbers, and its output is checked. Columns: the median op time; the interquartile "
        "range, with ! above 2 %; the floor (this machine's minimum for a kernel that does all "
        "products, by memory and arithmetic) over that time; the time over ours; for CUDA files "
        "since 2020, the time of prolog and epilog. Op times on the GPU exclude copies. Columns "
        "of counts: executions of the line by warps; active lanes, on average; 32-byte sectors of "
        "global memory per execution, or passes over banks of shared memory; the fraction of "
        "passes caused by bank conflicts.",
    )
    timed.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="a kernel file, or the name of one of this package's CUDA kernels",
    )
    _add_layers(timed, "100 and 1000, on the GPU 10000, too; 2 where they are counted")
    timed.option(
        "--repeat N",
        "turns per contender: a call on the CPU, up to 128 on the GPU (default: 9)",
        default=9,
    )
    timed.option(
        "--peer-python PYTHON",
        "a Python with PyTorch and CUDA: also time cuDNN, by events on the GPU",
    )
    _add_precision(timed)
    arguments.add_gpu(timed, "the first of several")
    timed.option(
        "--no-why",
        "do not run each CUDA kernel once more under ncu to find its limiting factor",
        action="store_false",
        dest="explains",
    )
    timed.option(
        "--emulate",
        "instead of timing, count the work of CUDA kernels' warps per source line, on the CPU "
        "(the default without a GPU)",
    )
    timed.option(
        "--arch ARCH",
        "with --emulate, the architecture for which occupancy is computed: "
        f"{', '.join(occupancy.KNOWN)} (default: sm_90)",
        default="sm_90",
    )
    timed.option("--json FILE", "also write every call to FILE", dest="output")
    timed.set_defaults(run=lab.time)


def _add_precision(parser: arguments.Parser) -> None:
    parser.option(
        "--precision NAME",
        f"required precision of a file: {arguments.PRECISION} (default: float32)",
        default="float32",
    )


def _add_term(parser: arguments.Parser, what: str) -> None:
    known = ", ".join(shapes.TERMS)
    parser.option(
        "--term TERM", f"a term of the course, {known} or a later one, {what}", default=""
    )


def _add_rank(actions: Any) -> None:
    parser = arguments.add_command(
        actions,
        "rank",
        "check and time all kernel files of a folder, and put them in order",
        epilog="The files are checked on these layers and on odd sizes; files that are right on "
        "the layers are timed in turns, as by ece408 lab time. The sum of the layers' median op "
        "times decides. An interrupted ranking resumes; files that have changed are checked and "
        "timed again, and compared with their last sum.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="DIR|FILE",
        type=Path,
        help="a folder, with folders in it, or a kernel file; all for the CPU or all for CUDA",
    )
    _add_layers(parser, "1000")
    _add_term(parser, "whose layers replace --layer")
    parser.option("--repeat N", "turns per file (default: 5)", default=5)
    parser.option(
        "--output DIR",
        "folder for ranking.json, ranking.csv and ranking.html (default: ranking)",
        default=Path("ranking"),
    )
    parser.option("--again", "time all files again, and compare with last time")
    parser.option("--jobs N", "files checked at a time (default: half the cores)")
    _add_precision(parser)
    arguments.add_gpu(parser, "several split the files to be checked")
    parser.set_defaults(run=lab_rank.rank)


def _add_layers(parser: arguments.Parser, batches: str) -> None:
    parser.option(
        "--layer NAME",
        "a layer such as fa19_1, or a problem such as b1,c12,h33,w33,m24,k5, whose b "
        "--batch-size replaces (may be repeated; default: those of the files' own terms)",
        action="append",
        default=[],
    )
    parser.option(
        "--batch-size N",
        f"images (may be repeated; default: {batches})",
        action="append",
        default=[],
    )
