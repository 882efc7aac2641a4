"""Whole networks of MXNet's zoo on the GPU, beside PyTorch on the same GPU, from host to host."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ece408_op import page_locked, settings
from ece408_op.bench import cpu_timer
from ece408_op.bench.peers import process
from ece408_op.bench.results import OURS, Row, summary
from ece408_op.errors import Ece408Error, InvalidSetting
from ece408_op.files import markdown
from ece408_op.network import Array, Network, Watched
from ece408_op.operator.array_memory import pointer
from ece408_op.operator.loading import load_mxnet

from . import zoo
from .bench_request import Request

ABOUT = (
    "Passes from the host to the host; images are page-locked. `first s` is the first pass, which "
    "compiles and loads kernels that are not cached; `kernels ms` is the sum of our kernels one by "
    "one; `error` is relative to the largest of MXNet's outputs on the CPU. With "
    "ECE408_PRECISION=float16 images and outputs are float16, and PyTorch's weights."
)
_GLUONCV = "gluoncv/"
# Calls in which a network learns on how many GPUs it is fastest.
_LEARNING = 12
# Number of images compared with MXNet's results on the CPU: the first and the last ones.
_CHECKED = 4
# Largest difference from MXNet's outputs on the CPU, relative to the largest output, by precision.
TOLERANCE = {"float32": 1e-5, "tf32": 1e-3, "float16": 5e-3}

Step = tuple[str, str, str, float]


class Peer(process.GpuPeer):
    """PyTorch with CUDA under another Python; torch_network.py documents the requests."""

    program = "torch_network.py"


def _of_gluoncv(case: str) -> tuple[Any, Any]:
    """Return a network of GluonCV, NAME@HEIGHTxWIDTH, with random weights, and two images for it.
    Raises `InvalidSetting` without GluonCV."""
    mx = load_mxnet()
    name, _, size = case.partition("@")
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
    # Initializers of some blocks would make outputs nearly independent of images.
    xavier = mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2)
    net.initialize(xavier)
    for parameter in net.collect_params(".*weight").values():
        parameter.initialize(xavier, force_reinit=True)
    return net, mx.nd.random.uniform(-1, 1, shape=(2, 3, *map(int, size.split("x"))))


class Ours:
    """A network with random weights, and images for it; only its first output counts."""

    def __init__(self, name: str, batch: int) -> None:
        mx = load_mxnet()
        self.net, x = self._build(name)
        # The first pass infers shapes that are unknown before.
        self._first(self.net(x)).wait_to_read()
        self.symbol = self._first(self.net(mx.sym.Variable("data")))
        held = {p.name: p.data().asnumpy() for p in self.net.collect_params().values()}
        shape = (batch, *x.shape[1:])
        dtype = np.float16 if settings.precision() == "float16" else np.float32
        images = np.random.default_rng(408).uniform(-1, 1, shape).astype(dtype)
        names = [*self.symbol.list_arguments(), *self.symbol.list_auxiliary_states()]
        self.arrays = {each: images if each == "data" else held[each] for each in names}
        self.network = Network(self.symbol.tojson(), names, [n for n in names if n != "data"])
        _, (out,), _ = self.symbol.infer_shape(data=shape)
        self.y = np.full(out, np.nan, dtype)
        # As PyTorch's images, these are page-locked.
        self._images = page_locked(images)
        self._images.wait_to_read()
        of_images = Array(pointer(self._images), shape, str(images.dtype), 0)
        self._inputs = [
            of_images if name == "data" else _array(each) for name, each in self.arrays.items()
        ]
        self._outputs = [_array(self.y)]

    def run(self) -> None:
        self.network.compute(self._inputs, self._outputs)

    def steps(self) -> list[Step]:
        return [
            (each.node, each.kernel, str(each.problem or ""), 1e3 * each.seconds)
            for each in self.network.measure(self._inputs, self._outputs)
        ]

    def watched(self) -> Watched:
        return self.network.watch(self._inputs, self._outputs)

    def checked(self) -> np.ndarray:
        """Return the numbers of the compared images."""
        batch = len(self.y)
        return np.unique([*range(min(batch, _CHECKED)), *range(max(0, batch - _CHECKED), batch)])

    def expected(self) -> np.ndarray:
        """Return MXNet's outputs of the compared images."""
        images = load_mxnet().nd.array(self.arrays["data"][self.checked()], dtype="float32")
        return self._first(self.net(images)).asnumpy()

    @staticmethod
    def _build(name: str) -> tuple[Any, Any]:
        if name.startswith(_GLUONCV):
            return _of_gluoncv(name[len(_GLUONCV) :])
        return zoo.build(name, 2)

    @staticmethod
    def _first(outputs: Any) -> Any:
        return outputs[0] if isinstance(outputs, (list, tuple)) else outputs


def _array(values: np.ndarray) -> Array:
    return Array(values.ctypes.data, values.shape, str(values.dtype), 0)


def _variants() -> list[str]:
    """Return PyTorch's ways to run a network at our precision, and faster ones."""
    ours = settings.precision()
    precisions = ("float16",) if ours == "float16" else ("float32", "tf32")
    ways = itertools.product(("eager", "graph"), precisions, ("NCHW", "NHWC"))
    return [f"{layout} {precision} {way}" for way, precision, layout in ways]


def rows(request: Request) -> Iterator[Row]:
    """Yield a row for each network and batch; one that cannot be measured is a failure."""
    with request.peer("torch", Peer) as peer:
        for case in request.cases:
            for batch in request.batches:
                row: Row = {"case": case, "batch": batch}
                try:
                    row.update(measure(case, batch, peer, request))
                except Ece408Error as error:
                    row["failure"] = str(error)
                yield row


def measure(name: str, batch: int, peer: Peer | None, request: Request) -> Row:
    """Time a network and its peers in turns, also on each set of GPUs, among which images are
    divided."""
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
            for variant in _variants():
                peer.ask(run=variant, to=files[3], images=ours.checked().tolist())
                errors[f"torch {variant}"] = zoo.error(np.load(files[3]), expected)
                calls[f"torch {variant}"] = functools.partial(peer.ms, run=variant)
        for devices in request.devices:
            who = f"{OURS} on GPUs {devices}"
            calls[who] = functools.partial(_elapsed_on, devices, ours)
            for _ in range(_LEARNING):
                calls[who]()
            errors[who] = zoo.error(ours.y[ours.checked()], expected)
        times = cpu_timer.interleaved(
            {who: functools.partial(_after_another, call) for who, call in calls.items()},
            request.repeat,
        )
    errors[OURS] = max(errors[OURS], zoo.error(ours.y[ours.checked()], expected))
    # Several consecutive calls, as in the timing.
    watched = [ours.watched() for _ in range(3)][-1]
    steps = ours.steps()
    ours.network.close()
    if request.details:
        print(f"{name}, batch {batch}\n\n{watched_table(watched)}\n\n{steps_table(steps)}\n")
    worst = max(each for who, each in errors.items() if who.startswith(OURS))
    wrong = (
        {OURS: f"outputs are wrong: {errors}"} if worst > TOLERANCE[settings.precision()] else {}
    )
    return {
        **{"first_s": first, "kernels_ms": sum(ms for *_, ms in steps), "error": worst},
        "ms": {who: summary(samples) for who, samples in times.items()},
        **{"errors": errors, **({"failures": wrong} if wrong else {})},
    }


def _elapsed_on(devices: str, ours: Ours) -> float:
    with settings.override(devices=devices):
        return cpu_timer.elapsed_ms(ours.run)


def _after_another(call: Any) -> float:
    """Time a call that immediately follows another."""
    call()
    return call()


def steps_table(steps: list[Step]) -> str:
    """Return a table of our steps, the longest first."""
    rows = [
        [node, kernel, f"`{problem}`" if problem else "", f"{ms:.4f}"]
        for node, kernel, problem, ms in sorted(steps, key=lambda each: -each[3])
    ]
    return markdown.table(["node", "kernel", "problem", "ms"], rows)


def watched_table(watched: Watched) -> str:
    """Describe the parts of a call's time: on the host, and of each chunk on the GPU."""
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
