from __future__ import annotations

import ctypes

import pytest

from ece408_op import settings
from ece408_op.backends.emulator import compiler, findings
from ece408_op.backends.emulator.library import load as load_library


@pytest.fixture
def load(tmp_path, kept):
    """The library of a text of CUDA, and what it is loaded from; on 2 cores, with checks."""

    def loaded(text):
        path = tmp_path / "program.cu"
        path.write_text(text)
        with settings.override(cache=kept):
            content = compiler.program(path)
            library = load_library(content)
        # What another test has left.
        findings.take()
        library.ece408_emulator_set(2, 1, 0, ctypes.c_uint64(0))
        return library, content

    return loaded
