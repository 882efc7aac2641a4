"""A report's views of ladders: the package's kernels, and versions of the user's kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..course.comparison import reason
from ..errors import InvalidSetting
from ..problem import ConvProblem
from . import figures, ladder, own_kernels, plan, profile_view
from .ladder import Ladder
from .plan import Options
from .profile_view import ProfileView
from .store import Result


@dataclass(frozen=True)
class LadderView:
    """A ladder and the files of its pictures, or the reason why it is missing; profiles by step."""

    device: str
    failure: str | None = None
    ladder: Ladder | None = None
    dots: str | None = None
    roofline: str | None = None
    profiles: Mapping[str, ProfileView] = field(default_factory=dict)

    def rates(self, layer: str) -> tuple[float, float, float]:
        """Return GFLOP/s, GB/s and fraction of the floor of a layer's fastest accurate step."""
        assert self.ladder is not None
        problem = ConvProblem.parse(self.ladder.layers[layer])
        step = self.ladder.fastest(layer)
        ms = step.median_ms(layer) if step else None
        assert ms is not None
        floor = self.ladder.floors_ms[layer]
        return problem.flops / ms / 1e6, problem.bytes / ms / 1e6, floor / ms

    def why_below_floor(self, layer: str) -> str:
        """Explain why a layer's fastest accurate step is faster than the floor."""
        step = self.ladder.fastest(layer) if self.ladder else None
        assert step is not None
        kernel = step.computed_by.get(layer, step.name)
        fewer = "multiplies less than the textbook loops, for which the floor counts"
        slower = "this machine was slower when its ceilings were measured"
        if "winograd" in kernel:
            return f"{kernel} {fewer}"
        # CPU kernels of other names never multiply less.
        return slower if layer in step.computed_by else f"{kernel} {fewer}, or {slower}"


def view(device: str, results: Mapping[str, Result], pictures: dict[str, str]) -> LadderView:
    """Return the view of the package's kernels on a device; their pictures are added to
    `pictures`."""
    result = results[plan.ladder_key(device)]
    if not result.ok:
        return LadderView(device, failure=reason(result.completed))
    try:
        measured = ladder.from_json(result.stdout.strip().splitlines()[-1])
    except (InvalidSetting, IndexError) as error:
        return LadderView(device, failure=f"its times cannot be read: {error}")
    return _drawn(device, device, measured, pictures)


def _drawn(
    device: str,
    name: str,
    measured: Ladder,
    pictures: dict[str, str],
    profiles: Mapping[str, ProfileView] | None = None,
) -> LadderView:
    dots, roofline = f"ladder_{name}.svg", f"roofline_{name}.svg"
    pictures[dots] = figures.ladder_dots(measured)
    pictures[roofline] = figures.roofline(measured)
    return LadderView(device, None, measured, dots, roofline, profiles or {})


def own(
    options: Options,
    ladders: Sequence[LadderView],
    results: Mapping[str, Result],
    pictures: dict[str, str],
) -> LadderView | None:
    """Return the view of the user's kernel's versions, if the report has any."""
    if not options.versions:
        return None
    device = options.versions[0].device
    base = next(each for each in ladders if each.device == device)
    result = results[plan.OWN_KEY]
    # A version that fails is also among the times.
    if result.profile is None:
        return LadderView(device, failure=reason(result.completed))
    if base.ladder is None:
        return LadderView(device, failure=base.failure)
    try:
        measured = own_kernels.ladder(options.versions, result.profile, base.ladder)
    except InvalidSetting as error:
        return LadderView(device, failure=str(error))
    profiles = {
        version.name: profile_view.view(
            f"own_{number}", results[plan.own_profile_key(number)], pictures
        )
        for number, version in enumerate(options.versions)
    }
    return _drawn(device, "own", measured, pictures, profiles)
