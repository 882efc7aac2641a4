"""Time whole networks of MXNet's model zoo, and of GluonCV's if they are named, on the GPU beside
PyTorch, from the host to the host."""

import argparse
import contextlib
import tempfile

from studies import gpu_networks, results
from studies import options as shared
from tqdm import tqdm

from ece408_op import settings
from ece408_op.bench.cpu_timer import WARM_UP
from ece408_op.cli import program
from ece408_op.errors import Ece408Error
from ece408_op.operator.variables import set_environment

TERM = "2019fa"


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    shared.add_networks(parser, gpu_networks.NETWORKS, gpu_networks.GLUONCV)
    parser.add_argument(
        "--batch-size",
        type=int,
        nargs="+",
        default=[1, 32, 256],
        help="images at once (default: 1 32 256)",
    )
    parser.add_argument("--repeat", type=int, default=10, help="timed passes (default: 10)")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=gpu_networks.VARIANTS,
        default=list(gpu_networks.VARIANTS),
        help="what to time of PyTorch: a layout and a precision (default: all)",
    )
    parser.add_argument(
        "--devices",
        nargs="+",
        default=[],
        metavar="LIST",
        help="also time these GPUs that share the images, such as 0,1",
    )
    parser.add_argument("--steps", action="store_true", help="show how long each step took")
    parser.add_argument(
        "--copies",
        action="store_true",
        help="show when copies and kernels of a call began and ended",
    )
    parser.add_argument(
        "--final", action="store_true", help=f"also time the pass of {TERM}'s final, 10000 images"
    )
    parser.add_argument(
        "--cold", action="store_true", help="begin with nothing compiled: for the first pass's time"
    )
    parser.add_argument("--no-networks", action="store_true", help="time no other network")
    shared.add_peer(parser)
    shared.add_output(parser)
    options = parser.parse_args()
    options.networks = [] if options.no_networks else options.networks
    return options


def main():
    options = parse()
    set_environment(settings.threads())
    found, failures = [], []
    peer_of = (
        contextlib.nullcontext()
        if options.no_peer
        else gpu_networks.Peer(options.peer_python or "python3")
    )
    with peer_of as peer, cache_of(options):
        versions = peer and peer.versions
        final = gpu_networks.final(TERM, options.repeat) if options.final else None
        for measured in each(options, peer, failures):
            found.append(measured)
            if options.output:
                write(options, found, failures, versions, final)
    if final and options.output:
        write(options, found, failures, versions, final)
    print(text(found, failures, final))
    return bool(failures)


@contextlib.contextmanager
def cache_of(options):
    """With --cold an empty folder for what is compiled."""
    if not options.cold:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, settings.override(cache=folder):
        yield


def each(options, peer, failures):
    """Measure networks; what fails is added to `failures`."""
    runs = [(name, batch) for name in options.networks for batch in options.batch_size]
    with tqdm(total=len(runs) * (options.repeat + WARM_UP), disable=None) as progress:
        for name, batch in runs:
            progress.set_description(f"{name}, batch {batch}")
            try:
                measured = gpu_networks.measure(
                    *(name, batch, peer, options.variants, options.repeat, progress.update),
                    options.devices,
                )
            except Ece408Error as error:
                failures.append(f"{name}, batch {batch}: {error}")
                continue
            if measured.error() > gpu_networks.TOLERANCE:
                failures.append(f"{name}, batch {batch}: outputs are wrong: {measured.errors}")
            if options.copies:
                print(f"{name}, batch {batch}\n\n{gpu_networks.watched_table(measured)}\n")
            if options.steps:
                print(f"{name}, batch {batch}\n\n{gpu_networks.steps_table(measured)}\n")
            yield measured


def text(found, failures, final):
    parts = [gpu_networks.table(found)] if found else []
    parts += gpu_networks.shared_lines(found)
    return "\n\n".join([*parts, *([final.line()] if final else []), *failures])


def write(options, found, failures, versions, final):
    content = {"torch": versions, "networks": gpu_networks.records(found)}
    if final:
        content["final"] = final.record()
    about = f"Medians of {options.repeat} passes from the host to the host."
    if versions:
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        about += f" PyTorch's better layout ({named})."
    whole = f"{about}\n\n{text(found, failures, final)}"
    results.write(options.output, "Whole networks on the GPU", whole, content)


if __name__ == "__main__":
    program.run("bench_networks", main)
