"""The emulator beside a GPU: its verdicts on files of others, and its counts beside ncu's.

prove_emulator.py files FOLDER      files are named by numbers only
prove_emulator.py counts            kernels 1 to 8 of this package
"""

import argparse
import sys
import tempfile
from pathlib import Path

from studies import emulator_proof, lab_proof, options, results

from ece408_op.backends.kernel_file import KernelFile
from ece408_op.bench import shapes
from ece408_op.cli import program
from ece408_op.errors import UnsupportedProblem
from ece408_op.files import markdown
from ece408_op.lab import ranking

LAYERS = ("fa19_1", "fa19_2")
IMAGES = 2


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("files", "counts"))
    parser.add_argument("folder", type=Path, nargs="?", help="kernel files, in folders")
    parser.add_argument("--jobs", type=int, default=4, help="files at a time (default: 4)")
    parser.add_argument("--batch-size", type=int, default=IMAGES, help=f"default: {IMAGES}")
    options.add_output(parser)
    asked = parser.parse_args()
    layers = [(name, shapes.find(name, asked.batch_size)) for name in LAYERS]
    if asked.what == "counts":
        prove_counts(layers, asked.output)
    elif asked.folder is None:
        parser.error("name a folder of kernel files")
    else:
        prove_files(asked, layers)


def prove_files(asked, layers):
    texts = lab_proof.layer_texts(layers, asked.batch_size)
    files = ranking.find([asked.folder])
    kernels = {name: file for name, file in files.items() if isinstance(file, KernelFile)}
    script = Path(__file__).with_name("prove_lab.py")
    with tempfile.TemporaryDirectory() as folder:
        found = {
            backend: lab_proof.by_other_means(
                str(script), kernels, texts, Path(folder), asked.jobs, backend
            )
            for backend in ("cuda", "emulator")
        }
    rows = [
        emulator_proof.verdicts(number, name, found, len(texts))
        for number, name in enumerate(kernels, 1)
    ]
    summary = emulator_proof.summary(rows)
    head = ["number", "GPU", "emulator", "agree", "first wrong element"]
    table = f"{summary}\n\n{markdown.table(head, rows, {0})}"
    content = {"summary": summary, "files": [dict(zip(head, row)) for row in rows]}
    results.show(
        asked.output, "Kernel files of others in the emulator and on a GPU", table, content
    )


def prove_counts(layers, prefix):
    rows = []
    for kernel in emulator_proof.KERNELS:
        for name, problem in layers:
            try:
                rows += emulator_proof.counts(kernel, name, problem)
            except UnsupportedProblem as error:
                print(f"prove_emulator: {error}", file=sys.stderr)
    summary = emulator_proof.closeness(rows)
    head = ["kernel", "layer", "what", "emulator", "ncu", "change"]
    table = f"{summary}\n\n{markdown.table(head, rows, {3, 4, 5})}"
    content = {"summary": summary, "counts": [dict(zip(head, row)) for row in rows]}
    results.show(prefix, "Counts of the emulator and of ncu", table, content)


if __name__ == "__main__":
    program.run("prove_emulator", main)
