"""Hand-written convolution kernels as an operator of Apache MXNet.

Importing this package makes the operator `ece408_conv` known to MXNet, at once when MXNet is
loaded already, otherwise as soon as it is imported; MXNet itself is not imported by it.
"""

__version__ = "0.1.0"

from . import errors, settings
from .api import Convolution
from .checkpoint import load_checkpoint
from .mxnet_import import register_with_mxnet
from .op_log import op_times
from .problem import ConvProblem

__all__ = ["ConvProblem", "Convolution", "errors", "load_checkpoint", "op_times", "settings"]

register_with_mxnet()
