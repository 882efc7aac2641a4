import pytest

from ece408_op import settings


@pytest.fixture(scope="module", autouse=True)
def _kept(kept):
    """Compile each text once for all tests."""
    with settings.override(cache=kept):
        yield
