"""Server of an MXNet network's training times in PyTorch on the CPU, in a separate process.

It runs under any Python that has PyTorch, so it imports only the modules of this folder. It first
writes its version. It answers {"graph": file with MXNet's JSON, "weights": .npz, "x": .npy,
"labels": .npy, "rate": ..., "momentum": ...} with {}, and {"run": layout}, a step of training, with
{"ms": ...}.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
from serve import serve
from torch.nn import functional
from torch_network import Graph

# States that the forward pass updates, not the optimizer.
_STATES = ("running_mean", "running_var")


class Steps:
    """A network, its optimizer and a batch of images."""

    def __init__(self, request: dict[str, Any], layout: str) -> None:
        with open(request["graph"]) as file:
            text = file.read()
        weights = dict(np.load(request["weights"]))
        self._graph = Graph(text, weights, layout, "cpu")
        learned = self._graph.weights(_STATES)
        for each in learned:
            each.requires_grad_()
        self._x = torch.from_numpy(np.load(request["x"]))
        self._labels = torch.from_numpy(np.load(request["labels"])).long()
        self._optimizer = torch.optim.SGD(learned, lr=request["rate"], momentum=request["momentum"])

    def step(self) -> dict[str, float]:
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        loss = functional.cross_entropy(self._graph(self._x), self._labels)
        loss.backward()
        self._optimizer.step()
        return {"ms": 1e3 * (time.perf_counter() - begin)}


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    opened: dict[str, Any] = {}
    steps: dict[str, Steps] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "graph" in request:
            steps.clear()
            opened.update(request)
            return {}
        layout = request["run"]
        if layout not in steps:
            steps[layout] = Steps(opened, layout)
        return steps[layout].step()

    serve({"torch": torch.__version__}, answer)


if __name__ == "__main__":
    main()
