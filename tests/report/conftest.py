import pytest
from played import Player

from ece408_op.course import comparison
from ece408_op.course.course_terms import TERMS
from ece408_op.report import figures, make, overview, plan, timeline


@pytest.fixture
def drawing_player(monkeypatch):
    """Run the report's programs by a `Player` without a GPU."""
    played = Player()
    monkeypatch.setattr(comparison, "prepare_data", lambda jobs: None)
    monkeypatch.setattr(make, "run_process", played)
    return played


@pytest.fixture
def player(drawing_player, monkeypatch):
    """The same, without drawing, which takes time."""
    for module in (timeline, overview):
        monkeypatch.setattr(module, "draw", lambda *of: "<svg/>")
    for name in ("ladder_dots", "roofline"):
        monkeypatch.setattr(figures, name, lambda of: "<svg/>")
    return drawing_player


@pytest.fixture
def options():
    return plan.Options(TERMS["2019fa"], (100, 1000))
