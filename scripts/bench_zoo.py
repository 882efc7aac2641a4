"""Swap the networks of MXNet's model zoo: agreement and times, layer by layer."""

import argparse

from studies import options as shared
from studies import results, zoo
from tqdm import tqdm

from ece408_op import settings
from ece408_op.cli import program
from ece408_op.operator.variables import set_environment


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    shared.add_networks(parser, zoo.NETWORKS)
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=[1, 32], help="images at once (default: 1 32)"
    )
    parser.add_argument("--repeat", type=int, default=5, help="timed passes (default: 5)")
    parser.add_argument(
        "--busy",
        type=int,
        default=0,
        metavar="N",
        help="measure beside N other processes that compute all the time (default: 0)",
    )
    shared.add_output(parser)
    options = parser.parse_args()
    runs = [(name, batch) for batch in options.batch_size for name in options.networks]
    set_environment(settings.threads())
    comparisons = [
        zoo.compare(name, batch, options.repeat, options.busy)
        for name, batch in tqdm(runs, unit="network", disable=None)
    ]
    content = {"networks": zoo.records(comparisons)}
    results.show(options.output, "Model zoo", zoo.table(comparisons), content)


if __name__ == "__main__":
    program.run("bench_zoo", main)
