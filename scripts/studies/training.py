"""Training with MXNet's own convolutions, with ours and with PyTorch: speed and losses."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op import settings
from ece408_op.bench import cpu_timer
from ece408_op.bench.peers import process
from ece408_op.bench.results import OURS, Row, summary
from ece408_op.op_log import op_times
from ece408_op.operator.loading import load_mxnet
from ece408_op.operator.swap import swap

from .asked import Asked

ABOUT = (
    "Steps of training in turns, on the same random images from the same parameters. `losses "
    "differ by` is the largest difference of a step's loss with our convolutions and with MXNet's "
    "own, relative to the first; the milliseconds by direction are of our convolutions in a step."
)
_LAYOUTS = ("NCHW", "NHWC")
_OPTIMIZER = {"rate": 0.01, "momentum": 0.9}


class Torch(process.Peer):
    """PyTorch under another Python; torch_training.py says what to ask. Raises `InvalidSetting` if
    that Python does not run or has none."""

    def __init__(self, python: str) -> None:
        threads = {"OMP_NUM_THREADS": str(settings.threads())}
        remedy = "name a Python with PyTorch as --peer-python, or leave it out"
        super().__init__("torch_training.py", python, {**os.environ, **threads}, remedy, quiet=True)


class Network:
    """A network with its images and labels; each of a name has the same parameters."""

    def __init__(self, name: str, shape: tuple[int, ...], swapped: bool) -> None:
        mx = load_mxnet()
        zoo = mx.gluon.model_zoo.vision
        self.net = _course_net(mx) if name == "2019fa" else zoo.get_model(name)
        mx.random.seed(408)
        self.net.initialize(mx.init.Xavier())
        rng = np.random.default_rng(408)
        self.x = mx.nd.array(rng.uniform(-1, 1, shape))
        self.labels = mx.nd.array(rng.integers(0, self.net(self.x).shape[1], shape[0]))
        self.losses: list[float] = []
        if swapped:
            swap(self.net)
        self.net.hybridize(static_alloc=True, static_shape=True)
        self._entropy = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        rates = {"learning_rate": _OPTIMIZER["rate"], "momentum": _OPTIMIZER["momentum"]}
        self._trainer = mx.gluon.Trainer(self.net.collect_params(), "sgd", rates)

    def step(self) -> float:
        """Its milliseconds."""
        return cpu_timer.elapsed_ms(self._step)

    def _step(self) -> None:
        mx = load_mxnet()
        with mx.autograd.record():
            loss = self._entropy(self.net(self.x), self.labels)
        loss.backward()
        self._trainer.step(len(self.x))
        # Gradients and new parameters come after the loss.
        mx.nd.waitall()
        self.losses.append(float(loss.mean().asscalar()))

    def export(self, folder: Path) -> dict[str, str]:
        """The files that `Torch` opens."""
        files = {"open": "net", "weights": "weights.npz", "x": "x.npy", "labels": "labels.npy"}
        paths = {key: str(folder / name) for key, name in files.items()}
        self.net(load_mxnet().sym.Variable("data")).save(paths["open"])
        weights = {p.name: p.data().asnumpy() for p in self.net.collect_params().values()}
        np.savez(paths["weights"], **weights)  # type: ignore[arg-type]
        np.save(paths["x"], self.x.asnumpy())
        np.save(paths["labels"], self.labels.asnumpy())
        return paths


def _course_net(mx: Any) -> Any:
    nn = mx.gluon.nn
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(12, 5, activation="tanh", use_bias=False),
        nn.MaxPool2D(),
        nn.Conv2D(24, 5, use_bias=False),
        nn.Dense(160, activation="tanh"),
        nn.Dense(10),
    )
    return net


def rows(asked: Asked) -> Iterator[Row]:
    """A row for each case, whose text is a network, a batch and an image's shape."""
    with asked.peer("torch", Torch) as peer:
        for case in asked.cases:
            name, batch, image = case.split()
            shape = (int(batch), *map(int, image.split("x")))
            yield {"case": name, "batch": int(batch), **measure(name, shape, peer, asked)}


def measure(name: str, shape: tuple[int, ...], peer: Torch | None, asked: Asked) -> Row:
    """Times of steps, which change parameters, and how far losses are apart."""
    stock, ours = (Network(name, shape, swapped=own) for own in (False, True))
    contenders: dict[str, Callable[[], float]] = {OURS: ours.step, "mxnet": stock.step}
    with tempfile.TemporaryDirectory() as folder:
        if peer is not None:
            peer.ask(**stock.export(Path(folder)), **_OPTIMIZER)
            for layout in _LAYOUTS:
                contenders[f"torch {layout}"] = functools.partial(_torch_step, peer, layout)
        times = cpu_timer.interleaved(contenders, asked.repeat)
    apart = max(abs(a - b) for a, b in zip(stock.losses, ours.losses)) / stock.losses[0]
    with op_times() as log:
        ours.step()
    spent: dict[str, float] = {}
    for entry in log:
        key = f"{entry.direction}_ms"
        spent[key] = spent.get(key, 0.0) + entry.milliseconds
    ms = {who: summary(samples) for who, samples in times.items()}
    return {"losses_differ_by": apart, **spent, "ms": ms}


def _torch_step(peer: Torch, layout: str) -> float:
    return peer.ask(run=layout)["ms"]
