"""Compare whole networks on a GPU in each precision, and cast to float16, with MXNet's float32.

The table also has the error of the format itself: MXNet's float32 on the CPU, with both operands of
each layer rounded to the 11 significant bits of TF32 and float16.
"""

import json
import sys

from studies import bench_request, zoo
from studies import options as shared
from tqdm import tqdm

import ece408_op
from ece408_op import settings
from ece408_op.bench import results
from ece408_op.cli import arguments, program
from ece408_op.files import markdown
from ece408_op.operator.loading import load_mxnet

# Relative to the largest output.
BELOW = {"strict": 1e-5, "float32": 1e-5, "tf32": 1e-3, "float16": 5e-3, "cast to float16": 5e-3}
HEAD = ["network", "batch", "nodes on the GPU", *BELOW, "operands of 11 bits"]
ALL = bench_request.cases("networks")
LAYERS = ("Convolution", "FullyConnected")


def main():
    parser = arguments.Parser(description=__doc__)
    parser.add_argument(
        "networks", nargs="*", default=bench_request.cases("networks"), help="(default: all)"
    )
    parser.option("--batch-size N", "images at once (default: 1 32)", nargs="+", default=[1, 32])
    shared.add_output(parser)
    options = parser.parse_args()
    rows = []
    runs = [(name, batch) for name in options.networks or ALL for batch in options.batch_size]
    for name, batch in tqdm(runs, unit="network", disable=None):
        rows.append(measured(name, batch))
        tqdm.write(f"{name}, {batch}: {rows[-1]['errors']}", file=sys.stderr)
    return 1 if show(rows, options.output) else 0


def measured(name, batch):
    """Measure a network's errors in each precision. Raises what a call raises."""
    net, x = zoo.build(name, batch)
    expected = net(x).asnumpy()
    network = ece408_op.to_gpu(net)
    format_error = zoo.error(rounded(net, x), expected)
    errors = {}
    for precision in BELOW:
        if precision == "cast to float16":
            net.cast("float16")
            x = x.astype("float16")
            network = ece408_op.to_gpu(net)
        wanted = precision if precision in ("strict", "float32", "tf32", "float16") else None
        with settings.override(precision=wanted):
            errors[precision] = zoo.error(network(x).asnumpy().astype("float32"), expected)
    report = network.report
    return {
        "network": name,
        "batch": batch,
        "nodes": f"{sum(report.parts)} of {report.nodes}",
        "errors": errors,
        "operands_of_11_bits": format_error,
    }


def rounded(net, x):
    """Return the outputs of a net whose layers' x and weights are rounded."""
    mx = load_mxnet()
    symbol = net(mx.sym.Variable("data"))
    graph = json.loads(symbol.tojson())
    nodes, places = [], []
    for node in graph["nodes"]:
        node = {**node, "inputs": [[places[entry[0]], *entry[1:]] for entry in node["inputs"]]}
        for place in range(2 if node["op"] in LAYERS else 0):
            for dtype in ("float16", "float32"):
                name = f"{node['name']}_{place}_{dtype}"
                cast = {"op": "Cast", "name": name, "attrs": {"dtype": dtype}}
                nodes.append({**cast, "inputs": [node["inputs"][place]]})
                node["inputs"][place] = [len(nodes) - 1, 0, 0]
        nodes.append(node)
        places.append(len(nodes) - 1)
    heads = [[places[head[0]], *head[1:]] for head in graph["heads"]]
    variables = [number for number, node in enumerate(nodes) if node["op"] == "null"]
    text = json.dumps({"nodes": nodes, "heads": heads, "arg_nodes": variables})
    arrays = {name: each.data() for name, each in net.collect_params().items()}
    made = mx.sym.load_json(text)
    states = {name: arrays[name] for name in made.list_auxiliary_states()}
    arguments = {name: arrays.get(name, x) for name in made.list_arguments()}
    return made.bind(mx.cpu(), arguments, None, "null", states).forward()[0].asnumpy()


def show(rows, output):
    """Print the table; return the number of errors above their limits."""
    cells = []
    for each in rows:
        marked = [
            f"{error:.1e}{' !' if error > BELOW[of] else ''}"
            for of, error in each["errors"].items()
        ]
        own = f"{each['operands_of_11_bits']:.1e}"
        cells.append([each["network"], each["batch"], each["nodes"], *marked, own])
    wrong = sum(cell.endswith("!") for row in cells for cell in row[3:])
    bars = ", ".join(f"{of}: {below}" for of, below in BELOW.items())
    text = (
        "The largest difference from MXNet's float32 outputs on the CPU, as a fraction of the "
        f"largest output. Limits: {bars}; '!' marks {wrong} larger ones. The last column is the "
        "error of rounding both operands of each layer to the 11 bits of TF32 and float16 on the "
        "CPU.\n\n"
    )
    content = {"allowed": BELOW, "rows": rows, "wrong": wrong}
    title = "Precision of whole networks on a GPU"
    results.show(output, title, text + markdown.table(HEAD, cells), content)
    return wrong


if __name__ == "__main__":
    program.run("prove_precision", main)
