"""Run programs with planted faults; compare the emulator's findings with compute-sanitizer's on a
GPU."""

import itertools
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from studies import faults, options
from tqdm import tqdm

from ece408_op.bench import results
from ece408_op.cli import arguments, program
from ece408_op.files import markdown
from ece408_op.lab import sanitizer

FOLDER = Path(__file__).parents[1] / "tests" / "emulator" / "faults"
# The fixed order, and a random one.
SEEDS = (None, 1)
HEAD = ["program", "fault", "emulator", "compute-sanitizer"]


def main():
    parser = arguments.Parser(description=__doc__)
    parser.option("--jobs N", "programs at a time (default: 4)", default=4)
    parser.option("--without-gpu", "the emulator alone")
    options.add_output(parser)
    given = parser.parse_args()
    # Report missing tools before anything runs.
    found = None if given.without_gpu else find_sanitizer()
    files = sorted(FOLDER.glob("*.cu"))
    programs = [each for path in files for each in faults.programs(path)]
    emulator = {}
    for path in files:
        emulator.update(faults.by_emulator(path, SEEDS))
    tools = {} if found is None else by_tools(found, files, given.jobs)
    show(programs, emulator, tools, given.output)


def find_sanitizer():
    faults.require_gpu()
    return sanitizer.find()


def by_tools(found, files, jobs):
    """Return compute-sanitizer's reports by program and tool."""
    told = {}
    with (
        tempfile.TemporaryDirectory(prefix="ece408-faults-") as name,
        ThreadPoolExecutor(jobs) as pool,
    ):
        made = pool.map(lambda path: faults.compiled(path, Path(name)), files)
        runs = [
            (tool, path, each.name)
            for source, path in zip(files, made)
            for each, tool in itertools.product(faults.programs(source), sanitizer.TOOLS)
        ]
        answers = pool.map(lambda run: faults.sanitized(found, *run), runs)
        shown = tqdm(answers, total=len(runs), leave=False, disable=None)
        for (tool, _, each), outcome in zip(runs, shown):
            told.setdefault(each, {})[tool] = outcome
    return told


def show(programs, emulator, tools, prefix):
    rows, records = [], []
    for each in programs:
        own, others = emulator[each.name], tools.get(each.name, {})
        row = [each.name, "; ".join(each.kinds), faults.said(own, each)]
        row += [faults.tools_said(others, each)] if tools else []
        rows.append(row)
        records.append(
            {
                **dict(zip(HEAD, row)),
                "lines": sorted(each.lines),
                "of the emulator": own.record(),
                "of the tools": {tool: told.record() for tool, told in others.items()},
            }
        )
    summary = faults.counted("The emulator", [(p, [emulator[p.name]]) for p in programs])
    if tools:
        pairs = [(p, list(tools[p.name].values())) for p in programs]
        summary += f"; {faults.counted('compute-sanitizer', pairs)}"
    table = markdown.table(HEAD[: len(rows[0])], rows)
    content = {"summary": f"{summary}.", "programs": records}
    results.show(prefix, "Planted faults", f"{summary}.\n\n{table}", content)


if __name__ == "__main__":
    program.run("prove_faults", main)
