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


class Workers:
    """Worker processes, one for each of `jobs` threads; one that dies is replaced."""

    def __init__(self, jobs, library):
        self._library = library
        self._threads = ThreadPoolExecutor(jobs)
        self._local = threading.local()
        self._all = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._threads.shutdown(cancel_futures=True)
        for pool in self._all:
            pool.shutdown(cancel_futures=True)

    def run(self, cases):
        """Run the cases; yield each case, how often each kernel ran, and its failures."""
        return self._threads.map(self._run, cases)

    def _run(self, case):
        if getattr(self._local, "pool", None) is None:
            self._local.pool = self._make_pool()
        try:
            return case, *self._local.pool.submit(cpu_fuzz.run, case).result()
        except BrokenProcessPool:
            self._local.pool = None
            return case, Counter(), [("any", "any", "the process was killed")]

    def _make_pool(self):
        # Not forked: other threads may hold locks.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, context, initializer=prepare, initargs=(self._library,))
        self._all.append(pool)
        return pool


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
    with Workers(options.jobs, options.library) as workers:
        results = workers.run(cases)
        progress = tqdm(results, total=len(cases), unit="problem", disable=None)
        for case, counts, failures in progress:
            ran += counts
            for kernel, direction, how in failures:
                wrong[kernel, direction] += 1
                progress.write(f"{kernel} {direction}: {how}\n  --problem '{case}'", sys.stderr)
    print(cpu_fuzz.table(ran, wrong))
    return bool(wrong)


if __name__ == "__main__":
    program.run("fuzz_cpu", main)
