"""Time whole programs in turns: m1.1, m2.1, those on a GPU if asked, and one in PyTorch on the CPU
with the same network and files."""

import argparse

from studies import options as shared
from studies import programs, results
from tqdm import tqdm

from ece408_op.cli import program
from ece408_op.course import course_terms


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    terms = [each.name for each in course_terms.TERMS.values() if len(each.filters) == 2]
    parser.add_argument(
        "--term", choices=terms, default=course_terms.DEFAULT_TERM, help="default: %(default)s"
    )
    parser.add_argument("--repeat", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--gpu", action="store_true", help=f"also {', '.join(programs.ON_GPU)}")
    shared.add_peer(parser)
    shared.add_output(parser)
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: give 1 or more")
    peer = None if options.no_peer else options.peer_python or "python3"
    commands = programs.commands(course_terms.find_term(options.term), peer, options.gpu)
    with tqdm(total=(options.repeat + 1) * len(commands), unit="run", disable=None) as progress:
        found = programs.measure(commands, options.repeat, progress.update)
    runs = f"{options.repeat} runs each after a first one"
    text = f"All 10000 images in one batch, {runs}. {found[-1].about}\n\n"
    results.show(
        options.output,
        "Programs",
        text + programs.table(found),
        {"programs": programs.records(found)},
    )


if __name__ == "__main__":
    program.run("bench_programs", main)
