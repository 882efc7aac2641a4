"""Deployed networks with random weights by `to_gpu` in the emulator, beside MXNet on the CPU."""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ece408_op import errors
from ece408_op.files import markdown
from ece408_op.operator.array_memory import make_plain
from ece408_op.operator.gpu_network import to_gpu
from ece408_op.operator.loading import load_mxnet

# What outputs may differ from MXNet's, of the largest value; and a network that amplifies rounding
# may have as many times MXNet's own error beside float64, as far as that is small.
TOLERANCE = 1e-5
TIMES_STOCK = 2
MOST_OF_STOCK = 1e-4
# Operators that put values in order, so that rounding can change which one comes first.
_ORDER = ("box_nms", "topk", "argsort", "argmax", "sort", "MultiBoxDetection", "Proposal")
Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """A network: `build` gives a HybridBlock or a Symbol; `inputs` are shapes, or arrays, by name,
    in the order of the call."""

    kind: str
    build: Callable[[], Any]
    inputs: Inputs
    needs: str | None = None


CASES: dict[str, Case] = {}


def network(kind: str, **inputs: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a builder under its name."""

    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES[build.__name__] = Case(kind, build, inputs)
        return build

    return register


class _Model:
    """A network as a Symbol with the values of its inputs, and of its parameters."""

    def __init__(self, case: Case) -> None:
        self._mx = load_mxnet()
        self._mx.random.seed(408)
        rng = np.random.default_rng(408)
        self.inputs = {name: self._input(value, rng) for name, value in case.inputs.items()}
        self._model = case.build()
        self._parameters: dict[str, Any] = {}
        is_symbol = isinstance(self._model, self._mx.sym.Symbol)
        self.symbol = self._model if is_symbol else self._traced(self._model)
        arguments, _, states = self.symbol.infer_shape(
            **{name: array.shape for name, array in self.inputs.items()}
        )
        self.states = self.symbol.list_auxiliary_states()
        names = [*self.symbol.list_arguments(), *self.states]
        self.arrays = {
            name: self.inputs.get(name, self._value(name, shape, rng))
            for name, shape in zip(names, [*arguments, *states])
        }
        self._calibrate()

    def _input(self, value: Any, rng: np.random.Generator) -> Any:
        drawn = rng.uniform(-1, 1, value) if isinstance(value, tuple) else value
        dtype = getattr(value, "dtype", np.float64)
        return self._mx.nd.array(drawn, dtype=np.float32 if dtype == np.float64 else dtype)

    def _traced(self, block: Any) -> Any:
        block.initialize()
        # Shapes that are not known before the first pass are then known.
        block(*self.inputs.values())
        self._parameters = {each.name: each for each in block.collect_params().values()}
        flat = self._flat(block(*map(self._mx.sym.Variable, self.inputs)))
        return self._mx.sym.Group(flat) if len(flat) > 1 else flat[0]

    def _flat(self, outputs: Any) -> list[Any]:
        flat, _ = self._mx.gluon.block._flatten(outputs, "output")
        return [each for each in flat if each is not None]

    def _value(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
        parameter = self._parameters.get(name)
        if isinstance(parameter, self._mx.gluon.Constant):
            return parameter.data()
        if name.endswith("gamma"):
            drawn = rng.uniform(0.8, 1.2, shape)
        elif name.endswith("var"):
            drawn = rng.uniform(0.5, 1.5, shape)
        elif len(shape) < 2:
            drawn = rng.normal(0, 0.1, shape)
        else:
            drawn = rng.normal(0, math.sqrt(2 / math.prod(shape[1:])), shape)
        return self._mx.nd.array(drawn, dtype=np.float32)

    def _calibrate(self) -> None:
        """Scale each BatchNorm's variances by what it is given in inference, in the order of the
        pass, which keeps values near 1 in deep networks. Not those of each channel, nor means: with
        random weights channels and images become alike, and what sets them apart is rounding."""
        nodes = json.loads(self.symbol.tojson())["nodes"]
        norms = {
            f"{node['name']}_data".encode(): node for node in nodes if node["op"] == "BatchNorm"
        }

        def seen(name: bytes, address: int) -> None:
            handle = ctypes.cast(address, self._mx.base.NDArrayHandle)
            given = self._mx.nd.NDArray(handle, writable=False)
            if name in norms:
                var = self.arrays[nodes[norms[name]["inputs"][4][0]]["name"]]
                var *= given.square().mean()

        if norms:
            executor = self._bound(self.symbol, np.float32)
            executor.set_monitor_callback(seen, monitor_all=True)
            executor.forward(is_train=False)

    def _bound(self, symbol: Any, dtype: Any) -> Any:
        def cast(name: str) -> Any:
            array = self.arrays[name]
            return array.astype(dtype, copy=False) if array.dtype == np.float32 else array

        arguments = {name: cast(name) for name in symbol.list_arguments()}
        states = {name: cast(name) for name in symbol.list_auxiliary_states()}
        return symbol.bind(self._mx.cpu(), arguments, aux_states=states, grad_req="null")

    def stock(self, dtype: Any = np.float32) -> list[np.ndarray]:
        """What MXNet gives."""
        symbol = self.symbol
        if dtype != np.float32:
            text = symbol.tojson().replace('"dtype": "float32"', '"dtype": "float64"')
            symbol = self._mx.sym.load_json(text)
        outputs = self._bound(symbol, dtype).forward(is_train=False)
        return [each.asnumpy() for each in outputs]

    def ours(self) -> tuple[list[np.ndarray], Any]:
        """What `to_gpu` gives, and its report, `None` where nothing went to the GPU."""
        others = {n: a for n, a in self.arrays.items() if n not in self.inputs}
        # MXNet cannot write to weights that convolutions in three dimensions have been run with.
        make_plain([each.data() for each in self._parameters.values()])
        for name, parameter in self._parameters.items():
            if name in others:
                parameter.set_data(others[name])
        if self._parameters:
            made = to_gpu(self._model)
        else:
            states = {name: others[name] for name in self.states}
            made = to_gpu(self.symbol, others, states)
        order = self.inputs if self._parameters else self.symbol.list_inputs()
        given = [self.inputs[name] for name in order if name in self.inputs]
        outputs = [each.asnumpy() for each in self._flat(made(*given))]
        try:
            return outputs, made.report
        except errors.InvalidSetting:
            return outputs, None


def _error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest of all outputs' |found - expected| max / |expected| max; infinite where one is
    not a number."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return math.inf
    worst = 0.0
    for a, b in zip(found, expected):
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
        scale = float(np.abs(b.astype(np.float64)).max()) or 1.0
        worst = max(worst, float(difference) / scale if np.isfinite(difference) else math.inf)
    return worst


def _sorted(outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Each output with the values along axis 1 in order, so that ties are alike."""
    return [np.sort(each, axis=min(1, each.ndim - 1)) for each in outputs]


def examine(name: str) -> dict[str, Any]:
    """Run one network with MXNet and with ours."""
    model = _Model(CASES[name])
    nodes = [node["op"] for node in json.loads(model.symbol.tojson())["nodes"]]
    start = time.perf_counter()
    expected = model.stock()
    stock_seconds = time.perf_counter() - start
    start = time.perf_counter()
    found, report = model.ours()
    row: dict[str, Any] = {
        "seconds": time.perf_counter() - start,
        "stock_seconds": stock_seconds,
        "nodes": sum(op != "null" for op in nodes),
        "parts": report.parts if report else [],
        "left": dict(Counter(report.left.values())) if report else {},
        "outputs": len(expected),
        "error": _error(found, expected),
    }
    row["right"] = row["error"] <= TOLERANCE
    if not row["right"]:
        _explain(row, model, found, expected, any(word in op for op in nodes for word in _ORDER))
    return row


def _explain(
    row: dict[str, Any],
    model: _Model,
    found: list[np.ndarray],
    expected: list[np.ndarray],
    puts_in_order: bool,
) -> None:
    """Judge outputs that differ: by ties, and by MXNet's own error beside float64."""
    if puts_in_order and _error(_sorted(found), _sorted(expected)) <= TOLERANCE:
        row.update(right=True, ties=True)
        return
    try:
        exact = model.stock(np.float64)
    except model._mx.MXNetError:  # some operators take float32 only
        return
    row["stock_error64"], row["error64"] = _error(expected, exact), _error(found, exact)
    allowed = TIMES_STOCK * row["stock_error64"] + TOLERANCE
    row["right"] = row["stock_error64"] <= MOST_OF_STOCK and row["error64"] <= allowed


def run(script: str, name: str, limit: float) -> dict[str, Any]:
    """`examine` in a process of its own, which may end as it likes."""
    variables = {"ECE408_BACKEND": "emulator", "MXNET_SUBGRAPH_BACKEND": "NONE"}
    command = [sys.executable, script, "--examine", name]
    row: dict[str, Any] = {"name": name, "kind": CASES[name].kind, "right": False}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, env={**os.environ, **variables}
        )
    except subprocess.TimeoutExpired:
        return {**row, "failure": f"not done in {limit:g} s"}
    if done.returncode == 0:
        return {**row, **json.loads(done.stdout.splitlines()[-1])}
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return {**row, "failure": said[-1] if said else f"ended with status {done.returncode}"}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each network."""
    right = sum(row["right"] for row in rows)
    head = ["network", "kind", "nodes", 'on the "GPU"', "parts", "relative error", "right"]
    head += ["s", "remark"]
    cells = [
        [
            *(row["name"], row["kind"], row.get("nodes", ""), sum(row.get("parts", []))),
            *(len(row.get("parts", [])), f"{row['error']:.1e}" if "error" in row else ""),
            *("yes" if row["right"] else "NO", f"{row['seconds']:.1f}" if "seconds" in row else ""),
            _remark(row),
        ]
        for row in rows
    ]
    return (
        f"{right} of {len(rows)} networks are right: no output differs from MXNet's by more than "
        f"{TOLERANCE:g} of its largest value, or, as the remark says, it has the same values in "
        "another order, or ours has beside MXNet's float64 at most "
        f"{TIMES_STOCK} times MXNet's float32 error and {TOLERANCE:g}. Weights are random. "
        f"Seconds are those of the first call, which compiles.\n\n{markdown.table(head, cells)}"
    )


def _remark(row: Mapping[str, Any]) -> str:
    if "failure" in row:
        return str(row["failure"])[:200].replace("|", "/")
    if row.get("ties"):
        return "the same values in another order"
    if "error64" in row:
        return f"beside float64: ours {row['error64']:.1e}, MXNet's {row['stock_error64']:.1e}"
    return ""
