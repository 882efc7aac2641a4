import pytest

from ece408_op import settings
from ece408_op.backends.emulator import emulator_compiler, findings
from ece408_op.backends.emulator.library import Emulation, begin
from ece408_op.backends.emulator.library import load as load_library


@pytest.fixture
def load(tmp_path, kept):
    """Return a function that compiles and loads a text of CUDA; on 2 cores, with checks."""

    def loaded(text):
        path = tmp_path / "program.cu"
        path.write_text(text)
        with settings.override(cache=kept):
            content = emulator_compiler.program(path)
            library = load_library(content)
        # Left by another test of this process: findings, and a sticky error.
        findings.take()
        begin(library, Emulation(threads=2))
        return library, content

    return loaded
