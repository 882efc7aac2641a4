"""A benchmark's options: cases, peers, and number of repeats."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ece408_op.backends import DIRECTIONS
from ece408_op.bench.results import Row
from ece408_op.errors import InvalidSetting

_CASES = Path(__file__).parents[1] / "cases"
_Peer = TypeVar("_Peer", bound=contextlib.AbstractContextManager)


@dataclass
class Request:
    """`against` names peers, which run under `peer_python`. A missing one is an error if `insists`
    is set; `versions` are those of the peers found."""

    cases: Sequence[str]
    against: Sequence[str] = ()
    repeat: int = 5
    batches: Sequence[int] = (1,)
    directions: Sequence[str] = DIRECTIONS
    kernels: Sequence[str] = ()
    gpu: int = 0
    devices: Sequence[str] = ()
    details: bool = False
    peer_python: str = "python3"
    insists: bool = False
    versions: dict[str, Any] = field(default_factory=dict)
    # Rows of an earlier run to continue.
    earlier: Sequence[Row] = ()

    def whole(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows, and those of the earlier run that are not among them."""
        measured = {(row["case"], row["batch"]) for row in rows} if self.earlier else ()
        others = (row for row in self.earlier if (row["case"], row["batch"]) not in measured)
        return [*rows, *others]

    @contextlib.contextmanager
    def peer(self, name: str, start: Callable[[str], _Peer]) -> Iterator[_Peer | None]:
        """Yield a peer's process for a `with` block, or `None` if it is missing or not
        requested."""
        if name not in self.against:
            yield None
            return
        try:
            started = start(self.peer_python)
        except InvalidSetting as error:
            self.miss(name, str(error))
            yield None
            return
        with started as peer:
            self.versions.update(getattr(peer, "versions", {}))
            yield peer

    def miss(self, name: str, reason: str) -> None:
        """Report a missing peer. Raises `InvalidSetting` if `insists` is set."""
        if self.insists:
            raise InvalidSetting(reason)
        print(f"without {name}: {reason}", file=sys.stderr)


def cases(what: str, device: str = "cpu") -> list[str]:
    """Return the lines of a file in scripts/cases, without comments."""
    own = _CASES / f"{what}_{device}.txt"
    path = own if own.is_file() else _CASES / f"{what}.txt"
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
