"""A report's view of a profile: tables, rates, the time line, sums."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from ..course.comparison import reason
from ..errors import InvalidSetting
from ..profile import activities, profile_summary, tables
from ..profile.activities import API, MEMCPY, ON_GPU, Profile
from . import timeline
from .store import Result


@dataclass(frozen=True)
class Table:
    """Rows that make up most of the time, as text, and the number of `others`."""

    title: str
    most: str
    rest: str
    others: int

    @staticmethod
    def of(section: tables.Section) -> Table:
        header, *lines = tables.text(section.rows).splitlines()
        # The line about the others follows the largest entries.
        count = min(tables.marked(section.rows) + 1, len(lines))
        most, rest = [header, *lines[:count]], [header, *lines[count:]]
        return Table(section.title, "\n".join(most), "\n".join(rest), len(lines) - count)


@dataclass(frozen=True)
class ProfileView:
    """A profile's tables, its time line's file, and sums in milliseconds.

    `failure` says why the profile is missing; everything else is then empty.
    """

    failure: str | None = None
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    rates: str | None = None
    timeline: str | None = None
    gpu_ms: float = 0.0
    copies_ms: float = 0.0
    api_ms: float = 0.0
    largest_call: str = ""


def view(name: str, result: Result, pictures: MutableMapping[str, str]) -> ProfileView:
    """Return the view of a program's profile; its time line is added to `pictures`."""
    if result.profile is None or not result.ok:
        return ProfileView(failure=reason(result.completed))
    try:
        profile = activities.from_json(result.profile)
    except InvalidSetting as error:
        return ProfileView(failure=str(error))
    file = f"timeline_{name}.svg"
    drawn = timeline.draw(profile)
    if drawn is not None:
        pictures[file] = drawn
    api = tables.summarize(profile.of_kinds(API))
    return ProfileView(
        tables=tuple(map(Table.of, tables.sections(profile))),
        notes=profile.notes,
        rates=profile_summary.rates_table(profile),
        timeline=file if drawn is not None else None,
        gpu_ms=_sum_ms(profile, *ON_GPU),
        copies_ms=_sum_ms(profile, MEMCPY),
        api_ms=_sum_ms(profile, API),
        largest_call=api[0].name if api else "",
    )


def _sum_ms(profile: Profile, *kinds: str) -> float:
    return sum(each.duration_ns for each in profile.of_kinds(*kinds)) / 1e6
