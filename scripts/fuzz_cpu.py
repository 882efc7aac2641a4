"""Check the CPU kernels on random problems: exact on whole numbers, no stray accesses."""

import multiprocessing
import os
import sys
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from studies import cpu_fuzz
from tqdm import tqdm

from ece408_op.backends.cpu import native
from ece408_op.cli import arguments, program


def prepare(library):
    """Configure a worker process: choose the build of the kernels."""
    if library is not None:
        native.LIBRARY = library.resolve()


def results(cases, jobs, library):
    """Yield each case, how often each kernel ran, and its failures. Each of `jobs` threads has a
    worker process; one that dies is replaced."""
    # Not forked: other threads may hold locks.
    context = multiprocessing.get_context("spawn")
    own = threading.local()

    def run(case):
        if not hasattr(own, "pool"):
            own.pool = ProcessPoolExecutor(1, context, initializer=prepare, initargs=(library,))
        try:
            return case, *own.pool.submit(cpu_fuzz.run, case).result()
        except BrokenProcessPool:
            del own.pool
            return case, Counter(), [("any", "any", "the process was killed")]

    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(run, cases)


def main():
    parser = arguments.Parser(description=__doc__)
    parser.add_argument("count", nargs="?", type=int, default=300, help="problems (default: 300)")
    parser.option("--seed N", "random seed (default: 408)", default=408)
    parser.option("--jobs N", "processes (default: one per processor)", default=os.cpu_count())
    parser.option("--problem TEXT", "only this problem, as failures print it")
    parser.option("--library PATH", "another build of libece408_cpu.so", type=Path)
    options = parser.parse_args()
    ran, wrong = Counter(), Counter()
    if options.problem:
        cases = [cpu_fuzz.Case.parse(options.problem)]
    else:
        prepare(options.library)
        cases = list(cpu_fuzz.cases(options.count, options.seed))
    found = results(cases, options.jobs, options.library)
    progress = tqdm(found, total=len(cases), unit="problem", disable=None)
    for case, counts, failures in progress:
        ran += counts
        for kernel, direction, how in failures:
            wrong[kernel, direction] += 1
            progress.write(f"{kernel} {direction}: {how}\n  --problem '{case}'", sys.stderr)
    print(cpu_fuzz.table(ran, wrong))
    return bool(wrong)


if __name__ == "__main__":
    program.run("fuzz_cpu", main)
