"""MXNet's model zoo before and after `swap`: every layer, every way to run it."""

import contextlib
import ctypes
import os
import time
from unittest import mock

import busy
import numpy as np
import pytest
from cases import first
from studies import zoo

import ece408_op
from ece408_op import dispatch, settings
from ece408_op.backends import Backend
from ece408_op.backends.cpu.cpu_backend import CpuBackend
from ece408_op.errors import surfaced
from ece408_op.op_log import op_times
from ece408_op.operator import parts_at_work
from ece408_op.operator.loading import load_mxnet
from ece408_op.operator.swapping import swap, swap_symbol

LIMIT = 1e-4
# Enough kinds of layers for every run; the others take minutes.
QUICK = "squeezenet1.0"
NAMES = first(1, [QUICK, *(name for name in zoo.NETWORKS if name != QUICK)])


def _layer_errors(symbol, swapped, layers, params, x):
    """Return `zoo.error` of swapping for each swapped layer by name, and for the network's
    "output".

    Both networks run as a whole, so errors accumulate from layer to layer.
    """
    expected = _outputs(symbol, layers, params, x)
    with surfaced():
        found = _outputs(swapped, layers, params, x)
    return {name: zoo.error(found[name], expected[name]) for name in expected}


def _outputs(symbol, layers, params, x):
    mx = load_mxnet()
    internals = symbol.get_internals()
    group = mx.sym.Group([*(internals[f"{name}_output"] for name in layers), symbol])
    arguments, states = group.list_arguments(), group.list_auxiliary_states()
    # MXNet's fusion of layers gives wrong values for an inner output that is also requested.
    with _environment(mx, "MXNET_SUBGRAPH_BACKEND", "NONE"):
        executor = group.bind(
            mx.cpu(),
            {name: x if name == "data" else params[name] for name in arguments},
            aux_states={name: params[name] for name in states},
        )
    executor.forward(is_train=False)
    return {name: y.asnumpy() for name, y in zip([*layers, "output"], executor.outputs)}


@contextlib.contextmanager
def _environment(mx, variable, value):
    """Set an environment variable for a `with` block; no operator runs as it changes, since
    operators read the environment."""
    mx.nd.waitall()
    with mock.patch.dict(os.environ, {variable: value}):
        yield
        mx.nd.waitall()


@pytest.mark.parametrize("name", NAMES)
def test_a_network_of_the_zoo(mx, name):
    net, x = zoo.build(name)
    symbol = net(mx.sym.Variable("data"))
    params = {p.name: p.data() for p in net.collect_params().values()}
    swapped, report = swap_symbol(symbol)
    assert not report.left
    errors = _layer_errors(symbol, swapped, report.swapped, params, x)
    assert set(errors) == {*report.swapped, "output"}
    assert max(errors.values()) <= LIMIT
    expected = net(x).asnumpy()
    ours, _ = zoo.build(name)
    swap(ours)
    for active in (False, True):
        ours.hybridize(active)
        with surfaced(), op_times() as log:
            assert zoo.error(ours(x).asnumpy(), expected) <= LIMIT
        assert len(log) == len(report.swapped) > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_network_of_the_zoo_exported(mx, name, tmp_path):
    net, x = zoo.build(name)
    expected = net(x).asnumpy()
    assert 0.5 < np.abs(expected).max() < 2
    ece408_op.swap(net)
    net.hybridize()
    with surfaced():
        net(x).wait_to_read()
        net.export(str(tmp_path / "net"))
        block = mx.gluon.SymbolBlock.imports(
            str(tmp_path / "net-symbol.json"), ["data"], str(tmp_path / "net-0000.params")
        )
        assert zoo.error(block(x).asnumpy(), expected) <= LIMIT


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_busy_processes_end_with_the_measurement(monkeypatch):
    started = []
    popen = busy.subprocess.Popen

    def start(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    def measure():
        with busy.busy_processes(2):
            assert len(started) == 2
            assert all(_is_alive(process.pid) for process in started)
            raise KeyboardInterrupt

    monkeypatch.setattr(busy.subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        measure()
    assert [process.returncode for process in started] == [-9, -9]


def test_busy_processes_end_with_who_started_them(run_python):
    code = """
import os, signal
import busy
with busy.busy_processes(2):
    print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    children = run_python(code).stdout.split()
    assert len(children) == 2
    for _ in range(600):
        if not any(_is_alive(pid) for pid in children):
            return
        time.sleep(0.1)
    raise AssertionError(f"{children} go on")


def test_one_corrupted_layer_is_found(mx, monkeypatch):
    """The comparison itself: an error in one layer must be detected."""
    net, x = zoo.build("squeezenet1.0")
    symbol = net(mx.sym.Variable("data"))
    params = {p.name: p.data() for p in net.collect_params().values()}
    swapped, report = swap_symbol(symbol)
    spoilt = report.swapped[7]
    forward = dispatch.forward

    def corrupted(problem, layer, x, w, bias, y, accumulate):
        forward(problem, layer, x, w, bias, y, accumulate)
        if layer.name == spoilt:
            first = (ctypes.c_float * 100).from_address(y)
            first[:] = [value + 0.01 for value in first]

    monkeypatch.setattr(dispatch, "forward", corrupted)
    # Without parts and compiled functions every call goes through `dispatch`.
    monkeypatch.setattr(parts_at_work, "mode", lambda: "")
    monkeypatch.setattr(CpuBackend, "native_function", Backend.native_function)
    with settings.override():
        found = _layer_errors(symbol, swapped, report.swapped, params, x)
    assert found[spoilt] > LIMIT
    assert all(found[name] <= LIMIT for name in report.swapped[:7])
