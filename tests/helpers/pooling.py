"""Windows of MXNet's Pooling: odd sizes, borders, overlaps, gaps, and truncated ones."""

from collections.abc import Iterator
from typing import Any

# Every combination, for `cases.every`; a window is a kernel, strides and a border.
AXES: dict[str, list[Any]] = {
    "window": [
        *(((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((3, 3), (1, 1), (1, 1))),
        *(((3, 2), (2, 3), (1, 0)), ((5, 4), (3, 1), (2, 1)), ((1, 7), (1, 1), (0, 3))),
        *(((4, 1), (4, 1), (1, 0)), ((2, 5), (1, 2), (0, 2)), ((3, 4), (3, 4), (0, 0))),
    ],
    "kind": ["max", "avg"],
    "convention": ["valid", "full"],
}


def layers(window: Any, kind: str, convention: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Return height and width of planes, and Pooling's attributes."""
    given = dict(zip(("kernel", "stride", "pad"), window))
    given.update(pool_type=kind, pooling_convention=convention)
    for height, width in ((9, 11), (8, 7), (13, 20)):
        for counts in (True, False) if kind == "avg" else (True,):
            yield height, width, {**given, "count_include_pad": counts}
