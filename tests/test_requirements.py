"""Requirements for pip."""

import re

from packaging.requirements import Requirement
from places import ROOT


def test_a_python_that_is_too_new_compiles_nothing():
    # pip installs build requirements before it reads requires-python, and some versions of pip also
    # look for the package's requirements first.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (newest,) = re.findall(r'^requires-python = ">=3\.9,<(3\.\d+)"$', text, re.M)
    linux = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": newest}
    pure = {"argcomplete", "tqdm", "setuptools"}
    for name, left in (("requires", {"setuptools"}), ("dependencies", pure), ("cpu", set())):
        (listed,) = re.findall(rf"^{name} = \[(.*?)\]$", text, re.M | re.S)
        needed = [Requirement(line) for line in re.findall(r'"(.*?)",?$', listed, re.M)]
        assert len(needed) > len(left)
        taken = {each.name for each in needed if not each.marker or each.marker.evaluate(linux)}
        assert taken == left
