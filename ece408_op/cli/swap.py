"""`ece408 swap`: replaces MXNet's convolution by our operator in a saved checkpoint."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from ..bench import tune_targets
from ..errors import InvalidSetting, InvalidSize, WrongResult
from ..operator.checkpoint import load_checkpoint
from ..operator.net_comparison import compare_symbols
from ..operator.swapping import save_swapped, swap_symbol
from ..problem import check_precision
from . import arguments

# Networks that sum in another order differ by less, in float32, and in float16 or TF32.
_SWAPPED_ERROR, _SWAPPED_HALF_ERROR = 1e-4, 1e-2


def add(commands: Any) -> None:
    """Add `ece408 swap`."""
    title = "replace MXNet's Convolution by our operator in a saved checkpoint"
    parser = arguments.add_command(commands, "swap", title)
    parser.add_argument("prefix", metavar="PREFIX", help="reads PREFIX-symbol.json")
    parser.add_argument("epoch", metavar="EPOCH", type=int, help="and PREFIX-EPOCH.params")
    parser.add_argument("out", metavar="OUT", help="writes the same under the prefix OUT")
    parser.option(
        "--only NAME",
        "only this layer, or those that match a pattern such as 'conv*' (may be repeated)",
        action="append",
    )
    parser.option("--backend NAME", "backend of the swapped layers")
    parser.option(
        "--precision NAME",
        f"their minimum precision: {arguments.PRECISION} (default: not written to the checkpoint)",
    )
    parser.option(
        "--verify",
        "compare the networks' outputs on random images, or those of --input, and write "
        f"nothing if they differ by more than {_SWAPPED_ERROR:g} of the largest "
        f"({_SWAPPED_HALF_ERROR:g} in float16 and TF32); prints their times, too",
    )
    parser.option("--image CxHxW", "with --verify, the images, such as 3x224x224")
    parser.option("--batch-size N", "with --verify, images (default: 1)", default=1)
    parser.option("--input FILE", "with --verify, images from a .npy file, of shape (N, C, H, W)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    symbol, arg_params, aux_params = load_checkpoint(options.prefix, options.epoch)
    swapped, report = swap_symbol(symbol, options.backend, options.only, options.precision)
    if options.verify:
        found = compare_symbols(symbol, swapped, arg_params, aux_params, _images(options))
        print(f"before and after: {found}")
        is_half = any(each.dtype == np.float16 for each in arg_params.values())
        name = check_precision(options.precision or "float32")
        exact = name in ("strict", "float32") and not is_half
        if not found.error <= (_SWAPPED_ERROR if exact else _SWAPPED_HALF_ERROR):
            raise WrongResult(
                f"the swapped network differs by {found.error:.1e}; {options.out} is not written"
            )
    save_swapped(swapped, options.prefix, options.epoch, options.out)
    print(report)


def _images(options: argparse.Namespace) -> np.ndarray:
    """Return the images for comparing the networks, float32."""
    if options.input is None:
        if options.batch_size < 1:
            raise InvalidSize(
                f"{options.batch_size} images are too few; --batch-size takes 1 and more"
            )
        shape = (options.batch_size, *tune_targets.image_of(options.image, options.prefix))
        return np.random.default_rng(408).random(shape, np.float32)
    try:
        return np.asarray(np.load(options.input, allow_pickle=False), np.float32)
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise InvalidSetting(
            f"{options.input} is not a .npy file with images ({error}); write one by numpy.save"
        ) from error
