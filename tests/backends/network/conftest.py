from __future__ import annotations

import pytest

from ece408_op import settings


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """What is compiled here is compiled once."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def emulated(kept):
    """Networks run in the emulator."""
    with settings.override(cache=kept, backend="emulator"):
        yield
