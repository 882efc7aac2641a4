"""Networks of MXNet's zoo as a whole on the GPU, beside PyTorch on the same GPU: host to host."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op import settings
from ece408_op.backends.network import Array, Network, Watched
from ece408_op.bench import cpu_timer
from ece408_op.bench.peers import process
from ece408_op.bench.summary import summary
from ece408_op.course import course_terms
from ece408_op.course.dataset import fashion_data
from ece408_op.errors import InvalidSetting
from ece408_op.files import markdown
from ece408_op.operator.gpu_network import to_gpu
from ece408_op.operator.loading import load_mxnet

from . import zoo

OURS = "ours"
NETWORKS = (*zoo.NETWORKS, "resnet50_v1")
# GluonCV's, and the height and width of the images that each takes.
GLUONCV = {
    "resnet50_v1d": (224, 224),
    "resnest14": (224, 224),
    "mobilenetv3_large": (224, 224),
    "simple_pose_resnet18_v1b": (256, 192),
    "fcn_resnet50_voc": (480, 480),
}
VARIANTS = ("NCHW float32", "NHWC float32", "NCHW tf32", "NHWC tf32")
# Calls in which a network learns on how many GPUs it is fastest.
_LEARNING = 12
# Images whose results are compared with MXNet's on the CPU: the first and the last ones.
_CHECKED = 4
# What outputs may differ from MXNet's on the CPU, of the largest.
TOLERANCE = 1e-5


class Peer(process.Peer):
    """PyTorch with CUDA under another Python; torch_network.py says what to ask. Raises
    `InvalidSetting` if that Python does not run or has no PyTorch."""

    def __init__(self, python: str) -> None:
        paths = ("PYTHONPATH", "LD_LIBRARY_PATH")
        clean = {name: value for name, value in os.environ.items() if name not in paths}
        remedy = "name a Python with PyTorch and CUDA as --peer-python, or leave it out: --no-peer"
        super().__init__("torch_network.py", python, clean, remedy)


@dataclass(frozen=True)
class Measured:
    """A network: seconds of the first pass, which compiles and loads what is not in the cache,
    samples in milliseconds by who computed, the errors of outputs beside MXNet's, and of our steps
    on the GPU, one after the other, node, kernel, problem and milliseconds."""

    name: str
    batch: int
    first_seconds: float
    ms: dict[str, list[float]]
    errors: dict[str, float]
    steps: list[tuple[str, str, str, float]]
    watched: Watched

    def median(self, who: str) -> float:
        return statistics.median(self.ms[who])

    def best(self, precision: str) -> float:
        """The peer's better layout, or NaN without it."""
        found = [self.median(who) for who in self.ms if who.endswith(precision)]
        return min(found, default=math.nan)

    def error(self) -> float:
        """The largest of ours."""
        return max(each for who, each in self.errors.items() if who.startswith(OURS))

    def gpu_ms(self) -> float:
        """Of all our steps."""
        return sum(ms for *_, ms in self.steps)


def _of_gluoncv(name: str) -> tuple[Any, Any]:
    """A network of GluonCV with random weights, and two images for it. Raises `InvalidSetting` if
    GluonCV is not there."""
    mx = load_mxnet()
    try:
        from gluoncv import model_zoo
    except ImportError as error:
        raise InvalidSetting(
            f"{name} is a network of GluonCV, which does not import ({error}); install "
            "ece408_op[gluoncv]"
        ) from error
    whole = any(word in name for word in ("fcn", "pose"))
    options = {"pretrained_base": False} if whole else {}
    mx.random.seed(408)
    net = model_zoo.get_model(name, pretrained=False, **options)
    # Some blocks have initializers of their own, with which answers would hardly depend on images.
    xavier = mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2)
    net.initialize(xavier)
    for parameter in net.collect_params(".*weight").values():
        parameter.initialize(xavier, force_reinit=True)
    return net, mx.nd.random.uniform(-1, 1, shape=(2, 3, *GLUONCV[name]))


class Ours:
    """A network with random weights, and images for it; of several outputs the first one."""

    def __init__(self, name: str, batch: int) -> None:
        mx = load_mxnet()
        self.net, x = _of_gluoncv(name) if name in GLUONCV else zoo.build(name, 2)
        # Shapes that are not known before the first pass are then known.
        self._first(self.net(x)).wait_to_read()
        self.symbol = self._first(self.net(mx.sym.Variable("data")))
        held = {p.name: p.data().asnumpy() for p in self.net.collect_params().values()}
        shape = (batch, *x.shape[1:])
        images = np.random.default_rng(408).uniform(-1, 1, shape).astype(np.float32)
        names = [*self.symbol.list_arguments(), *self.symbol.list_auxiliary_states()]
        self.arrays = {each: images if each == "data" else held[each] for each in names}
        self.network = Network(self.symbol.tojson(), names, [n for n in names if n != "data"])
        _, (out,), _ = self.symbol.infer_shape(data=shape)
        self.y = np.full(out, np.nan, np.float32)
        self._inputs = [_array(each) for each in self.arrays.values()]
        self._outputs = [_array(self.y)]

    def run(self) -> None:
        self.network.compute(self._inputs, self._outputs)

    def steps(self) -> list[tuple[str, str, str, float]]:
        return [
            (each.node, each.kernel, str(each.problem or ""), 1e3 * each.seconds)
            for each in self.network.measure(self._inputs, self._outputs)
        ]

    def watched(self) -> Watched:
        return self.network.watch(self._inputs, self._outputs)

    def checked(self) -> np.ndarray:
        """Numbers of the images that are compared."""
        batch = len(self.y)
        return np.unique([*range(min(batch, _CHECKED)), *range(max(0, batch - _CHECKED), batch)])

    def expected(self) -> np.ndarray:
        """MXNet's outputs of these."""
        mx = load_mxnet()
        return self._first(self.net(mx.nd.array(self.arrays["data"][self.checked()]))).asnumpy()

    @staticmethod
    def _first(outputs: Any) -> Any:
        return outputs[0] if isinstance(outputs, (list, tuple)) else outputs


def _array(values: np.ndarray) -> Array:
    return Array(values.ctypes.data, values.shape, str(values.dtype), 0)


def measure(
    name: str,
    batch: int,
    peer: Peer | None,
    variants: list[str],
    repeat: int,
    tick: Callable[[], object],
    shared: Sequence[str] = (),
) -> Measured:
    """Time a network and its twins in turns, also on each of these sets of GPUs, which share the
    images; `tick` is called after each turn."""
    ours = Ours(name, batch)
    first = cpu_timer.elapsed_ms(ours.run) / 1e3
    expected = ours.expected()
    errors = {OURS: zoo.error(ours.y[ours.checked()], expected)}
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / file) for file in ("net.json", "w.npz", "x.npy", "y.npy")]
        calls = {OURS: lambda: cpu_timer.elapsed_ms(ours.run)}
        if peer is not None:
            ours.symbol.save(files[0])
            weights = {key: array for key, array in ours.arrays.items() if key != "data"}
            np.savez(files[1], **weights)  # type: ignore[arg-type]
            np.save(files[2], ours.arrays["data"])
            peer.ask(open=files[0], weights=files[1], x=files[2])
            for variant in variants:
                peer.ask(run=variant, to=files[3], images=ours.checked().tolist())
                errors[variant] = zoo.error(np.load(files[3]), expected)
                calls[variant] = functools.partial(_pass, peer, variant)
        for devices in shared:
            who = _on(devices)
            calls[who] = functools.partial(_elapsed_on, devices, ours)
            for _ in range(_LEARNING):
                calls[who]()
            errors[who] = zoo.error(ours.y[ours.checked()], expected)
        ms = cpu_timer.interleaved(
            {who: functools.partial(_after_another, call) for who, call in calls.items()},
            repeat,
            tick,
        )
    errors[OURS] = max(errors[OURS], zoo.error(ours.y[ours.checked()], expected))
    # A few in a row, as they were timed.
    watched = [ours.watched() for _ in range(3)][-1]
    steps = ours.steps()
    ours.network.close()
    return Measured(name, batch, first, ms, errors, steps, watched)


def _on(devices: str) -> str:
    return f"{OURS} on GPUs {devices}"


def _elapsed_on(devices: str, ours: Ours) -> float:
    with settings.override(devices=devices):
        return cpu_timer.elapsed_ms(ours.run)


def _after_another(call: Callable[[], float]) -> float:
    """The time of a call of which another has just ended."""
    call()
    return call()


def _pass(peer: Peer, variant: str) -> float:
    return peer.ask(run=variant)["ms"]


@dataclass(frozen=True)
class Final:
    """The pass of `final`, from pixels on the host to answers on the host: samples in milliseconds,
    the first pass, which compiles and loads, and the accuracy."""

    term: str
    images: int
    first_ms: float
    ms: list[float]
    accuracy: float

    def line(self) -> str:
        return (
            f"`final` of {self.term}, {self.images} images, from pixels to answers: "
            f"{statistics.median(self.ms):.2f} ms, the first time {self.first_ms:.0f}; "
            f"accuracy {self.accuracy:.4f}."
        )

    def record(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ms": summary(self.ms)}


def final(term_name: str, repeat: int) -> Final:
    """Time the network of a term's `final` on all test images."""
    mx = load_mxnet()
    term = course_terms.find_term(term_name)
    images, labels = fashion_data.load("t10k", term.image_size)
    held = course_terms.load_model(term, "ece408")
    arrays = [
        {name: array.astype("float32") for name, array in each.items()}
        for each in (held.arg_params, held.aux_params)
    ]
    network = to_gpu(held.symbol, *arrays)
    pixels = mx.nd.from_numpy(np.ascontiguousarray(images[:, None]))
    answers = None

    def call() -> None:
        nonlocal answers
        answers = network(pixels).asnumpy()

    first = cpu_timer.elapsed_ms(call)
    for _ in range(cpu_timer.WARM_UP):
        call()
    ms = [cpu_timer.elapsed_ms(call) for _ in range(repeat)]
    assert answers is not None
    accuracy = float((answers.argmax(1) == labels).mean())
    return Final(term_name, len(images), first, ms, accuracy)


def table(found: list[Measured]) -> str:
    """Medians, and how many times as fast as PyTorch ours are."""
    head = ["network", "batch", "PyTorch float32, ms", "PyTorch TF32, ms", "ours, ms"]
    head += ["ours, kernels one by one, ms", "times PyTorch's float32 speed"]
    head += ["our error beside MXNet's on the CPU", "our first pass, s"]
    rows = [
        [
            *(each.name, each.batch),
            *("" if math.isnan(ms) else f"{ms:.2f}" for ms in map(each.best, ("float32", "tf32"))),
            *(f"{ms:.2f}" for ms in (each.median(OURS), each.gpu_ms())),
            "" if math.isnan(each.best("float32")) else f"{_speed(each):.2f}",
            *(f"{each.error():.1e}", f"{each.first_seconds:.1f}"),
        ]
        for each in found
    ]
    parts = [markdown.table(head, rows)]
    for batch in dict.fromkeys(each.batch for each in found):
        speeds = [_speed(each) for each in found if each.batch == batch]
        mean = math.exp(sum(map(math.log, speeds)) / len(speeds))
        if not math.isnan(mean):
            parts.append(f"Batch {batch}: {mean:.2f} times PyTorch's speed in the geometric mean.")
    return "\n\n".join(parts)


def _speed(found: Measured) -> float:
    """How many times as fast as PyTorch in float32, or NaN without it."""
    return found.best("float32") / found.median(OURS)


def shared_lines(found: Sequence[Measured]) -> list[str]:
    """How much faster sets of GPUs are than what `ECE408_DEVICES` has, which is measured anyway."""
    return [
        f"`{each.name}`, batch {each.batch}, {who}: {each.median(who):.2f} ms, "
        f"{each.median(OURS) / each.median(who):.2f} times as fast as ours alone."
        for each in found
        for who in each.ms
        if who.startswith(_on(""))
    ]


def steps_table(found: Measured) -> str:
    """Our steps, the longest first."""
    rows = [
        [node, kernel, f"`{problem}`" if problem else "", f"{ms:.4f}"]
        for node, kernel, problem, ms in sorted(found.steps, key=lambda each: -each[3])
    ]
    return markdown.table(["node", "kernel", "problem", "ms"], rows)


def watched_table(found: Measured) -> str:
    """Where the time of a call went: on the host, and of each chunk on the GPU."""
    watched = found.watched
    about = (
        f"{1e3 * watched.seconds:.2f} ms: the host copies for {1e3 * watched.copying:.2f}, waits "
        f"for {1e3 * watched.waiting:.2f}. By the GPU's clock, in ms since the call began:"
    )
    head = ["chunk", "copies in begin", "end", "kernels end", "results are back"]
    head += ["kernels end after the copies in"]
    rows = [
        [number, *(f"{1e3 * mark:.3f}" for mark in (*marks, marks[2] - marks[1]))]
        for number, marks in enumerate(watched.chunks)
    ]
    return f"{about}\n\n{markdown.table(head, rows)}"


def records(found: list[Measured]) -> list[dict[str, Any]]:
    """The same for JSON."""
    return [
        {
            **{"name": each.name, "batch": each.batch, "first_seconds": each.first_seconds},
            "errors": each.errors,
            "ms": {who: summary(samples) for who, samples in each.ms.items()},
            "steps": each.steps,
            "watched": dataclasses.asdict(each.watched),
        }
        for each in found
    ]
