"""Time what the CUDA backend chooses by itself: by batch, beside cuDNN, and by precision."""

import argparse
import contextlib
import sys
from pathlib import Path

from studies import choices, results
from tqdm import tqdm

from ece408_op.backends.cuda.runtime import device
from ece408_op.bench import shapes
from ece408_op.bench.peers import cudnn
from ece408_op.cli import program


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--shapes",
        default=",".join(shapes.SHAPES),
        help=f"of {', '.join(shapes.SHAPES)}, separated by commas (default: all)",
    )
    parser.add_argument("--samples", type=int, default=20, help="timed runs of each (default: 20)")
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU (default: 0)")
    parser.add_argument(
        "--peer-python",
        default="python3",
        metavar="PYTHON",
        help="a Python with PyTorch, for cuDNN's times (default: python3)",
    )
    parser.add_argument("--no-peer", action="store_true", help="leave cuDNN out")
    parser.add_argument(
        "--write", type=Path, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well"
    )
    return parser.parse_args()


def bench(options):
    gpu = device.get(options.gpu)
    with contextlib.ExitStack() as stack:
        peer = None if options.no_peer else stack.enter_context(cudnn.Peer(options.peer_python))
        found = {
            name: choices.measure(gpu, shapes.find(name), peer, options.samples)
            for name in tqdm(options.shapes.split(","), unit="shape", disable=None)
        }
        return found, peer.versions if peer else {}


def main():
    options = parse()
    found, versions = bench(options)
    about = ", ".join(f"{key} {value}" for key, value in versions.items())
    peer = f" cuDNN by {about}." if about else ""
    text = f"{options.samples} samples each.{peer}\n\n{choices.tables(found)}"
    print(text)
    if options.write:
        content = {"peer": versions, "samples": options.samples, "results": found}
        results.write(options.write, "What the CUDA backend chooses", text, content)
    failures = [
        f"{shape}: {timing['choice']}: {timing['failure']}"
        for shape, entry in found.items()
        for timing in [*entry["batches"].values(), *entry["precisions"].values()]
        if timing["failure"]
    ]
    print("\n".join(failures), file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    program.run("bench_choices", main)
