"""Hand-written convolution kernels as an operator of Apache MXNet.

Importing this package registers the operator `ece408_conv` with MXNet, immediately if MXNet is
loaded, else when it is imported. The package itself does not import MXNet.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .operator.on_import import register_with_mxnet

if TYPE_CHECKING:
    from . import errors, settings
    from .dispatch import register_backend
    from .network.loaded import LoadedNetwork, load_network
    from .op_log import op_times
    from .operator.checkpoint import load_checkpoint
    from .operator.convolution import Convolution
    from .operator.frozen_network import gpu_report, to_cpu, to_gpu
    from .operator.net_comparison import NetComparison, compare
    from .operator.pinned_arrays import page_locked
    from .operator.swapping import swap, swap_checkpoint, unswap
    from .problem import ConvProblem
    from .version import __version__

__all__ = [
    "ConvProblem",
    "Convolution",
    "LoadedNetwork",
    "NetComparison",
    "__version__",
    "compare",
    "errors",
    "gpu_report",
    "load_checkpoint",
    "load_network",
    "op_times",
    "page_locked",
    "register_backend",
    "settings",
    "swap",
    "swap_checkpoint",
    "to_cpu",
    "to_gpu",
    "unswap",
]

# The modules of public names. They are imported at first use, so that a program can start NVIDIA's
# driver and import NumPy at the same time.
_MODULES = {
    "ConvProblem": "problem",
    "Convolution": "operator.convolution",
    "NetComparison": "operator.net_comparison",
    "__version__": "version",
    "compare": "operator.net_comparison",
    "gpu_report": "operator.frozen_network",
    "LoadedNetwork": "network.loaded",
    "load_checkpoint": "operator.checkpoint",
    "load_network": "network.loaded",
    "op_times": "op_log",
    "page_locked": "operator.pinned_arrays",
    "register_backend": "dispatch",
    "swap": "operator.swapping",
    "swap_checkpoint": "operator.swapping",
    "to_cpu": "operator.frozen_network",
    "to_gpu": "operator.frozen_network",
    "unswap": "operator.swapping",
}
# Subclasses of Gluon's, which need MXNet.
_OF_GLUON = {
    **dict.fromkeys(("Conv1D", "Conv2D"), "operator.gluon_layers"),
    "Trainer": "operator.trainer",
}

register_with_mxnet()


def __getattr__(name: str) -> Any:
    if name in ("errors", "settings"):
        return importlib.import_module(f".{name}", __name__)
    if name in _OF_GLUON:
        from .operator.loading import load_mxnet

        load_mxnet()
        module = _OF_GLUON[name]
    elif name in _MODULES:
        module = _MODULES[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f".{module}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OF_GLUON})
