"""Milestones: load data and model, run the network, print the course's lines."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from .. import dispatch, errors, settings
from ..dispatch import Layer
from ..errors import InvalidSize, UnknownModel
from ..host import footprint, gpu
from ..host.interruptible import run_interruptibly
from ..op_log import OpTime, op_times
from . import course_terms, gpu_check, scoring
from .course_terms import BASELINE, Term
from .dataset import fashion_data
from .gpu_check import Way

TEST_IMAGES = 10000


@dataclass(frozen=True)
class Milestone:
    """One script of the course: its name, its purpose, whose convolution it runs, the device, and
    whether the other layers run on it, too."""

    name: str
    title: str
    own_operator: bool
    on_gpu: bool = False
    whole: bool = False


MILESTONES = {
    milestone.name: milestone
    for milestone in (
        Milestone("m1.1", "MXNet's own convolution, on the CPU", own_operator=False),
        Milestone("m1.2", "MXNet's own convolution (cuDNN), on the GPU", False, on_gpu=True),
        Milestone("m2.1", "our operator's convolution, on the CPU", own_operator=True),
        Milestone("m3.1", "our operator's convolution, on the GPU", True, on_gpu=True),
        Milestone("m4.1", "our fastest CUDA kernel for each layer", True, on_gpu=True),
        Milestone("final", "the whole network on the GPU, as handed in", True, True, whole=True),
    )
}


@dataclass(frozen=True)
class Request:
    """A request to a milestone: `size` images in batches of `batch_size`."""

    term: Term
    model: str
    size: int = TEST_IMAGES
    batch_size: int = TEST_IMAGES
    model_dir: Path | None = None


def make_request(
    milestone: Milestone,
    arguments: list[str],
    term: str | None = None,
    batch_size: str | None = None,
    model_dir: Path | None = None,
) -> Request:
    """Return a request from the course's arguments, `[model] [size]`: a number is the size.

    Without `term`, a model that belongs to one term only selects that term.

    Raises `UnknownModel` or `InvalidSize`.
    """
    words = [text for text in arguments if not _looks_like_number(text)]
    numbers = [text for text in arguments if _looks_like_number(text)]
    if len(arguments) > 2:
        raise InvalidSize(f"{len(arguments)} arguments; give at most a model and a size")
    if len(words) == 2:
        raise InvalidSize(f"{words[1]!r} is not a size; give a whole number from 1 to 10000")
    if len(numbers) > 1:
        raise UnknownModel(f"{numbers[0]!r} is not a model; give the model first, then the size")
    if term is None:
        found = (
            course_terms.term_of(words[0])
            if words
            else course_terms.TERMS[course_terms.DEFAULT_TERM]
        )
    else:
        found = course_terms.find_term(term)
    default = found.default_model if milestone.own_operator else BASELINE
    model = words[0] if words else default
    _check_model(milestone, found, model)
    size = _parse_count(numbers[0], "size", TEST_IMAGES) if numbers else TEST_IMAGES
    batch = size if batch_size is None else _parse_count(batch_size, "batch size", None)
    return Request(found, model, size, min(batch, size), model_dir)


def _looks_like_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "", 1).isdigit()


def _parse_count(text: str, what: str, most: int | None) -> int:
    bound = f"from 1 to {most}" if most else "from 1 up"
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1 or (most is not None and count > most):
        raise InvalidSize(f"{text!r} is not a {what}; give a whole number {bound}")
    return count


def _check_model(milestone: Milestone, term: Term, model: str) -> None:
    if model not in term.models:
        raise UnknownModel(
            f"unknown model {model!r}; term {term.name} has: {', '.join(term.models)} "
            "(a number would be the size)"
        )
    if milestone.own_operator and model == BASELINE:
        raise UnknownModel(
            f"{model} runs MXNet's own convolution, which is what m1.1 is for; "
            f"{milestone.name} runs: {', '.join(m for m in term.models if m != BASELINE)}"
        )
    if not milestone.own_operator and model != BASELINE:
        raise UnknownModel(
            f"{model} runs our operator, which is what m2.1 is for; {milestone.name} runs: "
            f"{BASELINE}"
        )


def run(milestone: Milestone, request: Request) -> float:
    """Run a milestone, with the course's lines on stdout; return the accuracy.

    Raises `NoUsableGpu`, and the errors of the settings, the data, the checkpoint, the memory check
    and the operator.
    """
    if milestone.own_operator:
        dispatch.check_settings()
    way = _choose_way(milestone)
    size = request.term.image_size
    with _stage("Loading fashion-mnist data..."):
        images, labels = fashion_data.load("t10k", size, limit=request.size)
    with _stage("Loading model..."):
        checkpoint = course_terms.load_model(request.term, request.model, request.model_dir)
    if not way.without_mxnet:
        footprint.check_memory(checkpoint.symbol, request.size, request.batch_size, size)
    _say("New Inference")
    with errors.surfaced(), _told(milestone, request) as told, op_times(told):
        metric = run_interruptibly(
            lambda: (scoring.evaluate_on_gpu if way.without_mxnet else scoring.evaluate)(
                checkpoint.symbol,
                checkpoint.arg_params,
                checkpoint.aux_params,
                images,
                labels,
                request.batch_size,
                *([settings.devices()[0]] if way.network_on_gpu else []),
            )
        )
        accuracy = float(metric.get()[1])
    if milestone.own_operator:
        _say(f"Correctness: {accuracy} Model: {request.model}")
    else:
        _say(str(metric))
    return accuracy


def _emulates(milestone: Milestone) -> bool:
    return milestone.own_operator and settings.backend() == "emulator"


@contextlib.contextmanager
def _told(milestone: Milestone, request: Request) -> Iterator[Callable[[OpTime], None]]:
    """Provide a function that prints op times; on terminals with a progress bar if kernels are
    emulated, which takes long."""
    if not _emulates(milestone):
        yield _print_op_time
        return
    from tqdm import tqdm  # which imports much

    calls = len(request.term.filters) * -(-request.size // request.batch_size)
    ended = threading.Event()
    shown = {"desc": "emulating", "unit": "layer", "leave": False, "disable": None}
    bar = tqdm(total=calls, mininterval=0, miniters=1, **shown)

    def tick() -> None:
        # During a single layer only the elapsed time advances.
        while not ended.wait(1):
            bar.refresh()

    def told(entry: OpTime) -> None:
        with tqdm.external_write_mode():
            _print_op_time(entry)
        bar.update()

    ticking = threading.Thread(target=tick, daemon=True)
    with bar:
        ticking.start()
        try:
            yield told
        finally:
            ended.set()
            ticking.join()


def _choose_way(milestone: Milestone) -> Way:
    """Choose how the network runs; print it to stderr if a GPU or the emulator is used."""
    emulates = _emulates(milestone)
    # Whole networks choose their kernels themselves.
    whole = milestone.whole and settings.kernel() is None
    if milestone.on_gpu and not emulates:
        way = gpu_check.choose_way(milestone.own_operator, whole)
        print(f"ece408: {way.explanation}", file=sys.stderr)
        return way
    if emulates:
        print(
            "ece408: CUDA kernels run on the CPU, by the emulator: op times are no GPU's",
            file=sys.stderr,
        )
    elif milestone.own_operator and settings.backend() == "cuda":
        gpu.require_our_kernels(settings.devices())
    return Way(False, "", without_mxnet=emulates and whole)


@contextlib.contextmanager
def _stage(text: str) -> Iterator[None]:
    """Print `text` during the block, then " done"; end the line if it fails."""
    print(text, end="", flush=True)
    try:
        yield
    except BaseException:
        _say("")
        raise
    _say(" done")


def _print_op_time(entry: OpTime) -> None:
    emulated = " (emulated)" if entry.backend == "emulator" else ""
    _say(f"Op Time: {entry.seconds:.6f}{emulated}")
    if emulated:
        _print_mistakes(entry)
    if entry.gpu is not None:
        parts = [
            f"{what} {1e3 * seconds:.3f} ms ({seconds / entry.seconds:.0%})"
            for what, seconds in (
                ("kernel", entry.gpu.kernel_seconds),
                ("copies", entry.gpu.copy_seconds),
            )
        ]
        exactness = "" if entry.precision == "float32" else f" in {entry.precision}"
        print(
            f"ece408: {entry.layer} by {entry.kernel}{exactness}: {', '.join(parts)}",
            file=sys.stderr,
        )


def _print_mistakes(entry: OpTime) -> None:
    """Print the emulator's findings in a call."""
    from ..backends.emulator import findings
    from ..backends.emulator.emulator_backend import Emulated

    taken = findings.take()
    if not taken:
        return
    backend = dispatch.select(entry.problem, Layer(entry.layer), "forward")
    content = cast(Emulated, backend).content(entry.problem)
    for each in findings.located(taken, content):
        print(
            f"ece408: {entry.layer}: {each.place}: {each.title}, first by {each.by}, "
            f"{each.count} times",
            file=sys.stderr,
        )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
