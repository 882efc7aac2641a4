"""Check every CUDA kernel: exact on whole numbers, close on real ones, no other memory written."""

import argparse

from studies import cuda_proof
from studies import options as shared
from tqdm import tqdm

from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import device
from ece408_op.bench import results
from ece408_op.cli import program


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
    shared.add_output(parser)
    options = parser.parse_args()
    kernels = [catalog.get(name) for name in options.kernels] or catalog.KERNELS
    gpu = device.get(options.gpu)
    proofs = [
        cuda_proof.prove(gpu, kernel, options.random, not options.small, options.bare)
        for kernel in tqdm(kernels, unit="kernel", disable=None)
    ]
    content = {"kernels": cuda_proof.document(proofs)}
    results.show(options.output, "CUDA kernels checked", cuda_proof.table(proofs), content)
    return any(proof.failures for proof in proofs)


if __name__ == "__main__":
    program.run("check_cuda", main)
