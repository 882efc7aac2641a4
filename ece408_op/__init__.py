"""Hand-written convolution kernels as an operator of Apache MXNet.

Importing this package makes the operator `ece408_conv` known to MXNet, at once when MXNet is
loaded already, otherwise as soon as it is imported; MXNet itself is not imported by it.
"""

from typing import Any

from . import errors, settings
from .dispatch import register_backend
from .op_log import op_times
from .operator.checkpoint import load_checkpoint
from .operator.convolution import Convolution
from .operator.gpu_network import gpu_report, to_gpu
from .operator.install import register_with_mxnet
from .operator.net_comparison import NetComparison, compare
from .operator.swap import swap, swap_checkpoint, unswap
from .problem import ConvProblem
from .version import __version__

__all__ = [
    "ConvProblem",
    "Convolution",
    "NetComparison",
    "__version__",
    "compare",
    "errors",
    "gpu_report",
    "load_checkpoint",
    "op_times",
    "register_backend",
    "settings",
    "swap",
    "swap_checkpoint",
    "to_gpu",
    "unswap",
]

register_with_mxnet()


def __getattr__(name: str) -> Any:
    # Layers are classes of Gluon's and need MXNet to exist.
    if name in ("Conv1D", "Conv2D"):
        from .operator.loading import load_mxnet

        load_mxnet()
        from .operator import gluon_layers

        return getattr(gluon_layers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
