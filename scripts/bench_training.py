"""Train networks: images a second with MXNet's own convolutions, ours, and PyTorch, and losses."""

import argparse

from studies import options as shared
from studies import results, training_speed
from tqdm import tqdm

from ece408_op import settings
from ece408_op.bench.cpu_timer import WARM_UP
from ece408_op.cli import program
from ece408_op.operator.variables import set_environment


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    shared.add_networks(parser, training_speed.NETWORKS)
    parser.add_argument("--repeat", type=int, default=50, help="steps of each (default: 50)")
    shared.add_peer(parser)
    shared.add_output(parser)
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: give 1 or more")
    set_environment(settings.threads())
    peer = None if options.no_peer else options.peer_python or "python3"
    turns = (options.repeat + WARM_UP) * len(options.networks)
    with tqdm(total=turns, unit="step", disable=None) as progress:
        found = [
            training_speed.measure(name, options.repeat, peer, progress.update)
            for name in options.networks
        ]
    about = f"{settings.threads()} threads, medians of {options.repeat} steps in turns, float32."
    if found[0].peer:
        about += f" PyTorch {found[0].peer}, the better of NCHW and NHWC."
    content = {"networks": training_speed.records(found)}
    results.show(options.output, "Training", f"{about}\n\n{training_speed.table(found)}", content)


if __name__ == "__main__":
    program.run("bench_training", main)
