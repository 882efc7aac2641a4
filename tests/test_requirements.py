"""What pip is told to install."""

from __future__ import annotations

import re

from packaging.requirements import Requirement
from places import ROOT


def test_a_python_that_is_too_new_compiles_nothing():
    # pip installs what a build requires before it reads requires-python.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (newest,) = re.findall(r'^requires-python = ">=3\.9,<(3\.\d+)"$', text, re.M)
    (listed,) = re.findall(r"^requires = \[\n(.*?)^\]$", text, re.M | re.S)
    needed = [Requirement(line) for line in re.findall(r'^ *"(.*)",$', listed, re.M)]
    assert len(needed) == 2
    linux = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": newest}
    assert [each.name for each in needed if not each.marker or each.marker.evaluate(linux)] == [
        "setuptools"
    ]
