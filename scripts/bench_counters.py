"""Read the GPU's counters for the kernel chosen for every shape, with Nsight Compute (ncu)."""

import argparse
from pathlib import Path

from studies import counters, results

from ece408_op.backends.cuda.plan import PRECISIONS
from ece408_op.bench import shapes
from ece408_op.cli import program


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shapes",
        default=",".join(shapes.SHAPES),
        help=f"of {', '.join(shapes.SHAPES)}, separated by commas (default: all)",
    )
    parser.add_argument(
        "--precisions",
        default=",".join(PRECISIONS),
        help=f"of {', '.join(PRECISIONS)}, separated by commas (default: all)",
    )
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU (default: 0)")
    parser.add_argument(
        "--write", type=Path, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well"
    )
    options = parser.parse_args()
    named, precisions = options.shapes.split(","), options.precisions.split(",")
    for each, known in ((named, shapes.SHAPES), (precisions, PRECISIONS)):
        for name in each:
            if name not in known:
                parser.error(f"{name!r} is none of {', '.join(known)}")
    rows = counters.measure(named, precisions, options.gpu)
    print(counters.table(rows))
    if options.write:
        title = "CUDA kernels by the GPU's counters"
        results.write(options.write, title, counters.table(rows), counters.document(rows))


if __name__ == "__main__":
    program.run("bench_counters", main)
