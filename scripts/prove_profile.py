"""Profiles of milestones, their kernel times beside events' and ncu's, and what profiling costs."""

import argparse
import sys
from pathlib import Path

from studies import profile_proof, profiled_kernels, results

from ece408_op.cli import program

SHAPES = ("fa19_1", "fa19_2")
COUNTED = 3  # launches by ncu


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "milestones", nargs="*", metavar="MILESTONE", help="to profile (default: m3.1)"
    )
    parser.add_argument("--size", default="10000", help="images (default: %(default)s)")
    parser.add_argument(
        "--repeat", type=int, default=5, help="to time with and without profile (default: 5)"
    )
    parser.add_argument(
        "--kernels", action="store_true", help="compare kernel times: needs a GPU, and ncu"
    )
    parser.add_argument("--counters", metavar="SIZE", help="profile SIZE images with --ncu, too")
    parser.add_argument("--launch", metavar="SHAPE", help=argparse.SUPPRESS)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PREFIX",
        help="write PREFIX.md and PREFIX.json as well",
    )
    options = parser.parse_args()
    if options.launch:
        profiled_kernels.launch(options.launch, COUNTED)
    else:
        prove(options)


def prove(options):
    milestones = options.milestones or ["m3.1"]
    kernels = compare_kernels() if options.kernels else []
    runs = [(milestone, options.size, False) for milestone in milestones]
    if options.counters:
        runs += [(milestone, options.counters, True) for milestone in milestones]
    text, layers = [], []
    for milestone, size, counters in runs:
        output, profile = profile_proof.profiled([milestone, size], counters)
        layers += profile_proof.of_milestone(profile)
        command = f"ece408 profile {'--ncu ' if counters else ''}{milestone} {size}"
        text.append(f"`{command}`:\n\n```\n{output.strip()}\n```")
    # MXNet's own convolution reports no op times.
    costs = [
        profile_proof.cost([milestone, options.size], options.repeat)
        for milestone in milestones
        if milestone != "m1.1"
    ]
    tables = (
        (kernels, profiled_kernels.table),
        (layers, profile_proof.layers_table),
        (costs, profile_proof.costs_table),
    )
    text += [table(found) for found, table in tables if found]
    print("\n\n".join(text))
    if options.output:
        content = {
            "kernels": [each.record() for each in kernels],
            "layers": list(map(vars, layers)),
            "costs": [each.record() for each in costs],
        }
        results.write(options.output, "Profiles", "\n\n".join(text), content)


def compare_kernels():
    """Each shape's kernel by the profile, by events, and by ncu in a process of its own."""
    command = [sys.executable, __file__, "--launch"]
    return [
        profiled_kernels.with_ncu(found, [*command, found.shape])
        for found in profiled_kernels.compare(SHAPES)
    ]


if __name__ == "__main__":
    program.run("prove_profile", main)
