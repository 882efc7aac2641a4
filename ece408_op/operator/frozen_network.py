"""`to_cpu` and `to_gpu`: inference of a network without MXNet's engine."""

from __future__ import annotations

import json
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np

from .. import errors, settings
from ..errors import CheckpointMismatch, InvalidProblem, InvalidSetting, UnsupportedProblem
from . import compiled_operator, networks
from .graphs import graph_json, partition
from .graphs.cached_ops import CompiledOp
from .graphs.partition import Choice
from .loading import load_mxnet

# Operators whose second input is unused in inference.
_WITH_LABELS = ("SoftmaxOutput", "LinearRegressionOutput", "LogisticRegressionOutput")
# Maximum number of input sizes whose output shapes are kept.
_MOST_SHAPES = 64


def to_gpu(
    model: Any,
    arg_params: Mapping[str, Any] | None = None,
    aux_params: Mapping[str, Any] | None = None,
) -> FrozenNetwork:
    """Return a callable network for inference on the GPU.

    `model` is a Gluon HybridBlock, or a Symbol with the NDArrays of its parameters, as
    `load_checkpoint` returns them. It is not changed and keeps its parameters: later writes to
    them, and replacements, take effect. Call the result as the model, with CPU arrays of float32
    or, if the first layer takes pixels, of uint8; for a Symbol in the order of its inputs, without
    labels. Calls are synchronous. Under `autograd.record()` and in training mode a block runs as if
    it were not on the GPU.

    Parts that cannot run on the GPU run in MXNet on the CPU; `report` of the result lists them. On
    a machine without a usable GPU everything runs there, and stderr says why.

    Raises `InvalidSetting` for another kind of model, `CheckpointMismatch` for a missing parameter
    of a Symbol. Calls raise the errors of computing on the GPU.
    """
    return FrozenNetwork(_source(model, arg_params, aux_params), "gpu")


def to_cpu(
    model: Any,
    arg_params: Mapping[str, Any] | None = None,
    aux_params: Mapping[str, Any] | None = None,
) -> FrozenNetwork:
    """Return a callable network for inference on the CPU, computed by one call of this package's
    kernels where MXNet would run a node at a time.

    Arguments, calls and the result are as for `to_gpu`: the model is not changed, later writes to
    its parameters take effect, and parts that cannot be computed so run in MXNet; `report` lists
    them. Float64 networks and calls with gradients run in MXNet.

    Raises what `to_gpu` does.
    """
    return FrozenNetwork(_source(model, arg_params, aux_params), "cpu")


def _source(
    model: Any, arg_params: Mapping[str, Any] | None, aux_params: Mapping[str, Any] | None
) -> _Source:
    mx = load_mxnet()
    if isinstance(model, mx.gluon.HybridBlock):
        return _OfBlock(mx, model)
    if isinstance(model, mx.sym.Symbol):
        return _OfSymbol(mx, model, arg_params or {}, aux_params or {})
    raise InvalidSetting(
        f"a {type(model).__name__} cannot be taken to the CPU or the GPU; give a Gluon "
        "HybridBlock, or a Symbol with its parameters"
    )


def gpu_report(symbol: Any, training: bool = False, **shapes: tuple[int, ...]) -> GpuReport:
    """Report which parts of a Symbol would run on a GPU, in inference or in `training`, and, given
    the shapes of its inputs, how much a forward pass copies beside parameters.

    Needs no GPU.
    """
    return GpuReport.of(partition.choose(symbol, shapes=shapes, trains=training), shapes, {})


# What a report says of our parts, and of MXNet's.
_PLACES = {"gpu": ("on the GPU", "on the CPU"), "cpu": ("by ece408_op", "by MXNet")}
# What it says on the CPU of nodes that are not worth copies to a GPU.
_OF_COPIES = (partition.ONLY_FOR_CPU, partition.TOO_LITTLE)
_NO_GAIN = "MXNet takes no longer for it"


@dataclass
class GpuReport:
    """Report on what runs on the GPU, or what this package computes if it is `on` the CPU: the
    number of nodes of each part, and of the network; the nodes that MXNet runs on the CPU, with
    reasons; and, if the shapes of the inputs are known, the bytes copied in and out per call."""

    parts: list[int]
    nodes: int
    left: dict[str, str] = field(default_factory=dict)
    bytes_in: int | None = None
    bytes_out: int | None = None
    on: str = "gpu"

    @classmethod
    def of(
        cls, choice: Choice, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, Any]
    ) -> GpuReport:
        """Report on a choice, with these shapes and types of its inputs by name, if known."""
        nodes = sum(node["op"] != "null" for node in choice.graph["nodes"])
        left = choice.left
        if choice.on == "cpu":
            left = {n: _NO_GAIN if reason in _OF_COPIES else reason for n, reason in left.items()}
        copied = partition.copied_bytes(choice, shapes, types) if shapes else (None, None)
        return cls(list(map(len, choice.groups)), nodes, left, *copied, choice.on)

    def __str__(self) -> str:
        counts = ", ".join(map(str, self.parts)) or "none"
        ours, others = _PLACES[self.on]
        lines = [f"{ours}: {sum(self.parts)} of {self.nodes} nodes, in parts of: {counts}"]
        lines += [f"{others}: {name}: {reason}" for name, reason in self.left.items()]
        if self.on == "gpu" and self.bytes_in is not None and self.bytes_out is not None:
            lines.append(f"a call copies {self.bytes_in} bytes in and {self.bytes_out} bytes out")
        return "\n".join(lines)


class FrozenNetwork:
    """A network on the "cpu" or the "gpu", created by `to_cpu` or `to_gpu`."""

    def __init__(self, source: _Source, on: str) -> None:
        self._source = source
        self._on = on
        self._lock = threading.Lock()
        self._made: _Made | None = None
        # The settings under which a GPU was found.
        self._usable: tuple[str | None, ...] = ()

    def __call__(self, *arrays: Any) -> Any:
        """Return the network's result for these arrays."""
        return self._source.called(arrays, self._computed)

    def _computed(self, arrays: Sequence[Any]) -> Any:
        from mxnet import autograd

        flat = self._source.flat(arrays)
        wants_gradients = autograd.is_recording() or autograd.is_training()
        if wants_gradients:
            return self._source.run(arrays)
        reason = self._why_not() or networks.why_not_of(flat)
        if reason is not None:
            networks.say_why_no_gpu(reason)
            return self._source.run(_as_floats(arrays))
        with self._lock:
            made = self._made
            if made is None or not self._source.is_as(made.traced):
                made = _Made(self._source.trace(_stand_ins(arrays)), flat, self._on)
            elif not made.fits(flat):
                made = _Made(made.traced, flat, self._on)
            self._made = made
        try:
            outputs = made.run(flat)
        except (UnsupportedProblem, InvalidProblem, load_mxnet().MXNetError):
            if made.is_chosen_for(flat):
                raise
            with self._lock:
                made = self._made = _Made(made.traced, flat, self._on)
            outputs = made.run(flat)
        return self._source.grouped(outputs)

    def _why_not(self) -> str | None:
        """Return why MXNet runs the network; cached, as finding a GPU takes long."""
        if self._on == "cpu":
            return compiled_operator.missing()
        backend = settings.backend()
        if (backend,) == self._usable:
            return None
        reason = networks.why_no_gpu()
        self._usable = (backend,) if reason is None else ()
        return reason

    @property
    def report(self) -> GpuReport:
        """Report which parts of the network this package computes, and how much the last call
        copied to and from a GPU.

        Raises `InvalidSetting` before the first call, which determines the network's shapes.
        """
        if self._made is None:
            raise InvalidSetting(
                f"the network has not run on the {self._on.upper()} yet; call it first"
            )
        return self._made.report


class _Made:
    """A network in executable form, of parts of one node each. If it is one part, most calls do
    without MXNet's engine."""

    def __init__(self, traced: _Traced, data: list[Any], on: str) -> None:
        from mxnet import nd

        self.traced = traced
        self._sizes: dict[Any, _Sizes] = {}
        sizes = self._last = self._sizes_of(data)
        self._names = traced.symbol.list_inputs()
        # The inputs of a call without data and labels, and the places of these.
        self._parameters = [traced.parameters.get(name) for name in self._names]
        others = ((n, name) for n, name in enumerate(self._names) if name not in traced.parameters)
        self._places = list(others)
        given = self._given(data, sizes)
        named, of_calls = dict(zip(self._names, given)), {*traced.data, *traced.labels}
        self._chosen_for = _key(data)
        # A layer that takes pixels is chosen as one of float32.
        typed = {**named, **dict(zip(traced.data, _stand_ins(data)))}
        self._choice = partition.choose_for(traced.symbol, typed, of_calls, on=on)
        symbol, self._parts = partition.in_parts(self._choice, named, sys.maxsize)
        symbol = self._choice.original if symbol is None else symbol
        self._op = CompiledOp(nd.CachedOp, symbol, self._names, of_calls, [], self._parts)
        self._op.hold(given)

    def fits(self, data: list[Any]) -> bool:
        """Return whether it can compute arrays of these shapes and types, as far as is known.
        Choosing takes longer than computing most networks."""
        key = _key(data)
        if self._choice.is_for_sizes:
            return key == self._chosen_for
        return key in self._sizes or _kinds(key) == _kinds(self._chosen_for)

    def is_chosen_for(self, data: list[Any]) -> bool:
        """Return whether another partition would not help arrays that `run` refuses."""
        return _key(data) == self._chosen_for

    @property
    def report(self) -> GpuReport:
        return GpuReport.of(self._choice, self._last.inputs, self._last.types)

    def run(self, data: list[Any]) -> list[Any]:
        """Return the outputs for these arrays."""
        if self._parts is None or not self._parts.takes_pixels:
            data = _as_floats(data)
        sizes = self._last = self._sizes_of(data)
        given = self._given(data, sizes)
        outputs = self._op.directly(given)
        if outputs is None:
            with errors.surfaced():
                outputs = self._op.call(*given)
                for each in outputs if isinstance(outputs, list) else [outputs]:
                    each.wait_to_read()
        return outputs if isinstance(outputs, list) else [outputs]

    def _given(self, data: list[Any], sizes: _Sizes) -> list[Any]:
        """Return the arrays of all inputs in order."""
        from mxnet import nd

        named = dict(zip(self.traced.data, data))
        named.update((name, nd.zeros(sizes.inputs[name])) for name in self.traced.labels)
        given = self._parameters.copy()
        for place, name in self._places:
            given[place] = named[name]
        return given

    def _sizes_of(self, data: list[Any]) -> _Sizes:
        """Return the shapes and types of all inputs for these arrays."""
        key = _key(data)
        found = self._sizes.get(key)
        if found is None:
            if len(self._sizes) >= _MOST_SHAPES:
                self._sizes.clear()
            found = self._sizes[key] = _sizes(self.traced, data)
        return found


def _key(data: list[Any]) -> tuple[Any, ...]:
    return tuple((array.shape, array.dtype) for array in data)


def _kinds(key: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the numbers of axes and the types of the arrays of a `_key`, and for each the first
    one with as many rows."""
    rows = [shape[:1] for shape, _ in key]
    return [(len(shape), dtype, rows.index(shape[:1])) for shape, dtype in key]


@dataclass(frozen=True)
class _Sizes:
    """Shapes of the inputs other than parameters, and types of all inputs, by name."""

    inputs: dict[str, tuple[int, ...]]
    types: dict[str, Any]


def _sizes(traced: _Traced, data: list[Any]) -> _Sizes:
    if len(data) != len(traced.data):
        raise InvalidProblem(
            f"the network takes {len(traced.data)} arrays ({', '.join(traced.data)}), and is "
            f"called with {len(data)}"
        )
    symbol = traced.symbol
    shapes = {name: array.shape for name, array in zip(traced.data, data)}
    types = {name: array.dtype for name, array in zip(traced.data, data)}
    for name, array in traced.parameters.items():
        shapes[name], types[name] = array.shape, array.dtype
    arguments = set(symbol.list_arguments())
    # Unlike `infer_shape` this prints nothing.
    found, outputs, _ = symbol.infer_shape_partial(
        **{name: shape for name, shape in shapes.items() if name in arguments}
    )
    if not all(0 not in shape and shape for shape in outputs):
        raise InvalidProblem(
            f"arrays of {sorted(shapes.items())} leave the shapes of the network's outputs open"
        )
    shapes.update(zip(symbol.list_arguments(), found))
    inputs = {name: tuple(shapes[name]) for name in (*traced.data, *traced.labels)}
    return _Sizes(inputs, types)


def _as_floats(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays with pixels converted as MXNet's layers expect."""
    return [array.astype(np.float32) if _is_pixels(array) else array for array in arrays]


def _stand_ins(arrays: Sequence[Any]) -> list[Any]:
    """Return arrays with the shapes and types of `_as_floats`, without converting pixels."""
    import mxnet as mx

    def stand_in(array: Any) -> Any:
        empty = mx.nd.empty(array.shape, ctx=array.context)
        return empty.as_np_ndarray() if isinstance(array, mx.np.ndarray) else empty

    return [stand_in(array) if _is_pixels(array) else array for array in arrays]


def _is_pixels(array: Any) -> bool:
    return getattr(array, "dtype", None) == np.uint8


@dataclass
class _Traced:
    """A network as a Symbol, the names of its call arguments in order, the names of missing inputs,
    and its parameters' arrays by name."""

    symbol: Any
    data: list[str]
    labels: list[str]
    parameters: dict[str, Any]


class _Source(ABC):
    """A model as the user holds it."""

    mx: Any

    @abstractmethod
    def trace(self, arrays: Sequence[Any]) -> _Traced:
        """Return the network, traced on these arrays if necessary."""

    @abstractmethod
    def is_as(self, traced: _Traced) -> bool:
        """Return whether the network and the arrays of its parameters are unchanged."""

    @abstractmethod
    def run(self, arrays: Sequence[Any]) -> Any:
        """Run the original model."""

    def called(self, arrays: Sequence[Any], compute: Callable[[Sequence[Any]], Any]) -> Any:
        """Call the model with `compute` in place of its computation."""
        return compute(arrays)

    def flat(self, arrays: Sequence[Any]) -> list[Any]:
        return list(arrays)

    def grouped(self, outputs: list[Any]) -> Any:
        return outputs[0] if len(outputs) == 1 else outputs


class _OfBlock(_Source):
    def __init__(self, mx: Any, block: Any) -> None:
        self.mx = mx
        self._block = block
        self._is_of_symbol = isinstance(block, mx.gluon.SymbolBlock)
        self._graph: Any = None
        # Parameters with their lists of arrays, and the first array of each.
        self._lists: list[tuple[Any, Any, Any]] = []

    def called(self, arrays: Sequence[Any], compute: Callable[[Sequence[Any]], Any]) -> Any:
        """Call the block's own `__call__` on a twin of the block whose `forward` computes: hooks
        must run, and classes such as RNN layers add or omit arguments."""
        block = self._block
        twin = object.__new__(type(block))
        before = dict(vars(block))
        vars(twin).update(before)

        def forward(*given: Any) -> Any:
            # Attributes set meanwhile may be for `hybrid_forward`.
            for name, value in vars(twin).items():
                if name != "forward" and (name not in before or before[name] is not value):
                    vars(block)[name] = value
            self._forget_others(given)
            return compute(given)

        vars(twin)["forward"] = forward
        return twin(*arrays)

    def _forget_others(self, given: Sequence[Any]) -> None:
        """Drop the block's graph if it is for other arguments; a hybridized block refuses such a
        call."""
        block = self._block
        if block._cached_graph and not block._active and not self._is_of_symbol:
            _, form = self.mx.gluon.block._flatten(given, "input")
            if form != block._in_format:
                block._clear_cached_op()

    def flat(self, arrays: Sequence[Any]) -> list[Any]:
        flat, _ = self.mx.gluon.block._flatten(list(arrays), "input")
        return [array for array in flat if array is not None]

    def grouped(self, outputs: list[Any]) -> Any:
        return self.mx.gluon.block._regroup(outputs, self._block._out_format)

    def trace(self, arrays: Sequence[Any]) -> _Traced:
        block = self._block
        data, symbol = block._get_graph(*arrays)
        self._graph = block._cached_graph
        symbol = graph_json.unmarked(symbol)
        parameters = block.collect_params()
        names = [name for name in symbol.list_inputs() if name in parameters]
        try:
            found = {name: parameters[name].data() for name in names}
        except self.mx.gluon.parameter.DeferredInitializationError:
            block._deferred_infer_shape(*arrays)
            for name in names:
                parameters[name]._finish_deferred_init()
            found = {name: parameters[name].data() for name in names}
        lists = ((parameters[name], parameters[name]._data) for name in names)
        self._lists = [(parameter, arrays, arrays[0]) for parameter, arrays in lists]
        return _Traced(symbol, [each.name for each in data], [], found)

    def is_as(self, traced: _Traced) -> bool:
        if self._block._cached_graph is not self._graph:
            return False
        return all(
            parameter._data is arrays and arrays[0] is first
            for parameter, arrays, first in self._lists
        )

    def run(self, arrays: Sequence[Any]) -> Any:
        return self._block.forward(*arrays)


class _OfSymbol(_Source):
    def __init__(self, mx: Any, symbol: Any, *parameters: Mapping[str, Any]) -> None:
        self.mx = mx
        self._symbol = graph_json.unmarked(symbol)
        # The user's own dicts, read at each call.
        self._parameters = parameters
        self._traced: _Traced | None = None

    def trace(self, arrays: Sequence[Any]) -> _Traced:
        symbol = self._symbol
        inputs = symbol.list_inputs()
        parameters = {n: params[n] for params in self._parameters for n in inputs if n in params}
        labels = _labels(symbol)
        data = [name for name in inputs if name not in parameters and name not in labels]
        if len(data) != len(arrays):
            raise CheckpointMismatch(
                f"the network is called with {len(arrays)} arrays, and these of its inputs are not "
                f"among the parameters: {', '.join(data) or 'none'}"
            )
        return _Traced(symbol, data, labels, parameters)

    def is_as(self, traced: _Traced) -> bool:
        return all(
            any(params.get(name) is array for params in self._parameters)
            for name, array in traced.parameters.items()
        )

    def run(self, arrays: Sequence[Any]) -> Any:
        nd, traced = self.mx.nd, self._traced
        if traced is None or not self.is_as(traced):
            traced = self._traced = self.trace(arrays)
            self._names = traced.symbol.list_inputs()
            data = [*traced.data, *traced.labels]
            self._op = CompiledOp(nd.CachedOp, traced.symbol, self._names, data, [], None)
        sizes = _sizes(traced, list(arrays))
        labels = {name: nd.zeros(sizes.inputs[name]) for name in traced.labels}
        given = {**traced.parameters, **dict(zip(traced.data, arrays)), **labels}
        outputs = self._op.call(*(given[name] for name in self._names))
        return self.grouped(outputs if isinstance(outputs, list) else [outputs])


def _labels(symbol: Any) -> list[str]:
    """Return the names of the variables that only a loss reads, as its label."""
    nodes = json.loads(graph_json.text(symbol))["nodes"]
    labels: set[int] = set()
    others: set[int] = set()
    for node in nodes:
        for place, entry in enumerate(node["inputs"]):
            is_label = place == 1 and node["op"] in _WITH_LABELS
            (labels if is_label else others).add(entry[0])
    return [nodes[n]["name"] for n in sorted(labels - others) if nodes[n]["op"] == "null"]
