"""Replacement of MXNet's Convolution by our operator in existing networks, and back."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Callable

from .. import dispatch
from ..errors import Ece408Error, InvalidSetting
from ..files.cachedir import atomic_path
from ..problem import check_precision
from . import checkpoint, gpu_support
from .conv_attributes import IGNORED, ConvAttributes
from .graphs import graph_json
from .graphs.graph_json import Graph, Node
from .loading import load_mxnet

_log = logging.getLogger("ece408_op")
# Other convolution operators, and why they stay.
_OTHER_OPERATORS = {
    "Convolution_v1": "it is the operator Convolution_v1",
    "_npx_convolution": "it is of MXNet's NumPy interface; swap the Gluon net before exporting it",
}


@dataclass
class SwapReport:
    """Result of `swap`: the swapped layers, and the skipped ones with reasons."""

    swapped: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"swapped {len(self.swapped)}: {', '.join(self.swapped) or 'nothing'}"]
        lines += [f"left {name}: {reason}" for name, reason in self.left.items()]
        return "\n".join(lines)


class _Choice:
    """The user's selection of layers, and the report on each."""

    def __init__(
        self, backend: str | None, only: str | Iterable[str] | None, precision: str | None
    ) -> None:
        if backend is not None:
            dispatch.check_name(backend)
        self.backend = backend
        self.precision = None if precision is None else check_precision(precision)
        self.report = SwapReport()
        self._patterns = [only] if isinstance(only, str) else None if only is None else list(only)

    def takes(self, name: str, attributes: dict[str, str]) -> bool:
        """Return whether to swap this layer; add it to the report either way."""
        if self._patterns is not None and not any(fnmatchcase(name, p) for p in self._patterns):
            self.leaves(name, "not among the requested layers")
            return False
        try:
            ConvAttributes.parse(attributes)
        except Ece408Error as error:
            self.leaves(name, str(error))
            return False
        self.report.swapped.append(name)
        return True

    def leaves(self, name: str, reason: str) -> None:
        self.report.left[name] = reason

    def checked_report(self) -> SwapReport:
        """Return the report. Raises `InvalidSetting` for a pattern that matches no convolution."""
        names = [*self.report.swapped, *self.report.left]
        for pattern in self._patterns or ():
            if not any(fnmatchcase(name, pattern) for name in names):
                raise InvalidSetting(
                    f"only={pattern!r} fits no convolution; there are: {', '.join(names) or 'none'}"
                )
        return self.report


def swap(
    model: Any,
    backend: str | None = None,
    only: str | Iterable[str] | None = None,
    precision: str | None = None,
) -> Any:
    """Replace every Convolution of `model` that our operator can compute.

    `model` is a Symbol, of which a swapped copy is returned, or a Gluon net, which is changed in
    place, hybridized or not, before or after its first call. Names of layers, arguments and outputs
    stay, and so do parameters and their files. `only` selects layers by name or shell pattern;
    `backend` names the backend that computes them, and `precision` is the minimum precision, as for
    `Convolution`.

    For a net the `SwapReport` of swapped and skipped layers is returned; in both cases it is logged
    (logger `ece408_op`, level INFO). Raises `InvalidSetting` for an unknown backend or precision,
    an `only` that matches nothing, or another kind of `model`, and `NoUsableGpu` under `with
    mx.gpu():`, or for a net on a GPU, if MXNet has no code for the GPU.
    """
    mx = load_mxnet()
    gpu_support.refuse_current_context()
    if isinstance(model, mx.sym.Symbol):
        symbol, report = swap_symbol(model, backend, only, precision)
        _log.info("%s", report)
        return symbol
    if isinstance(model, mx.gluon.Block):
        gpu_support.refuse_networks(_contexts(model))
        report = _swap_net(mx, model, _Choice(backend, only, precision))
        _log.info("%s", report)
        return report
    raise InvalidSetting(
        f"cannot swap a {type(model).__name__}; give a Symbol, a Gluon net, or use swap_checkpoint"
    )


def unswap(model: Any) -> Any:
    """Undo `swap`: replace our operator by MXNet's Convolution, also in networks that were built
    with it.

    For a Symbol a copy is returned; a Gluon net is changed in place, and the names of its changed
    layers are returned (in a SymbolBlock, those of operators). Parameters stay. Raises
    `InvalidSetting` for another kind of `model`.
    """
    mx = load_mxnet()
    if isinstance(model, mx.sym.Symbol):
        return graph_json.write(graph_json.with_native(json.loads(graph_json.text(model))), model)
    if isinstance(model, mx.gluon.Block):
        names = [name for block in _blocks(model) for name in _give_back(mx, block)]
        _forget_traces(mx, model)
        return names
    raise InvalidSetting(f"cannot unswap a {type(model).__name__}; give a Symbol or a Gluon net")


def _give_back(mx: Any, block: Any) -> list[str]:
    """Undo the swap in one block of a net; return the names of its changed layers."""
    from . import gluon_layers

    nn = mx.gluon.nn
    native = {gluon_layers.Conv2D: nn.Conv2D, gluon_layers.Conv1D: nn.Conv1D}
    if isinstance(block, mx.gluon.SymbolBlock):
        inputs, symbol = block._cached_graph
        graph = json.loads(graph_json.text(symbol))
        block._cached_graph = (inputs, graph_json.write(graph_json.with_native(graph), symbol))
        return [node["name"] for node in graph["nodes"] if graph_json.is_ours(node)]
    if type(block) not in native:
        return []
    for name in ("backend", "precision"):
        vars(block).pop(name, None)
    block.__class__ = native[type(block)]
    return [block.name]


def _forget_traces(mx: Any, net: Any) -> None:
    """Discard the traces of hybridized blocks, which contain the old operator."""
    for block in _blocks(net):
        if isinstance(block, mx.gluon.HybridBlock):
            block._clear_cached_op()


def _contexts(net: Any) -> Iterator[Any]:
    """Yield the contexts of a net's parameters."""
    for parameter in net.collect_params().values():
        # Uninitialised parameters have no context yet.
        with contextlib.suppress(RuntimeError):
            yield from parameter.list_ctx()


def swap_checkpoint(
    prefix: str | Path,
    epoch: int,
    out: str | Path,
    backend: str | None = None,
    only: str | Iterable[str] | None = None,
    precision: str | None = None,
) -> SwapReport:
    """Swap a saved checkpoint: reads PREFIX-symbol.json and PREFIX-EPOCH.params, writes OUT-...

    The parameter file is copied unchanged. Raises as `swap`, `checkpoint.load_checkpoint` and
    `save_swapped`.
    """
    symbol, _, _ = checkpoint.load_checkpoint(prefix, epoch)
    swapped, report = swap_symbol(symbol, backend, only, precision)
    save_swapped(swapped, prefix, epoch, out)
    return report


def save_swapped(swapped: Any, prefix: str | Path, epoch: int, out: str | Path) -> None:
    """Write a swapped network with the parameters of its original checkpoint.

    Raises `InvalidSetting` for that checkpoint's own prefix, and `CacheUnwritable`.
    """
    names = [Path(f"{each}-symbol.json").resolve() for each in (prefix, out)]
    if names[0] == names[1]:
        raise InvalidSetting(
            f"{out} is the checkpoint that is read, and would be overwritten; give another prefix"
        )
    with atomic_path(Path(f"{out}-{epoch:04d}.params")) as temporary:
        shutil.copyfile(f"{prefix}-{epoch:04d}.params", temporary)
    checkpoint.save_symbol(Path(f"{out}-symbol.json"), swapped)


def swap_symbol(
    symbol: Any,
    backend: str | None = None,
    only: str | Iterable[str] | None = None,
    precision: str | None = None,
) -> tuple[Any, SwapReport]:
    """Swap a Symbol; return the new Symbol and the report."""
    choice = _Choice(backend, only, precision)
    swapped = _rewrite(symbol, choice)
    return swapped, choice.checked_report()


def _rewrite(symbol: Any, choice: _Choice) -> Any:
    return graph_json.write(_rewritten(json.loads(graph_json.text(symbol)), choice), symbol)


def _rewritten(graph: Graph, choice: _Choice) -> Graph:
    """Return the graph with our operator for every Convolution that `choice` takes, at any
    depth."""

    def place(node: Node) -> Node:
        node = graph_json.inside(node, lambda graph: _rewritten(graph, choice))
        attributes, name = node.get("attrs", {}), node["name"]
        if node["op"] in _OTHER_OPERATORS:
            choice.leaves(name, _OTHER_OPERATORS[node["op"]])
        if node["op"] != "Convolution" or not choice.takes(name, attributes):
            return node
        kept = {key: text for key, text in attributes.items() if key not in IGNORED}
        return graph_json.as_ours(node, kept, backend=choice.backend, precision=choice.precision)

    return {**graph, "nodes": [place(node) for node in graph["nodes"]]}


def _swap_net(mx: Any, net: Any, choice: _Choice) -> SwapReport:
    changes = [change for block in _blocks(net) for change in _change(mx, block, choice)]
    report = choice.checked_report()
    for apply in changes:
        apply()
    _forget_traces(mx, net)
    return report


def _blocks(net: Any) -> Iterator[Any]:
    yield net
    for child in net._children.values():
        yield from _blocks(child)


def _change(mx: Any, block: Any, choice: _Choice) -> Iterator[Callable[[], None]]:
    """Yield the change to make to one block of a net, if any."""
    from . import gluon_layers

    nn = mx.gluon.nn
    ours = {nn.Conv2D: gluon_layers.Conv2D, nn.Conv1D: gluon_layers.Conv1D}
    if isinstance(block, mx.gluon.SymbolBlock):
        inputs, symbol = block._cached_graph
        swapped = _rewrite(symbol, choice)
        yield lambda: setattr(block, "_cached_graph", (inputs, swapped))
    elif type(block) in ours:
        attributes = {name: str(value) for name, value in block._kwargs.items()}
        if choice.takes(block.name, attributes):
            yield lambda: _become(block, ours[type(block)], choice)
    elif isinstance(block, nn.conv_layers._Conv) and type(block) not in ours.values():
        choice.leaves(block.name, f"it is a {type(block).__name__}")


def _become(block: Any, layer: type, choice: _Choice) -> None:
    block.__class__ = layer
    block.backend, block.precision = choice.backend, choice.precision
