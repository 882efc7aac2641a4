"""Check every CUDA kernel: exact on whole numbers, close on real ones, nothing else written; with
--errors measure how close."""

import argparse
import functools

from studies import cuda_errors, cuda_proof, layers, results
from studies import options as shared
from tqdm import tqdm

from ece408_op.backends import DIRECTIONS
from ece408_op.backends.cuda.kernels import catalog, tuned
from ece408_op.backends.cuda.runtime import device
from ece408_op.bench import checker
from ece408_op.bench.compiling import compile_all
from ece408_op.cli import program
from ece408_op.problem import ConvProblem


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "kernels",
        nargs="*",
        metavar="KERNEL",
        help=f"of {', '.join(kernel.name for kernel in catalog.KERNELS)} (default: all)",
    )
    shared.add_gpu(parser)
    parser.add_argument(
        "--random", type=int, default=200, help="random problems for each kernel (default: 200)"
    )
    parser.add_argument(
        "--small", action="store_true", help="leave out the course's shapes and real numbers"
    )
    parser.add_argument(
        "--bare", action="store_true", help="without guard zones, for compute-sanitizer to watch"
    )
    parser.add_argument(
        "--errors",
        action="store_true",
        help="measure errors on four kinds of numbers, in all and element by element, beside plain "
        "float32 sums, and whether a second run gives the same bits; check nothing else",
    )
    parser.add_argument(
        "--layers",
        action="store_true",
        help=f"with --errors, of {len(layers.LAYERS)} layers of networks, one image, in each "
        "direction by the kernel that is chosen",
    )
    shared.add_output(parser)
    options = parser.parse_args()
    if options.layers and not options.errors:
        parser.error("--layers is for --errors: give both")
    kernels = [catalog.get(name) for name in options.kernels] or catalog.KERNELS
    gpu = device.get(options.gpu)
    if options.layers:
        return measure_layers(gpu, options.output)
    if options.errors:
        return measure_errors(gpu, kernels, options.output)
    proofs = [
        cuda_proof.prove(gpu, kernel, options.random, not options.small, options.bare)
        for kernel in tqdm(kernels, unit="kernel", disable=None)
    ]
    content = {"kernels": cuda_proof.document(proofs)}
    results.show(options.output, "CUDA kernels checked", cuda_proof.table(proofs), content)
    return any(proof.failures for proof in proofs)


def measure_errors(gpu, kernels, output):
    problems = [ConvProblem.parse(text) for text in cuda_errors.PROBLEMS]
    compile_all(
        gpu,
        (
            kernel.plan(problem, gpu.capability, False)
            for kernel in kernels
            for problem in problems
            if kernel.why_not(problem, gpu.capability) is None
        ),
    )
    records = cuda_errors.measure(
        functools.partial(checker.computed, gpu),
        tqdm(sorted(kernels, key=lambda each: each.direction), unit="kernel", disable=None),
        gpu.capability,
    )
    content = {"errors": records}
    results.show(output, "Errors of the CUDA kernels", cuda_errors.table(records), content)
    defaults = {kernel.name for kernel in kernels if kernel.rank is not None}
    return not all(each["same_bits"] for each in records if each["kernel"] in defaults)


def measure_layers(gpu, output):
    problems = [ConvProblem.parse(f"b1,{text}") for text in layers.LAYERS]

    def choose(problem, direction):
        return tuned.best(problem, gpu, "float32", direction)

    choices = [(each, choose(each, way)) for each in problems for way in DIRECTIONS]
    compile_all(
        gpu,
        (
            choice.kernel.plan(problem, gpu.capability, False, choice.layout)
            for problem, choice in choices
        ),
    )
    records = cuda_errors.measure_chosen(
        functools.partial(checker.computed, gpu),
        choose,
        tqdm(problems, unit="layer", disable=None),
    )
    table, content = cuda_errors.table_of_chosen(records), {"errors": records}
    results.show(output, "Errors of the kernels chosen for layers of networks", table, content)
    return not all(each["same_bits"] for each in records)


if __name__ == "__main__":
    program.run("check_cuda", main)
