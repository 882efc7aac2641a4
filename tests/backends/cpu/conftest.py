import pytest

from ece408_op import settings
from ece408_op.backends.cpu import native

# The baseline instruction set is slow on machines with more: `test_fuzz` draws from all.
OLDEST = pytest.mark.slow if len(native.isas()) > 1 else ()


@pytest.fixture(params=[*settings.ISAS[:-1], pytest.param(settings.ISAS[-1], marks=OLDEST)])
def isa(request):
    """Run the test with every instruction set in turn."""
    if request.param not in native.isas():
        pytest.skip(f"this CPU has no {request.param}")
    with settings.override(isa=request.param):
        yield request.param
