"""Time layers of real networks on the CPU: every kernel, the chosen one, and PyTorch."""

import argparse

from studies import layers, results
from studies import options as shared
from tqdm import tqdm

from ece408_op import settings
from ece408_op.backends import DIRECTIONS
from ece408_op.bench.cpu_timer import WARM_UP
from ece408_op.cli import program
from ece408_op.operator.variables import set_environment
from ece408_op.problem import ConvProblem


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "layers",
        nargs="*",
        metavar="LAYER",
        help=f"such as {layers.LAYERS[2]} (default: {len(layers.LAYERS)} layers of networks)",
    )
    parser.add_argument("--batch", type=int, default=16, help="images (default: 16)")
    parser.add_argument("--samples", type=int, default=5, help="timed runs (default: 5)")
    parser.add_argument("--threads", type=int, help="threads of all (default: the usable cores)")
    shared.add_torch(parser)
    shared.add_write(parser)
    return parser.parse_args()


def main():
    options = parse()
    if options.threads:
        settings.configure(threads=options.threads)
    set_environment(settings.threads())
    asked = options.layers or layers.LAYERS
    problems = {text: ConvProblem.parse(f"b{options.batch},{text}") for text in asked}
    turns = len(problems) * len(DIRECTIONS) * (options.samples + WARM_UP)
    found = []
    with shared.torch(options) as peer, tqdm(total=turns, unit="turn", disable=None) as progress:
        versions = peer and peer.versions
        for text, problem in problems.items():
            progress.set_description(text)
            measured = layers.measure(problem, peer, options.samples, progress.update)
            found.append({"layer": text, **measured})
    content = {
        **{"threads": settings.threads(), "batch": options.batch, "samples": options.samples},
        **{"torch": versions, "layers": found},
    }
    about = (
        f"Batch {options.batch}, {settings.threads()} threads, medians of {options.samples} runs; "
        "PyTorch: the better of NCHW and NHWC. Above 1, ours is faster."
    )
    text = f"{about}\n\n{layers.tables(found)}"
    results.show(options.write, "Layers of networks on the CPU", text, content)


if __name__ == "__main__":
    program.run("bench_layers", main)
