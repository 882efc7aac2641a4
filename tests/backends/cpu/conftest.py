from __future__ import annotations

import pytest

from ece408_op import settings
from ece408_op.backends.cpu import native


@pytest.fixture(params=settings.ISAS)
def isa(request):
    """Every instruction set in turn, set as the one to use."""
    if request.param not in native.isas():
        pytest.skip(f"this CPU has no {request.param}")
    with settings.override(isa=request.param):
        yield request.param
