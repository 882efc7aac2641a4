"""Worker of `mxnet_tests`, which runs tests of MXNet's own, and is restarted after each crash.

mxnet_tests_worker.py TASK

TASK is a JSON file: the sources' folder, a test file in it, the tests to run, the tests already
run, and the file for events, a line of JSON each. With CONVOLUTION=ours in the environment this
package's Convolution replaces MXNet's. Otherwise the package is not imported, so that MXNet is
unmodified. Processes that a test spawns also import this module, with the same effect.
"""

import fnmatch
import functools
import importlib
import inspect
import json
import os
import re
import sys
import types
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest

calls: Counter = Counter()
"""Calls of Convolution since the last test: "ours", or the reason for MXNet's own."""


def provide_nose():
    """Make `import nose` work: provide the few functions that MXNet's tests use."""
    tools = types.ModuleType("nose.tools")
    case = unittest.TestCase()
    for name in dir(case):
        if name.startswith("assert") and "_" not in name:
            snake = re.sub("[A-Z]", lambda capital: f"_{capital.group().lower()}", name)
            setattr(tools, snake, getattr(case, name))
    vars(tools).update(
        ok_=case.assertTrue, eq_=case.assertEqual, make_decorator=functools.wraps, raises=_raises
    )
    nose = types.ModuleType("nose")
    vars(nose).update(tools=tools, SkipTest=unittest.SkipTest)
    sys.modules.update({"nose": nose, "nose.tools": tools})


def _raises(*errors):
    def decorate(test):
        @functools.wraps(test)
        def wrapped(*arguments, **keywords):
            with pytest.raises(errors):
                test(*arguments, **keywords)

        return wrapped

    return decorate


def prepare_mxnet():
    """Import MXNet, with the names that it expects of NumPy before 1.24 and Python before 3.12."""
    if sys.version_info >= (3, 12):
        importlib.import_module("setuptools")
    vars(numpy)["bool"] = bool
    return importlib.import_module("mxnet")


def provide_pretrained_networks():
    """Make `pretrained=True` work without a network: with random weights, in this folder."""
    mx = importlib.import_module("mxnet")
    vision = mx.gluon.model_zoo.vision

    def get_model_file(name, root=None):
        path = Path(f"{name}.params").resolve()
        if not path.exists():
            # Names that a test generates must not depend on this.
            with mx.name.NameManager():
                net = vision.get_model(name)
            net.initialize(mx.init.Xavier(magnitude=2))
            net(mx.nd.ones((1, 3, 224, 224)))
            net.save_parameters(str(path))
        return str(path)

    mx.gluon.model_zoo.model_store.get_model_file = get_model_file


def put_ours_in_place():
    """Replace MXNet's Convolution and its Gluon layers by this package's."""
    import ece408_op
    from ece408_op.operator import gluon_layers

    # Our layers inherit from MXNet's, and call Convolution themselves.
    layers = (gluon_layers.Conv1D, gluon_layers.Conv2D)
    in_place = {layer.__bases__[1]: _layer(layer) for layer in layers}
    gluon_layers.Convolution = _counted(ece408_op.Convolution)
    for module in [module for name, module in sys.modules.items() if name.startswith("mxnet.")]:
        for name, own in list(vars(module).items()):
            if name in ("Convolution", "convolution") and isinstance(own, types.FunctionType):
                setattr(module, name, _in_place_of(own, ece408_op.Convolution))
            # The module that defines a layer needs the original for its `super(Conv2D, self)`.
            elif isinstance(own, type) and own in in_place and own.__module__ != module.__name__:
                setattr(module, name, in_place[own])


def _in_place_of(own, ours):
    from ece408_op.errors import UnsupportedProblem

    @functools.wraps(own)
    def convolution(*arguments, **keywords):
        try:
            result = ours(*arguments, **keywords)
        except UnsupportedProblem as error:
            calls[str(error).split(";")[0]] += 1
            return own(*arguments, **keywords)
        calls["ours"] += 1
        return result

    return convolution


def _counted(ours):
    @functools.wraps(ours)
    def convolution(*arguments, **keywords):
        calls["ours"] += 1
        return ours(*arguments, **keywords)

    return convolution


def _layer(ours: Any) -> type:
    """Return our layer under the name of MXNet's; it makes MXNet's own for a layout that ours
    refuses."""
    own = ours.__bases__[1]
    layouts = inspect.signature(own)

    class Layer(ours):
        def __new__(cls, *arguments, **keywords):
            given = layouts.bind(*arguments, **keywords)
            given.apply_defaults()
            supported = given.arguments["layout"] in ("NCW", "NCHW")
            if cls is Layer and not supported:
                return own(*arguments, **keywords)
            return super().__new__(cls)

    Layer.__name__ = Layer.__qualname__ = ours.__name__
    return Layer


class Recorder:
    """A plugin of pytest's that selects the tests and writes their events."""

    def __init__(self, task):
        self._task = task
        self._events = Path(task["events"])

    def write(self, **event):
        with self._events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def pytest_collection_modifyitems(self, items):
        # common.py puts MXNet's Python sources first, which lack the library.
        installed = Path(str(sys.modules["mxnet"].__file__)).parents[1]
        sys.path[:] = [
            path for path in sys.path if Path(path) == installed or not Path(path, "mxnet").exists()
        ]
        items[:] = filter(self._is_wanted, items)

    def _is_wanted(self, item):
        names, tests = self._task["names"], self._task["tests"]
        return (
            item.nodeid not in self._task["done"]
            and (names is None or (item.cls or item.function).__name__ in names)
            and (tests is None or item.nodeid in tests)
            and fnmatch.fnmatchcase(item.name, self._task["only"])
        )

    def pytest_collectreport(self, report):
        if report.failed:
            self._write_outcome(report.nodeid, "failed", report.longreprtext, "", 0.0)

    def pytest_runtest_logstart(self, nodeid):
        calls.clear()
        self._seconds, self._outcome = 0.0, ("passed", "", "")
        self.write(started=nodeid)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        self._seconds += call.duration
        if report.failed:
            self._outcome = ("failed", _with_lost_text(report.longreprtext), _message(call))
        elif report.skipped:
            self._outcome = ("skipped", "", _message(call))

    def pytest_runtest_logfinish(self, nodeid):
        self._write_outcome(nodeid, *self._outcome, self._seconds)

    def _write_outcome(self, test, outcome, text, error, seconds):
        text = text[-6000:]
        self.write(
            test=test,
            outcome=outcome,
            error=error or _last_line(text),
            text=text,
            seconds=round(seconds, 2),
            calls=dict(calls),
        )


def _message(call):
    if call.excinfo is None:
        return ""
    lines = f"{call.excinfo.typename}: {call.excinfo.value}".strip().splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}"


def _last_line(text):
    return (text.strip().splitlines() or [""])[-1]


def _with_lost_text(text):
    """Append our error text that MXNet lost, if any."""
    errors = sys.modules.get("ece408_op.errors")
    failure = errors and errors.take_failure()
    return f"{text}\nthe operator's own error: {failure!r}" if failure else text


def main():
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    recorder = Recorder(task)
    test_file = str(Path(task["sources"], task["file"]))
    status = pytest.main(
        [
            "-q",
            "--capture=no",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            "--rootdir",
            task["sources"],
            test_file,
        ],
        plugins=[recorder],
    )
    recorder.write(finished=int(status))


if __name__ in ("__main__", "__mp_main__"):
    # The modules beside this file must not be importable by their bare names.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]
    provide_nose()
    if os.environ["CONVOLUTION"] == "ours":
        put_ours_in_place()
    else:
        prepare_mxnet()
    provide_pretrained_networks()
if __name__ == "__main__":
    main()
