"""Tables of activities summed by name, in nvprof's columns, units and order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from .activities import API, ON_GPU, OP_CALL, OPERATOR, Activity, Profile

# The course's reports list the entries that make up this fraction of the time.
MARK = 0.9
_HEADER = "Time(%)      Time     Calls       Avg       Min       Max  Name"
_UNITS = (("us", 1e3), ("ms", 1e6), ("s", 1e9))
_WIDTH = 8  # of a time with its unit


@dataclass(frozen=True)
class Row:
    """All activities of one name: number, times in nanoseconds, and fraction (0 to 1) of the time
    of all activities in the table."""

    name: str
    calls: int
    total_ns: int
    min_ns: int
    max_ns: int
    share: float

    @property
    def avg_ns(self) -> float:
        return self.total_ns / self.calls


@dataclass(frozen=True)
class Section:
    """A table of a profile: its title, and its rows as `summarize` sorts them."""

    title: str
    rows: tuple[Row, ...]


def summarize(activities: Iterable[Activity]) -> tuple[Row, ...]:
    """Return a row per name, the largest time first; equal ones by name."""
    durations: dict[str, list[int]] = defaultdict(list)
    for activity in activities:
        durations[activity.name].append(activity.duration_ns)
    whole = sum(map(sum, durations.values()))
    rows = [
        Row(name, len(each), sum(each), min(each), max(each), sum(each) / whole if whole else 0.0)
        for name, each in durations.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.total_ns, row.name)))


def marked(rows: Iterable[Row]) -> int:
    """Return the number of first rows that make up 90% of the time."""
    total = 0.0
    for count, row in enumerate(rows, start=1):
        total += row.share
        # Fractions are rounded: an exact sum of 90% must be recognised.
        if total >= MARK - 1e-9:
            return count
    return 0


def sections(profile: Profile) -> list[Section]:
    """Return the non-empty tables of a profile, those of the GPU first."""
    parts = (
        ("GPU activities", ON_GPU),
        ("CUDA API calls", (API,)),
        ("Operators: MXNet's, and ours by layer and kernel", (OPERATOR, OP_CALL)),
    )
    found = (Section(title, summarize(profile.of_kinds(*kinds))) for title, kinds in parts)
    return [section for section in found if section.rows]


def text(rows: Iterable[Row]) -> str:
    """Return the table in nvprof's columns; the entries above its dashed line make up 90%."""
    rows = tuple(rows)
    last = marked(rows)
    lines = [_HEADER]
    for number, row in enumerate(rows, start=1):
        lines.append(_line(row))
        if number == last:
            reached = sum(each.share for each in rows[:last])
            lines.append(f"------- the entries above make up 90% of the time ({reached:.2%})")
    return "\n".join(lines)


def _line(row: Row) -> str:
    times = [f"{time(ns):>10}" for ns in (row.avg_ns, row.min_ns, row.max_ns)]
    total = f"{time(row.total_ns):>10}"
    return f"{row.share:7.2%}{total}{row.calls:>10}{''.join(times)}  {row.name}"


def time(ns: float) -> str:
    """Format nanoseconds as nvprof does: 224ns, 1.1530us, 16.793ms, 1.99464s."""
    if round(ns) < 1000:
        return f"{round(ns)}ns"
    unit, size = next((each for each in _UNITS if ns < 999.995 * each[1]), _UNITS[-1])
    places = _WIDTH - len(unit)
    value = max(1.0, ns / size)
    decimals = max(0, places - 1 - len(str(int(value))))
    # Rounding up may have added a digit; the last one is then a zero.
    return f"{value:.{decimals}f}"[:places] + unit
