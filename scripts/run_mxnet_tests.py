"""Run MXNet's own tests with our operator in Convolution's place, and compare the outcomes.

Each test runs twice, with MXNet's own Convolution and with ours; calls that ours refuses (three
dimensions, other layouts, sparse arrays) still go to MXNet's own, and are counted. The tests are in
MXNet's sources: https://github.com/apache/mxnet, tag 1.9.1, folder tests/python.
"""

import signal
import sys

from studies import mxnet_tests
from studies.options import add_output
from tqdm import tqdm

from ece408_op.bench.results import write
from ece408_op.cli import arguments, program


def main():
    options = _options()
    # Make the test processes end with this one, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(mxnet_tests.table(_run(options)))


def _options():
    parser = arguments.Parser(description=__doc__)
    parser.option("--sources DIR", "folder tests/python of MXNet's sources", required=True)
    parser.option(
        "--files FILE",
        "test files below it, such as unittest/test_attr.py (default: all about networks or "
        "convolutions)",
        nargs="+",
        type=str,
    )
    parser.option("--only PATTERN", "names of tests, with wildcards", default="*")
    parser.option(
        "--limit SECONDS", "seconds that a test may take (default: 120)", type=float, default=120
    )
    add_output(parser)
    parser.option(
        "--own FILE", "cache the outcomes with MXNet's own Convolution in this file, and reuse them"
    )
    return parser.parse_args()


def _run(options):
    own = mxnet_tests.load(options.own) if options.own else {}
    results = {}
    chosen = mxnet_tests.selected(options.sources, options.files)
    for file, names in tqdm(chosen.items(), unit="file"):
        run = mxnet_tests.Run(options.sources, file, options.limit, names, options.only)
        results[file] = mxnet_tests.compare(run, own)
        tqdm.write(mxnet_tests.summary(file, results[file]), file=sys.stderr)
        if options.own:
            mxnet_tests.save(options.own, own)
        if options.output:
            table, content = mxnet_tests.table(results), mxnet_tests.document(results)
            write(options.output, "MXNet's own tests with our operator", table, content)
    return results


if __name__ == "__main__":
    program.run("run_mxnet_tests", main)
