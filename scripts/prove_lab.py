"""Compare the lab's verdicts on other people's files with an independent check, and rank them
twice.

Files are identified by numbers only.
"""

import argparse
import copy
import sys
import tempfile
from pathlib import Path

from studies import lab_proof, options
from tqdm import tqdm

from ece408_op.bench import results, shapes
from ece408_op.cli import arguments, program
from ece408_op.files import markdown
from ece408_op.lab import ranking

LAYERS = ("fa19_1", "fa19_2")
IMAGES = 25  # for the independent check
HEAD = ["number", "form", "by other means", "lab check", "agree", "sum, ms", "again, ms", "change"]


def main():
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="kernel files, in folders")
    parser.option("--batch-size N", "images (default: 1000)", default=1000)
    parser.option("--repeat N", "of each ranking (default: 5)", default=5)
    parser.option("--most N", "files ranked (default: 20)", default=20)
    parser.option("--jobs N", "files checked at a time (default: 4)", default=4)
    parser.option("--compare COMPARE", argparse.SUPPRESS, nargs="+")
    options.add_output(parser)
    given = parser.parse_args()
    if given.compare:
        path, output, *texts = given.compare
        lab_proof.compare(path, texts, Path(output))
        return
    if given.folder is None:
        parser.error("name a folder of kernel files")
    prove(given)


def prove(given):
    files = ranking.find([given.folder])
    kernels = {name: file for name, file in files.items() if not isinstance(file, str)}
    layers = [(name, shapes.find(name, given.batch_size)) for name in LAYERS]
    texts = lab_proof.layer_texts(layers, IMAGES)
    with tempfile.TemporaryDirectory() as folder:
        others = lab_proof.by_other_means(__file__, kernels, texts, Path(folder), given.jobs)
    say(f"{len(kernels)} files compared by other means")
    checked = rank(files, layers, 0, given.jobs)
    say(f"{len(files)} files checked")
    right = [name for name in kernels if not checked.entries[name].why_not]
    count = min(given.most, len(right))
    ranked = {
        name: kernels[name] for name in (right[i * len(right) // count] for i in range(count))
    }
    rankings = []
    for number in (1, 2):
        rankings.append(rank(ranked, layers, given.repeat, given.jobs, checked))
        say(f"{len(ranked)} files ranked, {number} of 2")
    rows = lab_proof.table_rows(checked, rankings, files, others, len(texts))
    summary = lab_proof.summary(rankings)
    table = f"{summary}\n\n{markdown.table(HEAD, rows, {0, 5, 6, 7})}"
    content = {"summary": summary, "files": [dict(zip(HEAD, row)) for row in rows]}
    results.show(given.output, "Kernel files of others in the lab", table, content)


def say(what):
    print(f"prove_lab: {what}", file=sys.stderr, flush=True)


def rank(files, layers, rounds, jobs, checked=None):
    """Rank the files in these rounds; unless `checked` is given, check them first."""
    conditions = {"layers": {name: str(problem) for name, problem in layers}}
    found = copy.deepcopy(checked) or ranking.Ranking(conditions)
    with tqdm(leave=False, disable=None) as bar:

        def show(what, done, total):
            bar.desc, bar.n, bar.total = what, done, total
            bar.refresh()

        ranking.rank(files, found, layers, rounds, jobs, lambda: None, show)
    return found


if __name__ == "__main__":
    program.run("prove_lab", main)
