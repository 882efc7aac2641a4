"""Server of an MXNet network's training times in PyTorch, in a separate process.

It runs under any Python that has PyTorch, so it imports only the modules of this folder. It first
writes its version. It answers {"graph": file with MXNet's JSON, "weights": .npz, "x": .npy,
"labels": .npy, "rate": ..., "momentum": ...} with {}, and {"run": variant, "steps": number}, steps
of training, with {"ms": of one}. A variant is a layout for the CPU, or a layout and a precision,
such as "NHWC tf32", for a GPU, to which each step copies its images; the loss of the last step is
read.
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

    def __init__(self, request: dict[str, Any], variant: str) -> None:
        layout, *precision = variant.split()
        self._tf32 = precision == ["tf32"]
        self._device = "cuda" if precision else "cpu"
        with open(request["graph"]) as file:
            text = file.read()
        weights = dict(np.load(request["weights"]))
        self._graph = Graph(text, weights, layout, self._device)
        learned = self._graph.weights(_STATES)
        for each in learned:
            each.requires_grad_()
        self._x = torch.from_numpy(np.load(request["x"]))
        self._labels = torch.from_numpy(np.load(request["labels"])).long()
        if precision:
            self._x, self._labels = self._x.pin_memory(), self._labels.pin_memory()
        self._optimizer = torch.optim.SGD(learned, lr=request["rate"], momentum=request["momentum"])

    def run(self, steps: int) -> dict[str, float]:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self._tf32
        begin = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            given = self._x, self._labels
            x, labels = (each.to(self._device, non_blocking=True) for each in given)
            loss = functional.cross_entropy(self._graph(x), labels)
            loss.backward()
            self._optimizer.step()
        # Waits for all of them.
        loss.item()
        return {"ms": 1e3 * (time.perf_counter() - begin) / steps}


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.backends.cudnn.benchmark = True
    opened: dict[str, Any] = {}
    steps: dict[str, Steps] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "graph" in request:
            steps.clear()
            opened.update(request)
            return {}
        variant = request["run"]
        if variant not in steps:
            steps[variant] = Steps(opened, variant)
        return steps[variant].run(request["steps"])

    serve({"torch": torch.__version__}, answer)


if __name__ == "__main__":
    main()
