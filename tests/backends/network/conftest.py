from __future__ import annotations

import pytest

from ece408_op import settings


@pytest.fixture
def emulated(kept):
    """Networks run in the emulator."""
    with settings.override(cache=kept, backend="emulator"):
        yield
