import pytest

import ece408_op


def test_the_package_imports_nothing_that_takes_long(run_python):
    result = run_python(
        "import sys, ece408_op\n"
        "print(sorted({'numpy', 'mxnet', 'tqdm', 'argparse'} & sys.modules.keys()))"
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_every_name_is_there_when_it_is_asked_for(run_python):
    result = run_python(
        "from ece408_op import *\n"
        "import ece408_op\n"
        "assert set(ece408_op.__all__) - {'__version__'} <= globals().keys()\n"
        "assert {'Conv2D', 'settings', 'to_gpu'} <= set(dir(ece408_op))\n"
        "print(ece408_op.Conv1D.__name__, ece408_op.Conv2D.__name__)\n"
    )
    assert (result.stdout, result.stderr) == ("Conv1D Conv2D\n", "")


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'ece408_op' has no attribute 'nothing'"):
        _ = ece408_op.nothing
