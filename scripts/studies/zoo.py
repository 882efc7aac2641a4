"""Networks of MXNet's model zoo with random weights, and differences of outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ece408_op.bench.tune_targets import ZOO
from ece408_op.operator.loading import load_mxnet

# The side of the square images that each network takes.
NETWORKS = ZOO


def build(name: str, batch: int = 1, seed: int = 408) -> tuple[Any, Any]:
    """Return a network of the zoo with random weights, and an input for it, (batch, 3, side, side).

    The last layer is scaled so that the largest output has magnitude 1.
    """
    mx = load_mxnet()
    mx.random.seed(seed)
    net = mx.gluon.model_zoo.vision.get_model(name, prefix=f"{name.replace('.', '_')}_")
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    side = NETWORKS.get(name, 224)
    x = mx.nd.random.uniform(-1, 1, shape=(batch, 3, side, side))
    largest = float(net(x).abs().max().asscalar())
    weights = [p for key, p in net.collect_params().items() if key.endswith("weight")]
    weights[-1].set_data(weights[-1].data() / largest)
    return net, x


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return max |found - expected| / max |expected|; infinite if `found` is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def export(net: Any, folder: Path, **arrays: Any) -> dict[str, str]:
    """Write the files from which PyTorch builds the network: MXNet's JSON ("graph"), its weights,
    and arrays."""
    paths = {name: folder / f"{name}.npy" for name in arrays}
    for name, array in arrays.items():
        np.save(paths[name], array.asnumpy())
    paths.update(graph=folder / "graph.json", weights=folder / "weights.npz")
    net(load_mxnet().sym.Variable("data")).save(str(paths["graph"]))
    weights = {p.name: p.data().asnumpy() for p in net.collect_params().values()}
    np.savez(paths["weights"], **weights)  # type: ignore[arg-type]
    return {name: str(path) for name, path in paths.items()}
