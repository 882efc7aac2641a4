"""Time every CUDA kernel on every shape, beside cuDNN, and check what they compute."""

import argparse
import sys

from studies import ladder_docs, results
from studies import options as shared
from tqdm import tqdm

from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import device
from ece408_op.bench import cuda_report, cuda_timer
from ece408_op.cli import program
from ece408_op.files.cachedir import atomic_path
from ece408_op.files.resources import kernels_dir

FORWARD = [kernel for kernel in catalog.KERNELS if kernel.direction == "forward"]


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    shared.add_shapes_or_problems(parser)
    parser.add_argument(
        "--kernels",
        default=",".join(kernel.name for kernel in FORWARD),
        help="separated by commas (default: all)",
    )
    parser.add_argument("--batch-size", type=int, help="images at once (default: 10000)")
    shared.add_repeat(parser)
    shared.add_gpu(parser)
    shared.add_peer(parser)
    shared.add_output(parser)
    parser.add_argument(
        "--resume", action="store_true", help="keep what PREFIX.json has and measure the rest"
    )
    parser.add_argument(
        "--headers", action="store_true",
        help="write the times in PREFIX.json into the kernels' headers and README, and end",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true",
        help="say which headers and README have other times than PREFIX.json, and end",
    )  # fmt: skip
    options = parser.parse_args()
    if (options.resume or options.headers or options.check) and not options.output:
        parser.error("--resume, --headers and --check need --output PREFIX")
    return options


def measure_shape(gpu, name, problem, kernels, peer, samples, entry, on_kernel):
    """Fill in what `entry`, one shape's results, does not have yet."""
    wanted = [
        kernel
        for kernel in kernels
        if kernel.name not in entry["kernels"] and kernel.why_not(problem, gpu.capability) is None
    ]
    with cuda_timer.bench(gpu, problem) as bench:
        for kernel in wanted:
            entry["kernels"][kernel.name] = cuda_report.kept(vars(bench.time(kernel, samples)))
            on_kernel()
        if peer is not None and not entry["cudnn"]:
            measured = peer.measure(problem, samples)
            entry["cudnn"] = {name: cuda_report.kept(each) for name, each in measured.items()}


def bench_all(options):
    """The results as a document; written after every shape."""
    path = options.output and options.output.with_name(options.output.name + ".json")
    document = cuda_report.load(path) if options.resume else {}
    found = document.get("results", {})
    problems = shared.shapes_or_problems(options, options.batch_size)
    kernels = [catalog.get(name) for name in options.kernels.split(",")]
    gpu = device.get(options.gpu)
    progress = tqdm(total=len(problems) * len(kernels), unit="kernel", disable=None)
    with shared.peer(options) as peer, progress:
        versions = peer.versions if peer else document.get("peer", {})
        for name, problem in problems.items():
            entry = found.get(name)
            if entry is None or entry["batch"] != problem.batch:
                entry = found[name] = {"batch": problem.batch, "kernels": {}, "cudnn": {}}
            measure_shape(gpu, name, problem, kernels, peer, options.repeat, entry, progress.update)
            if options.output:
                content = {"peer": versions, "samples": options.repeat, "results": found}
                results.write(
                    options.output, "CUDA kernels", _text(versions, options, found), content
                )
    return found, versions


def _text(versions, options, found):
    about = ", ".join(f"{key} {value}" for key, value in versions.items())
    return f"{options.repeat} samples each. cuDNN by {about}.\n\n{cuda_report.tables(found)}"


def _documents(options):
    """Exit code 1 if documents were, or are, out of date."""
    document = cuda_report.load(options.output.with_name(options.output.name + ".json"))
    outdated = ladder_docs.outdated(kernels_dir(), document)
    for path, text in outdated.items():
        print(f"{path} {'was' if options.headers else 'is'} out of date", file=sys.stderr)
        if options.headers:
            with atomic_path(path) as temporary:
                temporary.write_text(text, encoding="utf-8")
    return int(options.check and bool(outdated))


def main():
    options = parse()
    if options.headers or options.check:
        return _documents(options)
    found, versions = bench_all(options)
    print(_text(versions, options, found))
    failures = [
        f"{shape} {kernel}: {timing['failure']}"
        for shape, entry in found.items()
        for kernel, timing in entry["kernels"].items()
        if timing["failure"]
    ]
    print("\n".join(failures), file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    program.run("bench_cuda", main)
