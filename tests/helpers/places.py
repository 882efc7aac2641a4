"""Where the checkout's files are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
HELPERS = ROOT / "tests" / "helpers"
DATA = ROOT / "tests" / "data"
# What nvcc made, which stays: sources that have not changed are not compiled again.
CUBINS = ROOT / "build" / "cubins"
