import os

import pytest

from ece408_op.backends.cuda.runtime import device
from ece408_op.host.gpu import find_nvcc


@pytest.fixture(scope="session")
def nvcc():
    """Skip, with the reason, without nvcc; in CI that is a failure."""
    found = find_nvcc()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("CI has no nvcc; pip install '.[test]' brings one")
        pytest.skip("there is no nvcc; pip install '.[test]' brings one")
    return found


@pytest.fixture(scope="session")
def gpu():
    """Return the first GPU, for tests marked gpu."""
    return device.get(0)
