"""Read the GPU's counters for the kernels chosen for shapes, with Nsight Compute (ncu)."""

import argparse

from studies import counters, results
from studies import options as shared

from ece408_op.backends import DIRECTIONS
from ece408_op.backends.cuda.kernel_plan import PRECISIONS
from ece408_op.cli import program


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    shared.add_shapes_or_problems(parser)
    shared.add_names(parser, "--precisions", PRECISIONS)
    shared.add_names(parser, "--directions", DIRECTIONS, default="forward")
    shared.add_gpu(parser)
    shared.add_output(parser)
    options = parser.parse_args()
    precisions, directions = options.precisions.split(","), options.directions.split(",")
    for each, known in ((precisions, PRECISIONS), (directions, DIRECTIONS)):
        for name in each:
            if name not in known:
                parser.error(f"{name!r} is none of {', '.join(known)}")
    named = shared.shapes_or_problems(options)
    rows = counters.measure(list(named), precisions, directions, options.gpu)
    title = "CUDA kernels by the GPU's counters"
    results.show(options.output, title, counters.table(rows), counters.document(rows))


if __name__ == "__main__":
    program.run("bench_counters", main)
