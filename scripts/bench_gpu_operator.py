"""The operator on a GPU: all milestones staged, and zero-copy beside MXNet's own Convolution."""

import argparse
import sys

from studies import options as shared
from studies import results, staged_milestones, zero_copy_bench
from tqdm import tqdm

from ece408_op.bench import shapes
from ece408_op.cli import program
from ece408_op.course import course_terms
from ece408_op.operator import gpu_support
from ece408_op.operator.loading import load_mxnet

BATCHES = (1, 10, 100, shapes.BATCH)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "part",
        choices=("staged", "zero-copy"),
        help="staged: every milestone of every term; zero-copy: needs MXNet's CUDA build",
    )
    parser.add_argument(
        "--size", type=int, default=10000, help="images of the milestones (default: 10000)"
    )
    parser.add_argument(
        "--term", action="append", help="only this term's milestones (may be repeated)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        action="append",
        help=f"of zero-copy's images at once (may be repeated; default: {BATCHES})",
    )
    parser.add_argument(
        "--repeat", type=int, default=20, help="timed calls of each shape (default: 20)"
    )
    shared.add_output(parser)
    options = parser.parse_args()
    parts = {"staged": staged, "zero-copy": zero_copy}
    results.show(options.output, *parts[options.part](options))


def staged(options):
    terms = [course_terms.find_term(name) for name in options.term or course_terms.TERMS]
    rows = staged_milestones.measure(options.size, terms)
    title = f"Milestones on {options.size} images"
    return title, staged_milestones.table(rows), staged_milestones.document(rows)


def zero_copy(options):
    if not load_mxnet().runtime.Features().is_enabled("CUDA"):
        sys.exit(f"bench_gpu_operator: {gpu_support.reason_against()}")
    cases = [(name, each) for each in options.batch_size or BATCHES for name in shapes.SHAPES]
    rows = [
        zero_copy_bench.measure(name, shapes.find(name, batch), options.repeat)
        for name, batch in tqdm(cases, unit="shape", disable=None)
    ]
    title = "Zero-copy: our operator and MXNet's Convolution on MXNet's GPU arrays"
    return title, zero_copy_bench.table(rows), zero_copy_bench.document(rows)


if __name__ == "__main__":
    program.run("bench_gpu_operator", main)
