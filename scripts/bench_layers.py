"""Time layers of real networks, forward and gradients: on the CPU every kernel, the chosen one, and
PyTorch; with --gpu the chosen kernels and cuDNN."""

import argparse
import statistics

from studies import gpu_layers, layers, results
from studies import options as shared
from tqdm import tqdm

from ece408_op import settings
from ece408_op.backends import DIRECTIONS
from ece408_op.backends.cuda.runtime import device
from ece408_op.bench import tune_targets
from ece408_op.bench.compiling import compile_all
from ece408_op.bench.cpu_timer import WARM_UP
from ece408_op.cli import program
from ece408_op.errors import Ece408Error
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
    parser.add_argument(
        "--batch-size",
        help="numbers of images, separated by commas (default: 1,16; of a GPU 1,32,256)",
    )
    parser.add_argument("--repeat", type=int, help="timed runs (default: 5; of a GPU 20)")
    parser.add_argument("--threads", type=int, help="threads of all (default: the usable cores)")
    parser.add_argument("--gpu", type=int, metavar="NUMBER", help="on the GPU of this number")
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=tune_targets.ZOO,
        metavar="NETWORK",
        default=[],
        help="on a GPU: the layers of these networks, each once, and their sums for each network: "
        f"{', '.join(tune_targets.ZOO)}",
    )
    parser.add_argument(
        "--compile-times",
        action="store_true",
        help="on a GPU: also the seconds in which a layer's directions compile on all cores, with "
        "nothing compiled before",
    )
    parser.add_argument(
        "--kernels", default="", help="CUDA kernels to time besides, separated by commas"
    )
    shared.add_names(parser, "--directions", DIRECTIONS)
    shared.add_peer(parser)
    shared.add_output(parser)
    return parser.parse_args()


def problems_of(asked, batch_sizes):
    """Each layer with each batch: its text, the batch, and the problem."""
    return [
        (text, int(batch), ConvProblem.parse(f"b{batch},{text}"))
        for batch in batch_sizes.split(",")
        for text in asked
    ]


def main():
    options = parse()
    return on_cpu(options) if options.gpu is None else on_gpu(options)


def on_gpu(options):
    gpu = device.get(options.gpu)
    directions, samples = options.directions.split(","), options.repeat or 20
    kernels = [name for name in options.kernels.split(",") if name]
    networks = {name: gpu_layers.layers_of(name) for name in options.networks}
    of_networks = [layer for counts in networks.values() for layer in counts]
    asked = list(dict.fromkeys([*options.layers, *of_networks])) or layers.LAYERS
    problems = problems_of(asked, options.batch_size or ("32" if networks else "1,32,256"))
    compiled = {}
    if options.compile_times:
        for text, batch, problem in tqdm(problems, desc="compiling", disable=None):
            seconds = gpu_layers.compile_seconds(gpu, problem, directions)
            compiled[f"b{batch},{text}"] = round(seconds, 2)
    compile_all(
        gpu,
        (
            plan
            for _, _, problem in problems
            for direction in directions
            for plan in gpu_layers.plans_of(gpu, problem, direction, kernels).values()
        ),
    )
    progress = tqdm(total=len(problems) * len(directions), unit="direction", disable=None)
    found, failures = [], []
    title = f"Layers of networks on {gpu.name}"
    with shared.peer(options) as peer, progress:
        versions = peer and peer.versions
        for text, batch, problem in problems:
            progress.set_description(f"b{batch},{text}")
            try:
                measured = gpu_layers.measure(
                    gpu, problem, peer, samples, kernels, directions, progress.update
                )
                found.append({"layer": text, "batch": batch, **measured})
            except Ece408Error as error:
                failures.append(str(error))
            content = {"samples": samples, "torch": versions}
            content |= {"layers": found, "failures": failures, "compile_seconds": compiled}
            about = (
                f"Medians of {samples} runs, float32; cuDNN: the better of NCHW and NHWC, no TF32."
            )
            sums = gpu_layers.sums(found, networks)
            table = "\n\n".join(
                [about, gpu_layers.tables(found), *sums, *told(compiled), *failures]
            )
            if options.output:
                results.write(options.output, title, table, content)
    print(table)
    return bool(failures)


def told(compiled):
    """What became of --compile-times, in a line."""
    if not compiled:
        return []
    longest = max(compiled, key=compiled.get)
    return [
        f"Compiling a layer's directions took {statistics.median(compiled.values()):.1f} s in the "
        f"median, at most {compiled[longest]:.1f} s (`{longest}`)."
    ]


def on_cpu(options):
    if options.threads:
        settings.configure(threads=options.threads)
    set_environment(settings.threads())
    samples = options.repeat or 5
    problems = problems_of(options.layers or layers.LAYERS, options.batch_size or "1,16")
    directions = options.directions.split(",")
    turns = len(problems) * len(directions) * (samples + WARM_UP)
    found = []
    with shared.torch(options) as peer, tqdm(total=turns, unit="turn", disable=None) as progress:
        versions = peer and peer.versions
        for text, batch, problem in problems:
            progress.set_description(f"b{batch},{text}")
            measured = layers.measure(problem, peer, samples, progress.update, directions)
            found.append({"layer": text, "batch": batch, **measured})
    content = {
        **{"threads": settings.threads(), "samples": samples},
        **{"torch": versions, "layers": found},
    }
    about = (
        f"{settings.threads()} threads, medians of {samples} runs; "
        "PyTorch: the better of NCHW and NHWC. Above 1, ours is faster.\n\n"
        "Weights are packed or read where they are in each call, as outside of networks."
    )
    text = f"{about}\n\n{layers.tables(found)}"
    results.show(options.output, "Layers of networks on the CPU", text, content)


if __name__ == "__main__":
    program.run("bench_layers", main)
