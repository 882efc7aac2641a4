"""Read the GPU's counters for the kernel chosen for every shape, with Nsight Compute (ncu)."""

import argparse

from studies import counters, results
from studies import options as shared

from ece408_op.backends.cuda.plan import PRECISIONS
from ece408_op.bench import shapes
from ece408_op.cli import program


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    shared.add_shapes(parser)
    shared.add_names(parser, "--precisions", PRECISIONS)
    shared.add_gpu(parser)
    shared.add_output(parser)
    options = parser.parse_args()
    named, precisions = options.shapes.split(","), options.precisions.split(",")
    for each, known in ((named, shapes.SHAPES), (precisions, PRECISIONS)):
        for name in each:
            if name not in known:
                parser.error(f"{name!r} is none of {', '.join(known)}")
    rows = counters.measure(named, precisions, options.gpu)
    title = "CUDA kernels by the GPU's counters"
    results.show(options.output, title, counters.table(rows), counters.document(rows))


if __name__ == "__main__":
    program.run("bench_counters", main)
