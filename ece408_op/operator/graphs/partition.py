"""Partitioner: chooses the parts of a graph that run on the GPU: `optimize_for("ece408")`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import settings
from ...backends import kernel_file
from ...errors import Ece408Error
from ...problem import check_precision
from .. import compiled_operator, networks, parts_at_work
from ..parts_at_work import MOST_BYTES, Parts
from . import compiled_graphs, graph_inference, graph_json, groups, guards, parts
from .graph_json import Entry, Graph, Node

if TYPE_CHECKING:
    from ...network import Typed

BACKEND = "ece408"
# Other operators take a GPU less time than copies to it and back; they stay unless a part has one
# of these.
_WORTH_COPIES = ("Convolution", "Deconvolution", "FullyConnected", "dot", "batch_dot")
# Operators whose inputs after the first are parameters if they are variables.
_WITH_PARAMETERS = (
    *("Convolution", "Deconvolution", "FullyConnected", "BatchNorm", "LeakyReLU", "Embedding"),
    *("LayerNorm", "InstanceNorm", "GroupNorm", "RNN"),
)
# It concatenates an RNN's parameters.
_OF_RNN = "_rnn_param_concat"
# Why such nodes, and such parts, stay on the CPU.
ONLY_FOR_CPU = "only what stays on the CPU reads it"
TOO_LITTLE = "it takes less time than copies to the GPU and back would"


@dataclass
class Choice:
    """A Symbol's graph, the node numbers of each part `on` a machine, and the other nodes, with
    reasons."""

    original: Any
    graph: Graph
    groups: list[list[int]]
    left: dict[str, str]
    parameters: set[tuple[int, int]]
    known: dict[tuple[int, int], Typed]
    on: str
    # Whether it is for these sizes alone: MXNet does not infer shapes before our nodes from those
    # behind them.
    is_for_sizes: bool


def choose(
    symbol: Any,
    data: Collection[str] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    types: Mapping[str, Any] | None = None,
    on: str = "gpu",
    only_ours: bool = False,
    trains: bool = False,
) -> Choice:
    """Choose the largest parts of a Symbol that can run `on` the "gpu" or the "cpu". With
    `only_ours` these are convolutions of this package, and what belongs to them; a network that
    `trains` needs their gradients.

    `data` are the names of the inputs that are no parameters; without it, parameters are the
    variables that layers take as such. Given the shapes and types of inputs by name, a node is
    checked on its arrays as far as they are known, else by its attributes.
    """
    graph: Graph = json.loads(graph_json.text(graph_json.unmarked(symbol)))
    is_for_sizes = graph_inference.has_open_sources(graph)
    if is_for_sizes:
        graph = graph_inference.with_known_sources(symbol, graph, shapes or {})
        symbol = graph_json.write(graph, symbol)
    nodes = graph["nodes"]
    reason = _why_none(graph, symbol)
    reasons: list[str | None] = [reason] * len(nodes)
    known: dict[tuple[int, int], Typed] = {}
    if reason is None:
        known = _arrays(symbol, graph, shapes or {}, types or {})
        used = dict.fromkeys(range(len(nodes)), 0)
        for entry, *_ in groups.uses(graph):
            used[entry[0]] = max(used[entry[0]], entry[1] + 1)
        for number, node in enumerate(nodes):
            if node["op"] != "null":
                results = [known.get((number, k), ((), None)) for k in range(used[number])]
                why = _why_not(node, on, trains)
                reasons[number] = why or _why_not_here(node, results, known)
    goes = [node["op"] != "null" and not reason for node, reason in zip(nodes, reasons)]
    parameters = _parameters(graph, symbol, data)
    if only_ours:
        _leave_mxnet_its_own(graph, goes, reasons)
    _leave_where_read(graph, parameters, goes, reasons)
    choice = Choice(symbol, graph, [], {}, parameters, known, on, is_for_sizes)
    found = groups.by_level(graph, goes)
    for group, outputs in zip(found, groups.outputs(graph, found)):
        reason = _why_not_together(graph, group, outputs)
        if reason is None:
            choice.groups.append(group)
        for number in group if reason else ():
            reasons[number] = reason
    for node, why in zip(nodes, reasons):
        if node["op"] != "null" and why:
            name, names = node["name"], itertools.count(2)
            while name in choice.left:
                name = f"{node['name']} ({next(names)})"
            choice.left[name] = why
    return choice


def choose_for(
    symbol: Any, arrays: Mapping[str, Any], data: Collection[str] | None, **keywords: Any
) -> Choice:
    """Call `choose` for these input arrays."""
    shapes = {name: array.shape for name, array in arrays.items()}
    types = {name: array.dtype for name, array in arrays.items()}
    return choose(symbol, data, shapes, types, **keywords)


def can_have_parts(arrays: Iterable[Any]) -> bool:
    """Return whether a graph on these arrays can have parts on the CPU under the settings."""
    only_float32 = all(array.dtype == np.float32 for array in arrays)
    return only_float32 and compiled_operator.missing() is None and bool(parts_at_work.mode())


def for_inference(
    symbol: Any, graph: Graph, arrays: Mapping[str, Any], data: Collection[str] | None = None
) -> Choice:
    """Choose the parts of `symbol` for inference on these arrays by name: those on the GPU, if its
    graph has marks, else convolutions of this package and what belongs to them. `data` are the
    names of the inputs that are no parameters, if known."""
    if graph_json.is_marked(graph) and networks.may_use_gpu():
        choice = choose_for(symbol, arrays, data)
        if choice.groups:
            return choice
    if not can_have_parts(arrays.values()):
        return Choice(symbol, graph, [], {}, set(), {}, "cpu", is_for_sizes=False)
    return choose_for(symbol, arrays, data, on="cpu", only_ours=True)


def in_parts(
    choice: Choice, arrays: Mapping[str, Any], most_bytes: int | None = None
) -> tuple[Any, Parts | None]:
    """Return the graph of a choice on these arrays by name, as `compiled_graphs.compiled`, and its
    parts, if any, with `most_bytes` as `Parts` (default: on the GPU, no call is direct). Keep the
    parts as long as the graph."""
    shapes = {name: array.shape for name, array in arrays.items()}
    if not choice.groups:
        return compiled_graphs.compiled(choice.original, choice.graph, shapes), None
    usual = 0 if choice.on == "gpu" else MOST_BYTES
    opened = Parts(usual if most_bytes is None else most_bytes)
    types = dict(choice.known)
    opened.takes_pixels = not choice.left and len(choice.groups) == 1
    for number, node in enumerate(choice.graph["nodes"] if opened.takes_pixels else ()):
        if node["op"] == "null":
            array = arrays[node["name"]]
            types[number, 0] = (array.shape, np.dtype(array.dtype).name)
    cut = parts.at_work(choice.graph, choice.groups, choice.parameters, types, opened, choice.on)
    opened.whole = _inputs_if_whole(cut)
    return compiled_graphs.compiled(choice.original, cut, shapes), opened


def _inputs_if_whole(graph: Graph) -> list[str] | None:
    """Return the names of the inputs of a graph's only node, in order, if its outputs are the
    graph's, each once."""
    computed = [number for number, node in enumerate(graph["nodes"]) if node["op"] != "null"]
    heads = [tuple(head[:2]) for head in graph["heads"]]
    node = graph["nodes"][computed[0]]
    if len(computed) > 1 or heads != [(computed[0], output) for output in range(len(heads))]:
        return None
    return [graph["nodes"][entry[0]]["name"] for entry in node["inputs"]]


def _arrays(
    symbol: Any, graph: Graph, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, Any]
) -> dict[tuple[int, int], Typed]:
    """Return the shapes, and known types, of the arrays whose shapes can be inferred."""
    if not shapes:
        return {}
    entries = list(dict.fromkeys((entry[0], entry[1]) for entry, *_ in groups.uses(graph)))
    heads = [[*entry, 0] for entry in entries]
    found = _inferred(graph_json.write({**graph, "heads": heads}, symbol), shapes, types)
    return {entry: each for entry, each in zip(entries, found) if each[0] and 0 not in each[0]}


def _inferred(
    symbol: Any, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, Any]
) -> list[Typed]:
    """Return the shapes and types of a Symbol's outputs as far as they can be inferred; none if
    they contradict each other."""
    from mxnet import MXNetError

    arguments = set(symbol.list_arguments())
    try:
        given = {name: shape for name, shape in shapes.items() if name in arguments}
        _, found, _ = symbol.infer_shape_partial(**given)
    except MXNetError:
        return []
    kinds: Sequence[Any] = [None] * len(found)
    # Some operators raise if no type is known.
    with contextlib.suppress(MXNetError):
        named = {name: kind for name, kind in types.items() if name in arguments}
        _, kinds, _ = symbol.infer_type_partial(**named)
    return [
        (tuple(shape), None if kind is None else np.dtype(kind).name)
        for shape, kind in zip(found, kinds)
    ]


def _why_not_here(
    node: Node, results: Sequence[Typed], known: Mapping[tuple[int, int], Typed]
) -> str | None:
    """Return why a node cannot run on the GPU with its arrays' shapes and types; `None` if it can,
    or if these are unknown."""
    from ... import network

    taken = [(entry[0], entry[1]) for entry in node["inputs"]]
    if not all(entry in known for entry in taken):
        return None
    given = [known[entry] for entry in taken]
    # Layers that differ in name only have one answer: each new net of Gluon's has new names.
    attributes = {key: text for key, text in node.get("attrs", {}).items() if key != "layer"}
    return network.why_not_of(node["op"], attributes, given, results)


def _leave_mxnet_its_own(graph: Graph, goes: list[bool], reasons: list[str | None]) -> None:
    """Keep only nodes that follow one of our convolutions, or come before one and follow no node of
    MXNet's: others may be faster in oneDNN's layouts."""
    nodes = graph["nodes"]
    follows: list[bool] = []
    is_free: list[bool] = []  # of MXNet's nodes
    for number, node in enumerate(nodes):
        goes[number] = goes[number] and node["op"] != "Convolution"
        sources = [entry[0] for entry in node["inputs"]]
        is_ours = graph_json.is_ours(node)
        follows.append(goes[number] and (is_ours or any(follows[source] for source in sources)))
        is_free.append(
            node["op"] == "null" or (goes[number] and all(is_free[source] for source in sources))
        )
    read: set[int] = set()
    for number in reversed(range(len(nodes))):
        if goes[number] and not follows[number] and not (number in read and is_free[number]):
            goes[number], reasons[number] = False, "no convolution of this package needs it"
        if goes[number]:
            read |= {entry[0] for entry in nodes[number]["inputs"]}


def _leave_where_read(
    graph: Graph,
    parameters: Collection[tuple[int, int]],
    goes: list[bool],
    reasons: list[str | None],
) -> None:
    """Keep nodes that depend on parameters alone on the side of their readers."""
    read = {head[0] for head in graph["heads"]}
    for number in reversed(range(len(graph["nodes"]))):
        if goes[number] and (number, 0) in parameters and number not in read:
            goes[number], reasons[number] = False, ONLY_FOR_CPU
        if goes[number]:
            read |= {entry[0] for entry in graph["nodes"][number]["inputs"]}


def _why_none(graph: Graph, symbol: Any) -> str | None:
    """Return why no node of a graph can run on the GPU."""
    inputs = symbol.list_inputs()
    if len(set(inputs)) < len(inputs):
        return "two of the network's inputs have one name"
    if graph_json.has_control_flow(graph):
        # MXNet runs it immediately, on arrays that may not be computed yet.
        return "the network has control flow"
    if graph_inference.has_open_sources(graph) and any(map(graph_json.is_ours, graph["nodes"])):
        return "the network has zeros or the like whose shape follows from what they are added to"
    return None


# Backends that a layer may request in a network on a machine.
_BACKENDS = {"gpu": ("None", "cuda", "emulator"), "cpu": ("None", "cpu")}


def _why_not(node: Node, on: str, trains: bool) -> str | None:
    """Return why a node cannot run, or train, `on` a machine, or `None` if it can."""
    from ... import network

    attributes = node.get("attrs", {})
    if "subgraphs" in node or node.get("control_deps"):
        return f"{node['op']} is more than an operator on arrays"
    if "__ctx_group__" in attributes:
        return "it is in a context group"
    if graph_json.is_ours(node):
        backend, kernel = (attributes.get(name, "None") for name in ("backend", "cuda_kernel"))
        if backend not in _BACKENDS[on]:
            return f"backend={backend} is requested"
        if on == "cpu" and kernel_file.device_of(kernel):
            return f"kernel {kernel} is requested"
        precision = attributes.get("precision", "None")
        if precision != "None" and check_precision(precision) == "strict" != settings.precision():
            return "precision=strict is requested"
    reason = network.why_not(node["op"], attributes)
    if reason or not trains:
        return reason
    return network.why_not_trained(node["op"], attributes, on_gpu=on == "gpu")


def _why_not_together(
    graph: Graph,
    group: list[int],
    outputs: Sequence[Entry],
) -> str | None:
    """Return why nodes that can run on the GPU cannot be one part."""
    from ...network import Network

    nodes = [graph["nodes"][number] for number in group]
    if not any(node["op"] in _WORTH_COPIES or graph_json.is_ours(node) for node in nodes):
        return TOO_LITTLE
    inner, taken = parts.inside_of(graph, group, outputs)
    try:
        Network(json.dumps(inner), list(taken), ())
    except Ece408Error as error:
        return str(error)
    return None


def _parameters(graph: Graph, symbol: Any, data: Collection[str] | None) -> set[tuple[int, int]]:
    """Return the arrays of a graph that are the same for all images: parameters, and those computed
    from them alone, or used as one."""
    nodes = graph["nodes"]
    states = set(symbol.list_auxiliary_states())
    taken: set[tuple[int, int]] = set()
    others: set[tuple[int, int]] = {(head[0], head[1]) for head in graph["heads"]}
    for number, node in reversed(list(enumerate(nodes))):
        takes = node["op"] in _WITH_PARAMETERS or graph_json.is_ours(node)
        is_view = node["op"] in ("Reshape", "reshape") and (number, 0) in taken - others
        for place, entry in enumerate(node["inputs"]):
            is_one = is_view or node["op"] == _OF_RNN or (takes and place)
            (taken if is_one else others).add((entry[0], entry[1]))
    found = taken - others
    variables = {number for number, node in enumerate(nodes) if node["op"] == "null"}
    if data is None:
        known = {nodes[number]["name"] for number in variables if (number, 0) in found} | states
        data = {nodes[number]["name"] for number in variables} - known
    is_of_images = parts.of_images(graph, data)
    every = {(entry[0], entry[1]) for node in nodes for entry in node["inputs"]}
    return {
        entry
        for entry in every
        if not is_of_images[entry[0]] or (entry in found and entry[0] not in variables)
    }


def copied_bytes(
    choice: Choice, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, Any]
) -> tuple[int | None, int | None]:
    """Return the bytes that the parts of a choice read and write without parameters, for these
    shapes and types of inputs; `None` for each if shapes are missing or contradictory."""
    graph = choice.graph
    # MXNet does not know layers that take uint8 pixels.
    others = {name: kind for name, kind in types.items() if np.dtype(kind) != np.uint8}
    known = _arrays(choice.original, graph, shapes, others)

    def count(entry: Entry) -> int:
        shape, kind = known[entry[0], entry[1]]
        dtype = types.get(graph["nodes"][entry[0]]["name"], kind or np.float32)
        return math.prod(shape) * np.dtype(dtype).itemsize

    read = parts.read_outside(graph, choice.groups)
    taken, given = 0, 0
    try:
        for group, outputs in zip(choice.groups, groups.outputs(graph, choice.groups)):
            inputs = list(parts.inside_of(graph, group, outputs)[1].values())
            kinds = parts.kinds(graph, inputs, choice.parameters)
            taken += sum(count(e) for e, kind in zip(inputs, kinds) if kind != networks.PARAMETER)
            given += sum(count(e) for e in outputs if (e[0], e[1]) in read)
    except KeyError:
        return None, None
    return taken, given


def install(mxnet: Any) -> None:
    """Make `Symbol.optimize_for`, which Gluon's version also calls, know the backend."""
    symbol_class = mxnet.symbol.symbol.Symbol
    symbol_class.optimize_for = _optimizing(symbol_class.optimize_for)


def _optimizing(method: Any) -> Any:
    @functools.wraps(method)
    def optimize_for(
        self: Any,
        backend: str,
        args: Mapping[str, Any] | None = None,
        aux: Mapping[str, Any] | None = None,
        ctx: Any = None,
        *others: Any,
        **keywords: Any,
    ) -> Any:
        if backend != BACKEND:
            graph = graph_json.read(self)
            if graph is not None:
                # Guards cannot be added to the result.
                self = guards.guarded_symbol(graph, self, of_data="clip")
            return method(self, backend, args, aux, ctx, *others, **keywords)
        given = [*(args or {}).values(), *(aux or {}).values()]
        reason = networks.why_no_gpu() or networks.why_not_of(given)
        if reason is None:
            named = {**(args or {}), **(aux or {})} if isinstance(args, Mapping) else {}
            return graph_json.with_marks(self, choose_for(self, named, None).groups)
        networks.say_why_no_gpu(reason)
        return graph_json.unmarked(self).__copy__()

    return optimize_for
