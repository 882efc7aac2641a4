"""Time swapped networks of MXNet's model zoo beside onnxruntime, OpenVINO and PyTorch."""

import argparse

from studies import engines, results, zoo
from studies import options as shared
from tqdm import tqdm

from ece408_op import settings
from ece408_op.bench.cpu_timer import WARM_UP
from ece408_op.cli import program
from ece408_op.operator.variables import set_environment


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    shared.add_networks(parser, zoo.NETWORKS)
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=[1, 32], help="images at once (default: 1 32)"
    )
    parser.add_argument("--repeat", type=int, default=7, help="timed passes (default: 7)")
    parser.add_argument(
        "--peer-python",
        metavar="PYTHON",
        default="python3",
        help="a Python with any of onnxruntime, openvino and torch (default: %(default)s)",
    )
    shared.add_output(parser)
    options = parser.parse_args()
    runs = [(name, batch) for batch in options.batch_size for name in options.networks]
    set_environment(settings.threads())
    turns = len(runs) * (options.repeat + WARM_UP)
    found = []
    with engines.Engines(options.peer_python) as peer, tqdm(total=turns, disable=None) as progress:
        versions = ", ".join(f"{name} {version}" for name, version in peer.versions.items())
        about = f"{settings.threads()} threads, medians of {options.repeat} passes, float32; "
        for name, batch in runs:
            progress.set_description(f"{name}, batch {batch}")
            found.append(engines.measure(name, batch, peer, options.repeat, progress.update))
            text = f"{about}{versions}.\n\n{engines.table(found)}"
            # What was measured stays, if a later network takes too long.
            if options.output:
                content = {"engines": peer.versions, "networks": engines.records(found)}
                results.write(options.output, "Networks beside other engines", text, content)
    print(text)


if __name__ == "__main__":
    program.run("bench_engines", main)
