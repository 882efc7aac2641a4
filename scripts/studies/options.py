"""Options that several benchmarks take."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ece408_op.bench import cpu_timer, shapes
from ece408_op.bench.peers import cudnn
from ece408_op.errors import InvalidSetting


def add_write(parser: argparse.ArgumentParser) -> None:
    """`--write PREFIX`, for `results.show`."""
    parser.add_argument(
        "--write", type=Path, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well"
    )


def add_names(parser: argparse.ArgumentParser, option: str, names: Sequence[str]) -> None:
    """An option for some of the names, separated by commas; all by default."""
    parser.add_argument(
        option,
        default=",".join(names),
        help=f"of {', '.join(names)}, separated by commas (default: all)",
    )


def add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU (default: 0)")


def add_shapes(parser: argparse.ArgumentParser) -> None:
    add_names(parser, "--shapes", list(shapes.SHAPES))


def add_samples(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--samples", type=int, default=20, help="timed runs of each (default: 20)")


def add_peer(parser: argparse.ArgumentParser) -> None:
    """`--peer-python` and `--no-peer`, for `peer`."""
    parser.add_argument(
        "--peer-python",
        default="python3",
        metavar="PYTHON",
        help="a Python with PyTorch, for cuDNN's times (default: python3)",
    )
    parser.add_argument("--no-peer", action="store_true", help="leave cuDNN out")


def peer(options: argparse.Namespace) -> AbstractContextManager[cudnn.Peer | None]:
    """cuDNN's process for a `with` block; `None` with `--no-peer`. Raises `InvalidSetting`."""
    return contextlib.nullcontext() if options.no_peer else cudnn.Peer(options.peer_python)


def add_torch(parser: argparse.ArgumentParser) -> None:
    """`--torch-python` and `--no-torch`, for `torch`."""
    parser.add_argument(
        "--torch-python",
        default=sys.executable,
        metavar="PYTHON",
        help="a Python with PyTorch (default: this one)",
    )
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")


def torch(options: argparse.Namespace) -> AbstractContextManager[cpu_timer.TorchPeer | None]:
    """PyTorch's process on the CPU for a `with` block; `None`, with the reason on stderr, where
    that Python has no PyTorch."""
    if options.no_torch:
        return contextlib.nullcontext()
    try:
        return cpu_timer.TorchPeer(options.torch_python)
    except InvalidSetting as error:
        print(f"without PyTorch: {error}", file=sys.stderr)
        return contextlib.nullcontext()
