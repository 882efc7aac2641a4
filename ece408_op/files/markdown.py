"""Markdown tables."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Iterable[object]], right: Container[int] = ()) -> str:
    """Return a table of a header and rows; columns in `right` are right-aligned."""
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, rule, *rows))
