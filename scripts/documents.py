"""Write the measured times of docs/results into the documents and headers that quote them."""

import sys
from pathlib import Path

from studies import documents

from ece408_op.bench import results
from ece408_op.cli import arguments, program
from ece408_op.files.cachedir import write_text

ROOT = Path(__file__).parents[1]


def main():
    parser = arguments.Parser(description=__doc__)
    parser.option("--check", "only list outdated documents, with exit code 1")
    options = parser.parse_args()
    measured = [
        results.load(ROOT / "docs" / "results" / f"{n}.json") for n in ("cpu", "cuda_bench")
    ]
    outdated = documents.outdated(ROOT, *measured)
    for path, text in outdated.items():
        print(f"{path} {'is' if options.check else 'was'} out of date", file=sys.stderr)
        if not options.check:
            write_text(path, text)
    return int(options.check and bool(outdated))


if __name__ == "__main__":
    program.run("documents", main)
