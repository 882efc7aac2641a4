"""Options that several benchmarks take."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ece408_op.bench import cpu_timer, shapes
from ece408_op.bench.peers import cudnn
from ece408_op.errors import InvalidSetting
from ece408_op.problem import ConvProblem


def add_output(parser: argparse.ArgumentParser) -> None:
    """`--output PREFIX`, for `results.show`."""
    parser.add_argument(
        "--output", type=Path, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well"
    )


def add_names(
    parser: argparse.ArgumentParser, option: str, names: Sequence[str], default: str | None = None
) -> None:
    """An option for some of the names, separated by commas; all by default."""
    parser.add_argument(
        option,
        default=default or ",".join(names),
        help=f"of {', '.join(names)}, separated by commas (default: {default or 'all'})",
    )


def add_networks(
    parser: argparse.ArgumentParser, names: Iterable[str], others: Iterable[str] = ()
) -> None:
    """Arguments that name some of these networks; all by default but the `others`."""
    default = list(names)
    known = [*default, *others]

    def network(name: str) -> str:
        if name not in known:
            there = ", ".join(known)
            raise argparse.ArgumentTypeError(f"unknown network {name!r}; there are: {there}")
        return name

    parser.add_argument(
        "networks",
        nargs="*",
        metavar="NETWORK",
        type=network,
        default=default,
        help=f"of {', '.join(known)} (default: {f'the first {len(default)}' if others else 'all'})",
    )


def add_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU (default: 0)")


def add_shapes(parser: argparse.ArgumentParser) -> None:
    add_names(parser, "--shapes", list(shapes.SHAPES))


def add_shapes_or_problems(parser: argparse.ArgumentParser) -> None:
    """`--shapes`, for `shapes_or_problems`."""
    parser.add_argument(
        "--shapes",
        default=",".join(shapes.SHAPES),
        help=f"of {', '.join(shapes.SHAPES)}, or problems such as b100,c12,h33,w33,m24,k5 "
        "separated by spaces (default: all)",
    )


def shapes_or_problems(
    options: argparse.Namespace, batch: int | None = None
) -> dict[str, ConvProblem]:
    """By name, at another batch if it is given. Raises `InvalidProblem`."""
    separator = " " if ",c" in options.shapes else ","
    return {name: shapes.find(name, batch) for name in options.shapes.split(separator)}


def add_repeat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=20, help="timed runs of each (default: 20)")


def add_peer(parser: argparse.ArgumentParser) -> None:
    """`--peer-python` and `--no-peer`, for `peer` and `torch`."""
    parser.add_argument(
        "--peer-python",
        metavar="PYTHON",
        help="a Python with PyTorch, for its times on the CPU or cuDNN's (default: this one on the "
        "CPU, else python3)",
    )
    parser.add_argument("--no-peer", action="store_true", help="leave PyTorch or cuDNN out")


def peer(options: argparse.Namespace) -> AbstractContextManager[cudnn.Peer | None]:
    """cuDNN's process for a `with` block; `None` with `--no-peer`. Raises `InvalidSetting`."""
    return (
        contextlib.nullcontext()
        if options.no_peer
        else cudnn.Peer(options.peer_python or "python3")
    )


def torch(options: argparse.Namespace) -> AbstractContextManager[cpu_timer.TorchPeer | None]:
    """PyTorch's process on the CPU for a `with` block; `None`, with the reason on stderr, where
    that Python has no PyTorch."""
    if options.no_peer:
        return contextlib.nullcontext()
    try:
        return cpu_timer.TorchPeer(options.peer_python or sys.executable)
    except InvalidSetting as error:
        print(f"without PyTorch: {error}", file=sys.stderr)
        return contextlib.nullcontext()
