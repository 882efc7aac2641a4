import pytest

from ece408_op import settings
from ece408_op.backends.cpu import native

# The best instruction set, and in slow tests the others: `test_fuzz` draws from all.
OTHERS = {isa: pytest.mark.slow for isa in settings.ISAS if isa != native.isas()[0]}


@pytest.fixture(params=[pytest.param(isa, marks=OTHERS.get(isa, ())) for isa in settings.ISAS])
def isa(request):
    """Run the test with every instruction set in turn."""
    if request.param not in native.isas():
        pytest.skip(f"this CPU has no {request.param}")
    with settings.override(isa=request.param):
        yield request.param
