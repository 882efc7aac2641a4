"""Check every CUDA kernel: exact on whole numbers, close on real ones, no other memory written."""

from studies import cuda_proof
from studies import options as shared
from tqdm import tqdm

from ece408_op.backends.cuda.kernels import catalog
from ece408_op.backends.cuda.runtime import device
from ece408_op.bench import results
from ece408_op.cli import arguments, program


def main():
    parser = arguments.Parser(description=__doc__)
    parser.add_argument(
        "kernels",
        nargs="*",
        metavar="KERNEL",
        help=f"of {', '.join(kernel.name for kernel in catalog.KERNELS)} (default: all)",
    )
    shared.add_gpu(parser)
    parser.option("--random N", "random problems for each kernel (default: 200)", default=200)
    parser.option("--small", "leave out the course's shapes and real numbers")
    parser.option("--bare", "without guard zones, for compute-sanitizer to watch")
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
