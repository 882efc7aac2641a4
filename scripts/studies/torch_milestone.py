"""The milestones' program in PyTorch: the same images, parameters and network, from the same files.

    python torch_milestone.py IMAGES.npy LABELS[.gz] MODEL.params THREADS

The network is that of a term with two convolutions. Prints the accuracy. It runs under whichever
Python has PyTorch, so it imports nothing of this package.
"""

from __future__ import annotations

import gzip
import struct
import sys
from typing import BinaryIO

import numpy as np
import torch
import torch.nn.functional as nn

_LIST, _ARRAY = 0x112, 0xF993FAC9
_TYPES = {0: "float32", 2: "float16"}


def main() -> None:
    images_path, labels_path, params_path, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    images = np.load(images_path, mmap_mode="r")
    with gzip.open(labels_path) if labels_path.endswith(".gz") else open(labels_path, "rb") as file:
        labels = torch.from_numpy(np.frombuffer(file.read(), np.uint8, offset=8).copy())
    with open(params_path, "rb") as file:
        w = read_parameters(file)
    with torch.inference_mode():
        x = torch.from_numpy(np.array(images)).unsqueeze(1).float()
        x = nn.max_pool2d(torch.tanh(nn.conv2d(x, w["arg:conv1_weight"])), 2)
        x = nn.conv2d(x, w["arg:conv2_weight"])
        x = torch.tanh(nn.linear(x.flatten(1), w["arg:fc1_weight"], w["arg:fc1_bias"]))
        x = nn.linear(x, w["arg:fc2_weight"], w["arg:fc2_bias"])
        right = (x.argmax(1) == labels).float().mean().item()
    print(f"accuracy {right:.4f}, PyTorch {torch.__version__}")


def read_parameters(file: BinaryIO) -> dict[str, torch.Tensor]:
    """The dense arrays of a file of MXNet's (NDArray::Save in its src/ndarray), as float32."""

    def take(form: str) -> tuple[int, ...]:
        return struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))

    magic, _, count = take("QQQ")
    if magic != _LIST:
        raise ValueError("not a file of MXNet's parameters")
    arrays = []
    for _ in range(count):
        kind, storage, dimensions = take("IiI")
        if (kind, storage) != (_ARRAY, 0):
            raise ValueError("an array that is not dense")
        shape = take(f"{dimensions}q")
        _, _, code = take("iii")
        if code not in _TYPES:
            raise ValueError("an array that is neither of float32 nor of float16")
        dtype = np.dtype(_TYPES[code])
        content = np.frombuffer(file.read(dtype.itemsize * int(np.prod(shape))), dtype)
        arrays.append(torch.from_numpy(content.astype(np.float32)).reshape(shape))
    (names,) = take("Q")
    return {file.read(take("Q")[0]).decode(): arrays[i] for i in range(names)}


if __name__ == "__main__":
    main()
