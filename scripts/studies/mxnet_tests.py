"""MXNet's own tests with its Convolution and with ours in its place, and a comparison of the
outcomes."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ece408_op.errors import DataMissing
from ece408_op.files import markdown
from ece408_op.files.cachedir import write_text

from .bench_request import cases

# Every test of these files runs; of other files, only tests of convolutions.
WHOLE_FILES = tuple(cases("mxnet_tests"))
_TEXT = 6000
_WORKER = Path(__file__).with_name("mxnet_tests_worker.py")
_ABOUT = re.compile(r"conv(?!er)|model_zoo|resnet", re.IGNORECASE)


@dataclass
class Outcome:
    """A test's outcome: "passed", "failed", "skipped", "crashed" or "hung".

    `error` is the error in one line, `text` with its traceback. `calls` counts the calls of
    Convolution in the test with ours in place: under "ours" those that ours computed, and under the
    reason those passed to MXNet's own.
    """

    outcome: str
    error: str = ""
    text: str = ""
    seconds: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        return self.outcome not in ("passed", "skipped")


Outcomes = dict[str, Outcome]


def about_convolution(source: str) -> set[str]:
    """Return names of the tests that mention a convolution, directly or in functions of the file
    that they call."""
    definitions = {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    lines = source.splitlines()
    about = {
        name
        for name, node in definitions.items()
        if _ABOUT.search("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    }
    names = {
        name: {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        for name, node in definitions.items()
    }
    while callers := {name for name in names if names[name] & about} - about:
        about |= callers
    return {name for name in about if name.lower().startswith("test")}


def selected(sources: Path, files: Iterable[str] | None) -> dict[str, set[str] | None]:
    """Return test files below `sources`, and the tests to run in each, `None` for all.

    By default `WHOLE_FILES`, and the tests about convolutions in the other files of unittest.
    Raises `DataMissing` for a missing file.
    """
    if files is None:
        others = (f"unittest/{path.name}" for path in sources.glob("unittest/test_*.py"))
        files = sorted({*WHOLE_FILES, *others})
    chosen = {file: _names_in(sources, file) for file in files}
    return {file: names for file, names in chosen.items() if names is None or names}


def _names_in(sources: Path, file: str) -> set[str] | None:
    path = sources / file
    if not path.is_file():
        raise DataMissing(f"{path} is not there; --sources is the folder tests/python of MXNet's")
    if file in WHOLE_FILES:
        return None
    return about_convolution(path.read_text(encoding="utf-8"))


@dataclass
class Run:
    """Tests of one file, run in separate processes, one after the other.

    It runs the tests in `names` (`None` for all) that match the pattern `only`. A test that takes
    longer than `limit` seconds has hung.
    """

    sources: Path
    file: str
    limit: float
    names: set[str] | None = None
    only: str = "*"

    def outcomes(self, convolution: str, tests: set[str] | None = None) -> Outcomes:
        """Run them, in another process after each crash or hang.

        `convolution` is "own" or "ours"; `tests` limits the tests by their whole names.
        """
        outcomes: Outcomes = {}
        while True:
            task: dict[str, object] = {
                "sources": str(self.sources.resolve()),
                "file": self.file,
                "names": None if self.names is None else sorted(self.names),
                "only": self.only,
                "tests": None if tests is None else sorted(tests),
                "done": sorted(outcomes),
            }
            with tempfile.TemporaryDirectory() as folder:
                found, finished = self._process(Path(folder), task, convolution)
            new = found.keys() - outcomes.keys()
            outcomes.update(found)
            if finished or not new:
                return outcomes

    def _process(
        self, folder: Path, task: dict[str, object], convolution: str
    ) -> tuple[Outcomes, bool]:
        task_file, log, events = (folder / name for name in ("task.json", "log", "events"))
        events.touch()
        task_file.write_text(json.dumps({**task, "events": str(events)}), encoding="utf-8")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(_WORKER), str(task_file)],
                cwd=folder,
                env=_environment(convolution),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                end = _wait(process, events, self.limit)
            finally:
                # End processes that the tests started, too.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = log.read_text(encoding="utf-8", errors="replace")[-_TEXT:]
        return read_events(self.file, events.read_text(encoding="utf-8"), end, text)


def _environment(convolution: str) -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[2])
    return {
        "MXNET_TEST_SEED": "408",
        "MXNET_MODULE_SEED": "408",
        # Threads that spin while they wait compete for cores on a busy machine.
        "OMP_WAIT_POLICY": "passive",
        **os.environ,
        "CONVOLUTION": convolution,
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _wait(process: subprocess.Popen, events: Path, limit: float) -> Outcome | None:
    """Return how a process ended, if not well; stop waiting once a test takes too long."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(timeout=0.2)
            if status == 0:
                return None
            how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            return Outcome("crashed", f"the process ended with {how}")
        if time.time() - events.stat().st_mtime > limit:
            return Outcome("hung", f"nothing happened for {limit:g} s", seconds=limit)


def read_events(file: str, events: str, end: Outcome | None, log: str) -> tuple[Outcomes, bool]:
    """Return the outcomes of the tests of one process, and whether it reached the last test.

    `end` is how the process ended, if not well. It becomes the outcome of the running test, else of
    a pseudo-test named after the file and the stage.
    """
    outcomes: Outcomes = {}
    running, finished = f"{file}::(before any test)", False
    for line in events.splitlines():
        event = json.loads(line)
        if "started" in event:
            running = event["started"]
        elif "finished" in event:
            running, finished = f"{file}::(exit)", True
        else:
            test = event.pop("test")
            running = f"{file}::(after {test.split('::', 1)[-1]})"
            outcomes[test] = Outcome(**event)
    if end is not None:
        end.text = log
        outcomes[running] = end
    return outcomes, finished


@dataclass
class FileResult:
    """Outcomes of the tests of one file with MXNet's own Convolution, and with ours."""

    own: Outcomes
    ours: Outcomes

    def verdict(self, test: str) -> str:
        """Return one of `VERDICTS` for a test."""
        own, ours = self.own[test], self.ours[test]
        if own.outcome == ours.outcome == "skipped":
            return "skipped"
        if own.bad and ours.bad:
            return "failed with both"
        if ours.bad or own.bad:
            return "failed only with ours" if ours.bad else "failed only with MXNet's own"
        return "passed with both"

    def calls(self) -> Counter[str]:
        """Count calls of Convolution by "ours", or the reason why not."""
        total: Counter[str] = Counter()
        for outcome in self.ours.values():
            total.update(outcome.calls)
        return total


VERDICTS = (
    "passed with both",
    "failed only with ours",
    "failed only with MXNet's own",
    "failed with both",
    "skipped",
)


def compare(run: Run, own: Outcomes) -> FileResult:
    """Do `run`, also with MXNet's own Convolution for tests missing in `own`, which it extends."""
    ours = run.outcomes("ours")
    missing = {test for test in ours if test not in own}
    if missing:
        # A file that ended before its tests names none.
        tests = missing if all(map(_is_test, missing)) else None
        own.update(run.outcomes("own", tests))
    not_run = Outcome("failed", "was not run")
    return FileResult(
        {test: own.get(test, not_run if _is_test(test) else Outcome("passed")) for test in ours},
        ours,
    )


def _is_test(name: str) -> bool:
    """Tell whether it is a test's name, not a pseudo-test of `read_events`."""
    return "::" in name and "::(" not in name


def document(results: dict[str, FileResult]) -> dict[str, dict[str, dict[str, str]]]:
    """Return a document for JSON: the verdict on each test by file, and the errors of failed
    ones."""
    content: dict[str, dict[str, dict[str, str]]] = {}
    for file, result in results.items():
        for test in result.ours:
            errors = {"own": result.own[test].error, "ours": result.ours[test].error}
            about = {who: error for who, error in errors.items() if error}
            found = {"verdict": result.verdict(test), **about}
            content.setdefault(file, {})[test] = found
    return content


def table(results: dict[str, FileResult]) -> str:
    """Return a table with a row for each file, then every test that failed with only one
    Convolution, and calls that ours refused."""
    columns = ["file", "tests", "with ours", *VERDICTS, "calls of ours", "calls of MXNet's own"]
    rows = [_row(file, [result]) for file, result in results.items()]
    rows.append(_row("all", list(results.values())))
    lines = [markdown.table(columns, rows)]
    for verdict in VERDICTS[1:4]:
        lines += _details(verdict, results)
    reasons: Counter[str] = Counter()
    for result in results.values():
        reasons.update(result.calls())
    del reasons["ours"]
    lines += ["", "Calls that went to MXNet's own:", ""] if reasons else []
    lines += [f"- {count}: {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def _row(name: str, results: list[FileResult]) -> list[object]:
    verdicts: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    touched = 0
    for result in results:
        verdicts.update(map(result.verdict, result.ours))
        calls.update(result.calls())
        touched += sum("ours" in outcome.calls for outcome in result.ours.values())
    numbers = [
        sum(verdicts.values()),
        touched,
        *(verdicts[verdict] for verdict in VERDICTS),
        calls["ours"],
        sum(calls.values()) - calls["ours"],
    ]
    return [name, *numbers]


def _details(verdict: str, results: dict[str, FileResult]) -> list[str]:
    lines = [
        f"- {test}: {(result.own if verdict.endswith('own') else result.ours)[test].error}"
        for result in results.values()
        for test in result.ours
        if result.verdict(test) == verdict
    ]
    return ["", f"{verdict[0].upper()}{verdict[1:]}:", "", *lines] if lines else []


def load(path: Path) -> Outcomes:
    """Load outcomes that `save` wrote; none without the file."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {test: Outcome(**outcome) for test, outcome in found.items()}


def save(path: Path, outcomes: Outcomes) -> None:
    """Write outcomes as JSON."""
    content = {test: asdict(outcome) for test, outcome in sorted(outcomes.items())}
    write_text(path, json.dumps(content, indent=1) + "\n")


def summary(file: str, result: FileResult) -> str:
    """Summarise a file's tests in one line."""
    verdicts = Counter(map(result.verdict, result.ours))
    return f"{file}: " + ", ".join(
        f"{verdicts[each]} {each}" for each in VERDICTS if verdicts[each]
    )
