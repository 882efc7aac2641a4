"""Swapped networks of MXNet's zoo beside today's engines for inference, with the same weights."""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op import settings
from ece408_op.bench import cpu_timer
from ece408_op.bench.peers import process
from ece408_op.bench.summary import summary
from ece408_op.errors import InvalidSetting
from ece408_op.files import markdown
from ece408_op.operator.loading import load_mxnet
from ece408_op.operator.swapping import swap

from . import zoo

OURS = "ours"
_REST_S, _WAKING_S = 0.1, 0.05


class Engines(process.Peer):
    """onnxruntime, OpenVINO and PyTorch under another Python; engine_peer.py says what to ask.

    Raises `InvalidSetting` if that Python does not run or has none of them.
    """

    def __init__(self, python: str) -> None:
        threads = {"OMP_NUM_THREADS": str(settings.threads())}
        remedy = "name a Python with onnxruntime, openvino or torch as --peer-python"
        super().__init__("engine_peer.py", python, {**os.environ, **threads}, remedy, quiet=True)
        if not self.versions:
            self.__exit__()
            raise InvalidSetting(f"{python} has none of the engines; {remedy}")


@dataclass(frozen=True)
class Measured:
    """A network: samples in milliseconds by who computed, and the largest `zoo.error` of the
    others' outputs beside ours."""

    name: str
    batch: int
    ms: dict[str, list[float]]
    error: float

    def median(self, who: str) -> float:
        return statistics.median(self.ms[who])

    def fastest_peer(self) -> float:
        return min(self.median(who) for who in self.ms if who != OURS)


def measure(
    name: str, batch: int, peer: Engines, repeat: int, tick: Callable[[], object]
) -> Measured:
    """Time a network, hybridized and swapped, and the engines in turns; `tick` is called after
    each turn. Raises `InvalidSetting` if the engines end."""
    mx = load_mxnet()
    net, x = zoo.build(name, batch)
    with tempfile.TemporaryDirectory() as folder:
        names = ("net", "graph", "weights.npz", "x.npy", "y.npy")
        onnx, graph, weights, images, found = (str(Path(folder) / name) for name in names)
        symbol = net(mx.sym.Variable("data"))
        parameters = {p.name: p.data() for p in net.collect_params().values()}
        mx.onnx.export_model(symbol, parameters, [x.shape], np.float32, onnx)
        symbol.save(graph)
        np.savez(weights, **{key: array.asnumpy() for key, array in parameters.items()})
        np.save(images, x.asnumpy())
        peer.ask(open=onnx, graph=graph, weights=weights, x=images)
        swap(net)
        net.hybridize(static_alloc=True, static_shape=True)
        expected = net(x).asnumpy()
        error = 0.0
        for engine in peer.versions:
            peer.ask(run=engine, to=found)
            error = max(error, zoo.error(np.load(found), expected))
        calls = {OURS: lambda: cpu_timer.elapsed_ms(lambda: net(x).wait_to_read())}
        for engine in peer.versions:
            calls[engine] = functools.partial(_pass, peer, engine)
        ms = cpu_timer.interleaved(
            {who: functools.partial(_after_others, call) for who, call in calls.items()},
            repeat,
            tick,
        )
    return Measured(name, batch, ms, error)


def _after_others(call: Callable[[], float]) -> float:
    """The time of a call whose threads are awake, while those of other engines sleep: some spin for
    long after a pass."""
    time.sleep(_REST_S)
    awake = time.perf_counter() + _WAKING_S
    while time.perf_counter() < awake:
        call()
    return call()


def _pass(peer: Engines, engine: str) -> float:
    return peer.ask(run=engine)["ms"]


def table(found: list[Measured]) -> str:
    """Medians, and how many times as fast as the fastest engine ours are."""
    engines = [who for who in found[0].ms if who != OURS]
    head = ["network", "batch", *(f"{who}, ms" for who in engines), "ours, ms"]
    head += ["times the fastest engine's speed", "outputs differ by at most"]
    rows = [
        [
            *(each.name, each.batch),
            *(f"{each.median(who):.1f}" for who in (*engines, OURS)),
            *(f"{each.fastest_peer() / each.median(OURS):.2f}", f"{each.error:.1e}"),
        ]
        for each in found
    ]
    return markdown.table(head, rows)


def records(found: list[Measured]) -> list[dict[str, Any]]:
    """The same for JSON."""
    return [
        {
            **{"name": each.name, "batch": each.batch, "error": each.error},
            "ms": {who: summary(samples) for who, samples in each.ms.items()},
        }
        for each in found
    ]
