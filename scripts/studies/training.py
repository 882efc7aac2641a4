"""Training with MXNet's own convolutions, with ours and with PyTorch: speed and losses."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ece408_op
from ece408_op.bench import cpu_timer
from ece408_op.bench.peers import process
from ece408_op.bench.results import OURS, Row, summary
from ece408_op.errors import Ece408Error, NoUsableGpu
from ece408_op.op_log import op_times
from ece408_op.operator import networks
from ece408_op.operator.loading import load_mxnet
from ece408_op.operator.swapping import swap

from . import zoo
from .bench_request import Request

ABOUT = (
    "Steps of training in turns, on the same random images from the same parameters. `losses "
    "differ by` is the largest difference of a step's loss with our convolutions and with MXNet's "
    "own, relative to the first; the milliseconds by direction are of our convolutions in a step."
)
ABOUT_GPU = (
    "Steps of training in turns, 8 each time, from images on the host, on the same random images "
    "from the same parameters: with `ece408_op.Trainer`, with MXNet's, and by PyTorch on the same "
    "GPU, which reads the last step's loss only. `convolutions ms` are our kernels' of a step, "
    "one by one; `losses differ by` as on the CPU."
)
# Steps in a sample on a GPU, where a step ends while the next one begins.
_STEPS = 8
_LAYOUTS = ("NCHW", "NHWC")
_ON_GPU = tuple(f"{layout} {precision}" for layout in _LAYOUTS for precision in ("float32", "tf32"))
_MXNETS_TRAINER = f"{OURS}, MXNet's trainer"
# Steps whose losses are compared on a GPU: MXNet's own take seconds.
_COMPARED = 2
_OPTIMIZER = {"rate": 0.01, "momentum": 0.9}


class Torch(process.Peer):
    """PyTorch under another Python; torch_training.py documents the requests."""

    program = "torch_training.py"


class GpuTorch(process.GpuPeer):
    """The same on a GPU."""

    program = "torch_training.py"


class Network:
    """A network with its images and labels; networks of the same name have the same parameters. It
    trains by MXNet, on the CPU by our convolutions (`way` "swapped"), or on a GPU ("gpu"), also
    with the optimizer there ("trainer")."""

    def __init__(self, name: str, shape: tuple[int, ...], way: str) -> None:
        mx = load_mxnet()
        self.net = _build(mx, name)
        mx.random.seed(408)
        self.net.initialize(mx.init.Xavier())
        rng = np.random.default_rng(408)
        self.x = mx.nd.array(rng.uniform(-1, 1, shape))
        self.labels = mx.nd.array(rng.integers(0, self.net(self.x).shape[1], shape[0]))
        self.losses: list[float] = []
        if way == "swapped":
            swap(self.net)
        on_gpu = {"backend": "ece408"} if way in ("gpu", "trainer") else {}
        self.net.hybridize(static_alloc=True, static_shape=True, **on_gpu)
        self._entropy = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        rates = {"learning_rate": _OPTIMIZER["rate"], "momentum": _OPTIMIZER["momentum"]}
        made = ece408_op.Trainer if way == "trainer" else mx.gluon.Trainer
        self._trainer = made(self.net.collect_params(), "sgd", rates)

    def step(self, steps: int = 1) -> float:
        """Return the milliseconds of a step, of several."""
        return cpu_timer.elapsed_ms(functools.partial(self._run, steps)) / steps

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
        # On a GPU the last update may be in progress.
        next(iter(self.net.collect_params().values())).data().wait_to_read()

    def _step(self) -> None:
        mx = load_mxnet()
        with mx.autograd.record():
            loss = self._entropy(self.net(self.x), self.labels)
        loss.backward()
        self._trainer.step(len(self.x))
        # Gradients and new parameters are ready after the loss.
        mx.nd.waitall()
        self.losses.append(float(loss.mean().asscalar()))


def _build(mx: Any, name: str) -> Any:
    """Build the course's network, or one of the zoo."""
    if name != "2019fa":
        return mx.gluon.model_zoo.vision.get_model(name)
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


def rows(request: Request) -> Iterator[Row]:
    """Yield a row for each case, whose text is a network, a batch and an image's shape."""
    with request.peer("torch", Torch) as peer:
        for case in request.cases:
            name, batch, image = case.split()
            shape = (int(batch), *map(int, image.split("x")))
            yield {"case": name, "batch": int(batch), **measure(name, shape, peer, request)}


def measure(name: str, shape: tuple[int, ...], peer: Torch | None, request: Request) -> Row:
    """Time steps, which change parameters, and compare the losses."""
    stock, ours = (Network(name, shape, way) for way in ("mxnet", "swapped"))
    contenders: dict[str, Callable[[], float]] = {OURS: ours.step, "mxnet": stock.step}
    with tempfile.TemporaryDirectory() as folder:
        contenders |= _peers(peer, Path(folder), stock, _LAYOUTS)
        times = cpu_timer.interleaved(contenders, request.repeat)
    with op_times() as log:
        ours.step()
    spent: dict[str, float] = {}
    for entry in log:
        key = f"{entry.direction}_ms"
        spent[key] = spent.get(key, 0.0) + entry.milliseconds
    ms = {who: summary(samples) for who, samples in times.items()}
    return {"losses_differ_by": _apart(stock, ours), **spent, "ms": ms}


def rows_on_gpu(request: Request) -> Iterator[Row]:
    """Yield a row for each case, as `rows`. Raises `NoUsableGpu`."""
    load_mxnet()
    reason = networks.why_no_gpu()
    if reason is not None:
        raise NoUsableGpu(f"no network trains on a GPU: {reason}")
    with request.peer("torch", GpuTorch) as peer:
        for case in request.cases:
            name, batch, image = case.split()
            shape = (int(batch), *map(int, image.split("x")))
            row: Row = {"case": name, "batch": int(batch)}
            try:
                row.update(_measure_on_gpu(name, shape, peer, request))
            except Ece408Error as error:
                row["failure"] = str(error)
            yield row


def _measure_on_gpu(
    name: str, shape: tuple[int, ...], peer: GpuTorch | None, request: Request
) -> Row:
    stock, ours, half = (Network(name, shape, way) for way in ("mxnet", "trainer", "gpu"))
    first = ours.step() / 1e3
    contenders: dict[str, Callable[[], float]] = {
        OURS: functools.partial(ours.step, _STEPS),
        _MXNETS_TRAINER: functools.partial(half.step, _STEPS),
    }
    with tempfile.TemporaryDirectory() as folder:
        contenders |= _peers(peer, Path(folder), stock, _ON_GPU, _STEPS)
        for _ in range(_COMPARED):
            stock.step()
        times = cpu_timer.interleaved(contenders, request.repeat)
    with op_times() as log:
        ours.step()
    convolutions = sum(entry.milliseconds for entry in log)
    ms = {who: summary(samples) for who, samples in times.items()}
    rates = {f"{who}, images/s": shape[0] / each["median"] * 1e3 for who, each in ms.items()}
    worst = max(_apart(stock, each) for each in (ours, half))
    return {
        **{"first_s": first, "losses_differ_by": worst, "convolutions_ms": convolutions},
        **{**rates, "ms": ms},
    }


def _peers(
    peer: process.Peer | None,
    folder: Path,
    stock: Network,
    variants: Sequence[str],
    steps: int = 1,
) -> dict[str, Callable[[], float]]:
    """Return PyTorch's steps by name."""
    if peer is None:
        return {}
    files = zoo.export(stock.net, folder, x=stock.x, labels=stock.labels)
    peer.ask(**files, **_OPTIMIZER)
    return {f"torch {each}": functools.partial(peer.ms, run=each, steps=steps) for each in variants}


def _apart(stock: Network, ours: Network) -> float:
    """Return the largest difference of a step's losses, relative to the first."""
    return max(abs(a - b) for a, b in zip(stock.losses, ours.losses)) / stock.losses[0]
