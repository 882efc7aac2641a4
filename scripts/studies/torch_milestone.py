"""The milestones' program in PyTorch: the same images, parameters and network.

python torch_milestone.py IMAGES.npy OTHERS.npz THREADS

OTHERS has the labels, and the parameters by name of a term with two convolutions. Prints the
accuracy. It runs under any Python that has PyTorch, so it imports nothing of this package.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch.nn.functional as nn


def main() -> None:
    images, others, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    w = {name: torch.from_numpy(array) for name, array in np.load(others).items()}
    with torch.inference_mode():
        x = torch.from_numpy(np.array(np.load(images, mmap_mode="r"))).unsqueeze(1).float()
        x = nn.max_pool2d(torch.tanh(nn.conv2d(x, w["conv1_weight"])), 2)
        x = nn.conv2d(x, w["conv2_weight"])
        x = torch.tanh(nn.linear(x.flatten(1), w["fc1_weight"], w["fc1_bias"]))
        x = nn.linear(x, w["fc2_weight"], w["fc2_bias"])
        right = (x.argmax(1) == w["labels"]).float().mean().item()
    print(f"accuracy {right:.4f}, PyTorch {torch.__version__}")


if __name__ == "__main__":
    main()
