"""The environment variables that MXNet reads."""

from __future__ import annotations

import pytest
from cases import first

BIND = """
import ece408_op, mxnet as mx

before = dict(os.environ)
y = ece408_op.Convolution(mx.sym.Variable("x"), kernel=(3, 3), num_filter=1)
y.simple_bind(mx.cpu(), x=(1, 1, 5, 5), group2ctx={"there": mx.cpu(1)})
print([(name, before.get(name), value) for name, value in os.environ.items()
       if value != before.get(name)])
"""


@pytest.mark.parametrize(
    ("start", "value"),
    first(
        1,
        [
            ("os.environ.pop('NNVM_EXEC_MATCH_RANGE', None)", ""),
            ("os.environ['NNVM_EXEC_MATCH_RANGE'] = '8'", "8"),
        ],
    ),
)
def test_no_variable_is_added_once_mxnet_may_compute(run_python, start, value):
    """A new variable may move the environment, which MXNet's threads read in every operator."""
    result = run_python(f"import os\n{start}\n{BIND}")
    assert result.stdout == f"[('NNVM_EXEC_MATCH_RANGE', '{value}', '0')]\n", result.stderr
