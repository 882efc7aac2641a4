"""Reader of a network and its parameters from the files that MXNet writes, without MXNet."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import CheckpointMismatch, CheckpointMissing, InvalidSetting, printable
from . import params_file, symbol_file


@dataclass(frozen=True)
class Checkpoint:
    """A network as JSON for `Graph.parse`, the parameters that it reads by name, and the names of
    its other inputs, in order: data, and labels, which inference does not use."""

    text: str
    parameters: dict[str, np.ndarray]
    data: tuple[str, ...]
    labels: tuple[str, ...]


def read(prefix: str | Path, epoch: int) -> Checkpoint:
    """Read PREFIX-symbol.json and PREFIX-EPOCH.params, with four digits for EPOCH, as Module's
    `save_checkpoint` and Gluon's `export` write them. Their shapes are not compared.

    Raises `CheckpointMissing` for a missing file, `CheckpointMismatch` for a damaged one and for a
    missing parameter.
    """
    if type(epoch) is not int or epoch < 0:
        raise InvalidSetting(f"epoch={epoch!r}; give the number in PREFIX-0007.params as 7")
    files = Path(f"{prefix}-symbol.json"), Path(f"{prefix}-{epoch:04d}.params")
    for path in files:
        _check_is_there(path)
    symbol = symbol_file.read(files[0])
    arguments, auxiliary = params_file.split(params_file.read(files[1]))
    given = {**arguments, **auxiliary}
    missing = [name for name in symbol.variables if name not in given]
    for name in missing:
        if name in symbol.parameters:
            raise CheckpointMismatch(
                f"parameter {printable(name)[:200]} is missing in {files[1]}; check the epoch, or "
                "save the network again"
            )
    return Checkpoint(
        symbol.text,
        {name: given[name] for name in symbol.variables if name in given},
        tuple(name for name in missing if name not in symbol.labels),
        tuple(name for name in missing if name in symbol.labels),
    )


def _check_is_there(path: Path) -> None:
    try:
        if path.is_file():
            return
        names = [each.name for each in path.parent.iterdir() if each.suffix == path.suffix]
    except (OSError, ValueError):
        raise CheckpointMissing(f"{path}: its folder is not there, or cannot be read") from None
    close = difflib.get_close_matches(path.name, names, 3, 0)
    has = f"its folder has {printable(', '.join(close))}" if close else "its folder has none"
    raise CheckpointMissing(f"{path} is not there; {has}; check the folder, prefix and epoch")
