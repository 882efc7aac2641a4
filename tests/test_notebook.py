"""docs/own_model.ipynb runs, and prints what it shows."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from places import ROOT
from transcripts import pattern


def _printed(cell):
    """Return a cell's output as text; for a value with a table, the table."""
    texts = []
    for each in cell.get("outputs", []):
        if each.output_type == "stream" and each.name == "stdout":
            texts.append(each.text)
        elif each.output_type == "execute_result":
            texts.append(each.data.get("text/html", each.data["text/plain"]))
    return "".join(texts).rstrip("\n") + "\n"


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    shown = nbformat.read(ROOT / "docs" / "own_model.ipynb", as_version=4)
    ran = nbformat.from_dict(shown)
    beside = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", f"{beside}{os.pathsep}{os.environ['PATH']}")
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(ran, timeout=300, kernel_name="python3", resources=resources).execute()
    pairs = [pair for pair in zip(shown.cells, ran.cells) if pair[0].cell_type == "code"]
    assert sum(bool(before.outputs) for before, _ in pairs) == 5
    for before, after in pairs:
        assert re.fullmatch(pattern(_printed(before)), _printed(after)), _printed(after)
