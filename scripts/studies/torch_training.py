"""Steps of training in PyTorch, of the networks of `training_speed`.

It runs under whichever Python has PyTorch, so it imports nothing of this package.

    python torch_training.py NETWORK BATCH THREADS

Writes PyTorch's version. Then for each line that it reads, NCHW or NHWC, it makes a step with
arrays in that layout, and writes the milliseconds.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn
from torch.nn import functional


def main() -> None:
    name, batch, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    torch.manual_seed(408)
    layouts = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
    steps = {key: Steps(name, batch, layout) for key, layout in layouts.items()}
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        print(steps[line.strip()].step(), flush=True)


class Steps:
    """A network, its optimizer and a batch of images."""

    def __init__(self, name: str, batch: int, layout: torch.memory_format) -> None:
        make, shape, classes = NETWORKS[name]
        self.net = make().to(memory_format=layout).train()
        self.x = torch.rand(batch, *shape).to(memory_format=layout)
        self.labels = torch.randint(0, classes, (batch,))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

    def step(self) -> float:
        """Its milliseconds."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.net(self.x), self.labels)
        loss.backward()
        self.optimizer.step()
        loss.item()
        return 1e3 * (time.perf_counter() - begin)


class Residual(nn.Module):
    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, filters, 3, stride, 1, bias=False),
            nn.BatchNorm2d(filters),
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, 1, 1, bias=False),
            nn.BatchNorm2d(filters),
        )
        self.beside = nn.Sequential()
        if stride > 1 or channels != filters:
            self.beside = nn.Sequential(
                nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.beside(x))


def resnet18() -> nn.Module:
    """As MXNet's resnet18_v1."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    sides = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    stages = [
        block
        for channels, filters, stride in sides
        for block in (Residual(channels, filters, stride), Residual(filters, filters, 1))
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *stages, *head)


def course() -> nn.Module:
    """As the course's 2019fa."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 5, bias=False),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 5, bias=False),
        nn.Flatten(),
        nn.Linear(24 * 29 * 29, 160),
        nn.Tanh(),
        nn.Linear(160, 10),
    )


NETWORKS = {
    "resnet18_v1": (resnet18, (3, 224, 224), 1000),
    "2019fa": (course, (1, 70, 70), 10),
}

if __name__ == "__main__":
    main()
