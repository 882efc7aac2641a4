from __future__ import annotations

import pytest

from ece408_op import settings
from ece408_op.backends.emulator import emulator_compiler, findings
from ece408_op.backends.emulator.library import Emulation, begin
from ece408_op.backends.emulator.library import load as load_library


@pytest.fixture
def load(tmp_path, kept):
    """The library of a text of CUDA, and what it is loaded from; on 2 cores, with checks."""

    def loaded(text):
        path = tmp_path / "program.cu"
        path.write_text(text)
        with settings.override(cache=kept):
            content = emulator_compiler.program(path)
            library = load_library(content)
        # What another test of this process has left: findings, and an error that stays.
        findings.take()
        begin(library, Emulation(threads=2))
        return library, content

    return loaded
