"""Time what the CUDA backend chooses by itself: by batch, beside cuDNN, and by precision."""

import argparse
import sys

from studies import choices, results
from studies import options as shared
from tqdm import tqdm

from ece408_op.backends.cuda.runtime import device
from ece408_op.bench import shapes
from ece408_op.cli import program


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    shared.add_shapes(parser)
    shared.add_repeat(parser)
    shared.add_gpu(parser)
    shared.add_peer(parser)
    shared.add_output(parser)
    return parser.parse_args()


def bench(options):
    gpu = device.get(options.gpu)
    with shared.peer(options) as peer:
        found = {
            name: choices.measure(gpu, shapes.find(name), peer, options.repeat)
            for name in tqdm(options.shapes.split(","), unit="shape", disable=None)
        }
        return found, peer.versions if peer else {}


def main():
    options = parse()
    found, versions = bench(options)
    about = ", ".join(f"{key} {value}" for key, value in versions.items())
    peer = f" cuDNN by {about}." if about else ""
    text = f"{options.repeat} samples each.{peer}\n\n{choices.tables(found)}"
    content = {"peer": versions, "samples": options.repeat, "results": found}
    results.show(options.output, "What the CUDA backend chooses", text, content)
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
