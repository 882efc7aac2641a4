"""Train networks: images a second with MXNet's own convolutions, ours, and PyTorch, and losses."""

import argparse

from studies import options as shared
from studies import results, training_speed
from tqdm import tqdm

from ece408_op import settings
from ece408_op.cli import program
from ece408_op.operator.variables import set_environment


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    names = list(training_speed.NETWORKS)
    parser.add_argument(
        "networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(names)} (default: all)"
    )
    parser.add_argument("--repeat", type=int, default=50, help="steps of each (default: 50)")
    shared.add_peer(parser)
    shared.add_output(parser)
    options = parser.parse_args()
    unknown = set(options.networks) - set(names)
    if unknown:
        parser.error(f"unknown network {unknown.pop()!r}; there are: {', '.join(names)}")
    if options.repeat < 4:
        parser.error(f"--repeat {options.repeat}: give 4 or more")
    names = options.networks or names
    set_environment(settings.threads())
    peer = None if options.no_peer else options.peer_python or "python3"
    with tqdm(total=options.repeat * len(names), unit="step", disable=None) as progress:
        found = [
            training_speed.measure(name, options.repeat, peer, progress.update) for name in names
        ]
    about = f"{settings.threads()} threads, medians of {options.repeat} steps in turns, float32."
    if found[0].peer:
        about += f" PyTorch {found[0].peer}, the better of NCHW and NHWC."
    content = {"networks": training_speed.records(found)}
    results.show(options.output, "Training", f"{about}\n\n{training_speed.table(found)}", content)


if __name__ == "__main__":
    program.run("bench_training", main)
