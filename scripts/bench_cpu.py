"""Time the CPU kernels beside MXNet's Convolution and PyTorch's, outputs checked first."""

import argparse
import dataclasses
import json
from pathlib import Path

from studies import cpu_table, results
from studies import options as shared
from tqdm import tqdm

from ece408_op import settings
from ece408_op.backends.cpu import native
from ece408_op.bench import ceilings, cpu_timer, shapes
from ece408_op.bench.summary import summary
from ece408_op.cli import program
from ece408_op.files.cachedir import atomic_path
from ece408_op.operator.variables import set_environment
from ece408_op.problem import ConvProblem


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "shapes",
        nargs="*",
        metavar="SHAPE",
        help=f"of {', '.join(shapes.SHAPES)}, or problems such as b100,c12,h33,w33,m24,k5 "
        "(default: all, and five that no kernel was tuned for)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=shapes.BATCH, help="images (default: 10000)"
    )
    parser.add_argument(
        "--small-batch-size",
        type=int,
        default=1000,
        help="images for gradients, instruction sets and threads (default: 1000)",
    )
    parser.add_argument("--repeat", type=int, default=20, help="timed runs (default: 20)")
    parser.add_argument("--threads", type=int, help="threads of all (default: the usable cores)")
    parser.add_argument("--forward-only", action="store_true", help="only the first tables")
    shared.add_peer(parser)
    shared.add_output(parser)
    parser.add_argument(
        "--readme",
        type=Path,
        metavar="FILE",
        help="only write the table of PREFIX.json into FILE, between its markers",
    )
    options = parser.parse_args()
    if options.readme and not options.output:
        parser.error("--readme needs --output PREFIX")
    return options


def measure(options, peer):
    """The document that the tables are made of."""
    named = options.shapes or list(shapes.SHAPES)
    listed = [(name, shapes.find(name, options.batch_size)) for name in named]
    unlisted = () if options.shapes else cpu_timer.UNLISTED
    others = [(text, ConvProblem.parse(f"b{options.batch_size},{text}")) for text in unlisted]
    small = [(name, dataclasses.replace(p, batch=options.small_batch_size)) for name, p in listed]
    if options.forward_only:
        small = []
    turns = options.repeat + 2
    total = 2 * turns * (len(listed) + len(others) + len(small))
    document = {"threads": settings.threads(), "samples": options.repeat}
    document["torch"] = peer and peer.versions
    top = ceilings.measure(native.isas()[0], settings.threads())
    with tqdm(total=total, unit="turn", disable=None) as progress:

        def run(name, problem, measured, *arguments):
            progress.set_description(name)
            found = measured(problem, *arguments, options.repeat, progress.update)
            ms = {each: summary(times) for each, times in found["ms"].items() if times}
            return {"name": name, "problem": str(problem), **found, "ms": ms}

        document["forward"] = [run(n, p, cpu_timer.forward, peer) for n, p in listed]
        document["unlisted"] = [
            {**run(n, p, cpu_timer.forward, peer), "nearest": shapes.nearest(p)} for n, p in others
        ]
        document["backward"] = [run(n, p, cpu_timer.backward, peer) for n, p in small]
        document["variants"] = [run(n, p, cpu_timer.variants, native.isas()) for n, p in small]
    top = top.best(ceilings.measure(native.isas()[0], settings.threads()))
    document["ceilings"] = dataclasses.asdict(top)
    return document


def update_readme(options):
    """The README's table from results that are there."""
    results_file = options.output.with_name(options.output.name + ".json")
    document = json.loads(results_file.read_text(encoding="utf-8"))
    text = cpu_table.with_table(options.readme.read_text(encoding="utf-8"), document)
    with atomic_path(options.readme) as temporary:
        temporary.write_text(text, encoding="utf-8")


def main():
    options = parse()
    if options.readme:
        return update_readme(options)
    if options.threads:
        settings.configure(threads=options.threads)
    set_environment(settings.threads())
    with shared.torch(options) as peer:
        document = measure(options, peer)
    results.show(options.output, "CPU kernels", cpu_table.tables(document), document)


if __name__ == "__main__":
    program.run("bench_cpu", main)
