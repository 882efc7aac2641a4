"""Whole networks on a GPU in each precision, and cast to float16: how far from MXNet's float32."""

import argparse
import sys

from studies import options as shared
from studies import results, zoo
from tqdm import tqdm

import ece408_op
from ece408_op import settings
from ece408_op.cli import program
from ece408_op.files import markdown

# Of the largest output.
BELOW = {"strict": 1e-5, "float32": 1e-5, "tf32": 1e-3, "float16": 5e-3, "cast to float16": 5e-3}
HEAD = ["network", "batch", "nodes on the GPU", *BELOW]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    shared.add_networks(parser, zoo.NETWORKS)
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=[1, 32], help="images at once (default: 1 32)"
    )
    shared.add_output(parser)
    options = parser.parse_args()
    rows = []
    runs = [(name, batch) for name in options.networks for batch in options.batch_size]
    for name, batch in tqdm(runs, unit="network", disable=None):
        rows.append(measured(name, batch))
        tqdm.write(f"{name}, {batch}: {rows[-1]['errors']}", file=sys.stderr)
    return 1 if show(rows, options.output) else 0


def measured(name, batch):
    """The errors of a network by what it is computed in. Raises what a call raises."""
    net, x = zoo.build(name, batch)
    expected = net(x).asnumpy()
    network = ece408_op.to_gpu(net)
    errors = {}
    for precision in BELOW:
        if precision == "cast to float16":
            net.cast("float16")
            x = x.astype("float16")
            network = ece408_op.to_gpu(net)
        asked = precision if precision in ("strict", "float32", "tf32", "float16") else None
        with settings.override(precision=asked):
            errors[precision] = zoo.error(network(x).asnumpy().astype("float32"), expected)
    report = network.report
    return {
        "network": name,
        "batch": batch,
        "nodes": f"{sum(report.parts)} of {report.nodes}",
        "errors": errors,
    }


def show(rows, output):
    """Prints the table; returns how many errors are larger than what is allowed."""
    cells = []
    for each in rows:
        marked = [
            f"{error:.1e}{' !' if error > BELOW[of] else ''}"
            for of, error in each["errors"].items()
        ]
        cells.append([each["network"], each["batch"], each["nodes"], *marked])
    wrong = sum(cell.endswith("!") for row in cells for cell in row[3:])
    bars = ", ".join(f"{of}: {below}" for of, below in BELOW.items())
    text = (
        "The largest difference from MXNet's float32 outputs on the CPU, as a share of the largest "
        f"output. Allowed is {bars}; more has a '!'. {wrong} have.\n\n"
    )
    content = {"allowed": BELOW, "rows": rows, "wrong": wrong}
    title = "Precision of whole networks on a GPU"
    results.show(output, title, text + markdown.table(HEAD, cells), content)
    return wrong


if __name__ == "__main__":
    program.run("prove_precision", main)
