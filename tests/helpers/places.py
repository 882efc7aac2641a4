"""Paths in the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
HELPERS = ROOT / "tests" / "helpers"
DATA = ROOT / "tests" / "data"
# What compilers make, kept between runs: unchanged sources are not compiled again.
CUBINS, KEPT = ROOT / "build" / "cubins", ROOT / "build" / "kept"
