"""Tables, in Markdown and as text."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence


def table(head: Sequence[str], rows: Iterable[Iterable[object]], right: Container[int] = ()) -> str:
    """Return a table of a header and rows; columns in `right` are right-aligned."""
    rule = ["---:" if column in right else "---" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, rule, *rows))


def listed(values: Mapping[str, object]) -> str:
    """Return names and values in one line; a list's elements are joined by "and"."""
    texts = {k: " and ".join(v) if isinstance(v, list) else v for k, v in values.items()}
    return ", ".join(f"{name} {text}" for name, text in texts.items())


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Return rows as lines of text whose columns have one width, those in `left` left-aligned."""
    columns = range(max(map(len, rows)))
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in columns]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
