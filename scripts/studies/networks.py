"""Swapped networks of MXNet's zoo on the CPU, beside the originals and other engines."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.bench import cpu_timer
from ece408_op.bench.peers import process
from ece408_op.bench.results import OURS, Row, summary
from ece408_op.operator.frozen_network import to_cpu
from ece408_op.operator.loading import load_mxnet
from ece408_op.operator.swapping import swap

from . import zoo
from .bench_request import Request

ABOUT = (
    "Whole passes, networks of MXNet's zoo swapped and hybridized (ours), and by `to_cpu`, with "
    "the same random weights everywhere. `error` is the largest difference of other outputs from "
    "ours, as a fraction of the largest output."
)
ENGINES = ("onnxruntime", "openvino", "torch")
_REST_S, _WAKING_S = 0.1, 0.05


class Engines(process.Peer):
    """onnxruntime, OpenVINO and PyTorch under another Python; engine_peer.py documents the
    requests."""

    program = "engine_peer.py"


def rows(request: Request) -> Iterator[Row]:
    """Yield a row for each network and batch."""
    wanted = [name for name in ENGINES if name in request.against]
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(request.peer(wanted[0], Engines)) if wanted else None
        engines: dict[str, Engines] = {}
        for name in wanted if peer else ():
            assert peer is not None
            if name in peer.versions:
                engines[name] = peer
            else:
                request.miss(name, f"{request.peer_python} lacks {name}; set --peer-python")
        for case in request.cases:
            for batch in request.batches:
                yield {"case": case, "batch": batch, **measure(case, batch, engines, request)}


def measure(name: str, batch: int, engines: Mapping[str, Engines], request: Request) -> Row:
    """Measure errors and times of our network and the others in turns."""
    mx = load_mxnet()
    net, x = zoo.build(name, batch)
    calls: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "y.npy"
        for peer in set(engines.values()):
            files = zoo.export(net, Path(folder), x=x)
            onnx = str(Path(folder) / "onnx")
            parameters = {p.name: p.data() for p in net.collect_params().values()}
            symbol = net(mx.sym.Variable("data"))
            mx.onnx.export_model(symbol, parameters, [x.shape], np.float32, onnx)
            peer.ask(open=onnx, engines=list(engines), **files)
        swap(net)
        net.hybridize(static_alloc=True, static_shape=True)
        expected = net(x).asnumpy()
        calls[OURS] = functools.partial(_elapsed, net, x)
        frozen = to_cpu(net)
        error = zoo.error(frozen(x).asnumpy(), expected)
        calls[f"{OURS} by to_cpu"] = functools.partial(_elapsed, frozen, x)
        if "mxnet" in request.against:
            stock, _ = zoo.build(name, batch)
            stock.hybridize(static_alloc=True, static_shape=True)
            error = max(error, zoo.error(stock(x).asnumpy(), expected))
            calls["mxnet"] = functools.partial(_elapsed, stock, x)
        for engine, peer in engines.items():
            peer.ask(run=engine, to=str(found))
            error = max(error, zoo.error(np.load(found), expected))
            calls[engine] = functools.partial(peer.ms, run=engine)
        times = cpu_timer.interleaved(
            {who: functools.partial(_after_others, call) for who, call in calls.items()},
            request.repeat,
        )
    return {"error": error, "ms": {who: summary(samples) for who, samples in times.items()}}


def _elapsed(net: Any, x: Any) -> float:
    return cpu_timer.elapsed_ms(lambda: net(x).wait_to_read())


def _after_others(call: Callable[[], float]) -> float:
    """Time a call whose threads are awake, while threads of other engines sleep: some spin long
    after a pass."""
    time.sleep(_REST_S)
    awake = time.perf_counter() + _WAKING_S
    while time.perf_counter() < awake:
        call()
    return call()
