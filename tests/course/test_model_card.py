"""models/README.md is true of the files beside it."""

import hashlib
import re

import pytest

from ece408_op.cli.main import execute
from ece408_op.course import model_card
from ece408_op.course.course_terms import TERMS
from ece408_op.files import resources

FOLDER = resources.models_dir()
TEXT = (FOLDER / "README.md").read_text()


def test_checksums_are_those_of_all_files():
    stated = dict(reversed(line) for line in re.findall(r"^    ([0-9a-f]{64})  (\S+)$", TEXT, re.M))
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.parent != FOLDER]
    assert stated == {
        f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    assert sum(path.stat().st_size for path in files) < 26 << 20


def test_every_recipe_is_stated():
    for term in TERMS.values():
        assert f"python scripts/train.py {term.name}\n" in TEXT
    assert "python scripts/train.py 2017fa --model ece408-low\n" in TEXT


@pytest.mark.slow
def test_the_weak_model_is_as_weak_and_sensitive_as_stated(mx, fashion_mnist):
    weak, strong = (
        model_card.measure(TERMS["2017fa"], model) for model in ("ece408-low", "ece408-high")
    )
    assert 0.60 <= weak.correctness[-1] <= 0.66
    assert strong.correctness[-1] >= 0.90
    assert sum(weak.changed) >= 3 * sum(strong.changed)
    for line in model_card.table([weak, strong]).splitlines()[2:]:
        # Rounding on another CPU may decide a close result.
        stated = TEXT.splitlines()[[row[:30] for row in TEXT.splitlines()].index(line[:30])]
        found, wanted = (list(map(float, re.findall(r"[\d.]+", row)[1:])) for row in (line, stated))
        assert found == pytest.approx(wanted, abs=5)
        assert found[:3] == pytest.approx(wanted[:3], abs=0.002)


def test_the_command_writes_the_page(mx, fashion_mnist, tmp_path, capsys, monkeypatch):
    card = model_card.Card(TERMS["2019sp"], "baseline", (0.9, 0.91, 0.92), (1, 2, 3))
    monkeypatch.setattr(model_card, "measure", lambda term, model: card)
    page = tmp_path / "page.md"
    assert execute(["models", "--term", "2019sp", "--output", str(page)]) == 0
    row = "| 2019sp | baseline | 0.9 | 0.91 | 0.92 | 1, 2, 3 |"
    assert row in capsys.readouterr().out
    assert row in page.read_text()
    assert execute(["models", "--term", "1999fa"]) == 4
