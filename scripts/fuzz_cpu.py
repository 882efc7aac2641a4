"""Check the CPU kernels on random problems: whole numbers exactly, and no stray accesses."""

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from tqdm import tqdm

from ece408_op.backends import native
from ece408_op.errors import Ece408Error
from ece408_op.lab import cpu_fuzz


def prepare(library):
    """In the process that computes: which build of the kernels is used."""
    if library is not None:
        native.LIBRARY = library.resolve()


def draw(count, seed):
    return list(cpu_fuzz.cases(count, seed))


def run(cases, library):
    """Results of each case; one that ends the process is a failure, and the next gets another."""

    def process():
        return ProcessPoolExecutor(1, initializer=prepare, initargs=(library,))

    pool = process()
    try:
        for case in cases:
            try:
                yield case, *pool.submit(cpu_fuzz.run, case).result()
            except BrokenProcessPool:
                pool = process()
                yield case, Counter(), [("any", "any", "the process was killed")]
    finally:
        pool.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=300, help="problems (default: 300)")
    parser.add_argument("--seed", type=int, default=408, help="which ones (default: 408)")
    parser.add_argument("--problem", metavar="TEXT", help="only this one, as a failure printed it")
    parser.add_argument(
        "--library", type=Path, metavar="PATH", help="another build of libece408_cpu.so"
    )
    options = parser.parse_args()
    ran, wrong = Counter(), Counter()
    try:
        if options.problem:
            cases = [cpu_fuzz.Case.parse(options.problem)]
        else:
            prepare(options.library)
            cases = list(cpu_fuzz.cases(options.count, options.seed))
        progress = tqdm(cases, unit="problem", disable=None)
        for case, counts, failures in run(progress, options.library):
            ran += counts
            for kernel, direction, how in failures:
                wrong[kernel, direction] += 1
                progress.write(f"{kernel} {direction}: {how}\n  --problem '{case}'", sys.stderr)
    except Ece408Error as error:
        print(f"fuzz_cpu: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(cpu_fuzz.table(ran, wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
