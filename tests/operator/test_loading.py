"""Import of MXNet."""

import sys

import pytest

from ece408_op.errors import MXNetMissing
from ece408_op.operator.loading import load_mxnet


@pytest.mark.slow
def test_statistics_are_imported_when_mxnet_uses_them(mx, run_python):
    result = run_python(
        "import sys\n"
        "import ece408_op, mxnet as mx\n"
        "print('scipy.stats' in sys.modules, mx.test_utils.ss.norm.cdf(0))\n"
        "import scipy.stats\n"
        "print(mx.test_utils.ss.norm is scipy.stats.norm is mx.contrib.quantization.stats.norm)\n"
        "print(type(scipy.stats).__name__)\n"
    )
    assert result.stdout.splitlines() == ["False 0.5", "True", "module"], result.stderr


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 has no distutils")
def test_mxnet_is_imported_without_setuptools(run_python):
    result = run_python(
        "import sys, warnings\n"
        "warnings.simplefilter('error')\n"
        "import _distutils_hack\n"
        "hooks = [type(each).__name__ for each in sys.meta_path]\n"
        "import ece408_op\n"
        "warnings.simplefilter('ignore')\n"
        "import mxnet as mx\n"
        "warnings.simplefilter('error')\n"
        "print(any('distutils' in name or 'setuptools' in name for name in sys.modules\n"
        "          if name != '_distutils_hack'))\n"
        "print([type(each).__name__ for each in sys.meta_path][-len(hooks):] == hooks)\n"
        "import setuptools, distutils.version\n"
        "print('setuptools' in distutils.__file__)\n"
        "print(mx.numpy_op_fallback.StrictVersion('1.2') < '1.3')\n"
    )
    assert result.stdout.split() == ["False", "True", "True", "True"], result.stderr


@pytest.mark.slow
def test_another_who_imports_them_meanwhile_gets_them(run_python):
    result = run_python(
        "from ece408_op.operator import lazy_imports\n"
        "with lazy_imports._imported_when_used('scipy.stats'):\n"
        "    from scipy.stats import norm\n"
        "    import scipy.stats\n"
        "    import scipy.stats._stats_py\n"
        "print(norm is scipy.stats.norm, norm.cdf(0), type(scipy.stats).__name__)\n"
    )
    assert result.stdout.splitlines() == ["True 0.5 module"], result.stderr


@pytest.mark.slow
def test_a_program_that_has_them_keeps_them(run_python):
    result = run_python(
        "import scipy.stats\nimport ece408_op, mxnet\nprint(mxnet.test_utils.ss is scipy.stats)\n"
    )
    assert result.stdout == "True\n", result.stderr


def test_a_python_without_mxnet_is_told_which_have_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mxnet", None)
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    with pytest.raises(
        MXNetMissing, match=r"^MXNet is not installed .* needs Python 3\.9 to 3\.12"
    ):
        load_mxnet()
