"""Training with MXNet's own convolutions, with ours and with PyTorch: speed and losses."""

from __future__ import annotations

import contextlib
import functools
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op import settings
from ece408_op.bench import cpu_timer
from ece408_op.bench.summary import summary
from ece408_op.errors import InvalidSetting
from ece408_op.files import markdown
from ece408_op.op_log import op_times
from ece408_op.operator.loading import load_mxnet
from ece408_op.operator.swapping import swap

_TORCH = Path(__file__).with_name("torch_training.py")
# Batch and the shape of an image, and classes.
NETWORKS = {"resnet18_v1": (16, (3, 224, 224), 1000), "2019fa": (100, (1, 70, 70), 10)}
_LAYOUTS = ("NCHW", "NHWC")
_RATE = {"learning_rate": 0.01, "momentum": 0.9}


@dataclass
class Training:
    """Steps of one network: milliseconds and losses by whose convolutions there are, "mxnet" and
    "ours", and the milliseconds of PyTorch's better layout as "PyTorch"; those of our convolutions
    in a step by direction. The steps that warm up have losses, too."""

    name: str
    batch: int
    ms: dict[str, list[float]]
    losses: dict[str, list[float]]
    directions: dict[str, float]
    peer: str

    def images_per_second(self, whose: str) -> float | None:
        """Of the median step."""
        steps = self.ms.get(whose)
        return 1e3 * self.batch / statistics.median(steps) if steps else None

    def loss_difference(self) -> float:
        """The largest difference of a step's two losses, relative to the first loss."""
        pairs = zip(self.losses["mxnet"], self.losses["ours"])
        return max(abs(a - b) for a, b in pairs) / self.losses["mxnet"][0]


def measure(name: str, repeat: int, peer: str | None, tick: Callable[[], object]) -> Training:
    """Train a network of `NETWORKS` for so many steps, a step of each in turns, on random images.

    `peer`: a Python with PyTorch, or `None`; `tick` is called after each turn. Raises
    `InvalidSetting` if that Python ends.
    """
    batch = NETWORKS[name][0]
    losses: dict[str, list[float]] = {"mxnet": [], "ours": []}
    steps = {whose: _make(name, swapped=whose == "ours") for whose in losses}

    def sample(whose: str) -> float:
        return cpu_timer.elapsed_ms(lambda: losses[whose].append(steps[whose]()))

    contenders = {whose: functools.partial(sample, whose) for whose in steps}
    with _torch(name, batch, peer) as torch:
        version = ""
        if torch:
            version = torch()
            for layout in _LAYOUTS:
                contenders[layout] = functools.partial(_torch_step, torch, layout)
        ms = cpu_timer.interleaved(contenders, repeat, tick)
    layouts = [ms.pop(layout) for layout in _LAYOUTS if layout in ms]
    if layouts:
        ms["PyTorch"] = min(layouts, key=statistics.median)
    with op_times() as log:
        steps["ours"]()
    directions: dict[str, float] = {}
    for entry in log:
        directions[entry.direction] = directions.get(entry.direction, 0.0) + entry.milliseconds
    return Training(name, batch, ms, losses, directions, version)


def _torch_step(torch: Callable[[str], str], layout: str) -> float:
    return float(torch(layout))


def _make(name: str, swapped: bool) -> Callable[[], float]:
    """A network that makes a step and returns its loss; each has the same parameters and images."""
    mx = load_mxnet()
    batch, shape, classes = NETWORKS[name]
    net = _course_net(mx) if name == "2019fa" else mx.gluon.model_zoo.vision.get_model(name)
    mx.random.seed(408)
    net.initialize(mx.init.Xavier())
    rng = np.random.default_rng(408)
    x = mx.nd.array(rng.uniform(-1, 1, (batch, *shape)))
    labels = mx.nd.array(rng.integers(0, classes, batch))
    net(x).wait_to_read()
    if swapped:
        swap(net)
    net.hybridize(static_alloc=True, static_shape=True)
    entropy = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", _RATE)

    def step() -> float:
        with mx.autograd.record():
            loss = entropy(net(x), labels)
        loss.backward()
        trainer.step(batch)
        # Gradients and new parameters come after the loss.
        mx.nd.waitall()
        return float(loss.mean().asscalar())

    return step


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


@contextlib.contextmanager
def _torch(name: str, batch: int, python: str | None) -> Iterator[Callable[..., str] | None]:
    """PyTorch's process, as a function that writes it a line, if any, and returns its answer."""
    if python is None:
        yield None
        return
    command = [python, str(_TORCH), name, str(batch), str(settings.threads())]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise InvalidSetting(f"{python} does not run: {error}; use --no-peer") from error
    with process:

        def ask(line: str | None = None) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            if line is not None:
                print(line, file=process.stdin, flush=True)
            answer = process.stdout.readline()
            if not answer:
                raise InvalidSetting(f"{python} has no PyTorch; use --peer-python or --no-peer")
            return answer.strip()

        yield ask
        assert process.stdin is not None
        process.stdin.close()


def table(found: list[Training]) -> str:
    """Images a second, how ours compare, and how far losses are apart, as a Markdown table."""
    head = ["network", "batch", "MXNet, images/s", "PyTorch, images/s", "ours, images/s"]
    head += ["times MXNet's speed", "times PyTorch's speed", "losses differ by at most"]
    rows = []
    for each in found:
        speeds = [each.images_per_second(whose) for whose in ("mxnet", "PyTorch", "ours")]
        own = speeds[-1]
        ratios = [own / speed if own and speed else None for speed in speeds[:2]]
        rows.append(
            [
                *(each.name, each.batch),
                *("" if number is None else f"{number:.1f}" for number in speeds),
                *("" if number is None else f"{number:.2f}" for number in ratios),
                f"{each.loss_difference():.1e}",
            ]
        )
    spent = [
        f"Our convolutions in a step of {each.name}: "
        + ", ".join(f"{direction} {ms:.1f} ms" for direction, ms in each.directions.items())
        + "."
        for each in found
    ]
    return "\n\n".join([markdown.table(head, rows), *spent])


def records(found: list[Training]) -> list[dict[str, Any]]:
    """The same for JSON."""
    return [
        {
            "name": each.name,
            "batch": each.batch,
            "ms": {whose: summary(times) for whose, times in each.ms.items()},
            "losses": each.losses,
            "directions_ms": each.directions,
            "peer": each.peer,
        }
        for each in found
    ]
