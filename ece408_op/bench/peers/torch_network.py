"""Server of an MXNet network's times in PyTorch on the GPU, from host to host, in a separate
process.

It runs under any Python that has PyTorch, so it imports only `serve` of this package. It first
writes its versions. It answers {"open": file with MXNet's JSON, "weights": .npz, "x": .npy} with
{}; {"run": variant} with {"ms": ...}, a pass between page-locked arrays; {"run": variant, "to":
.npy, "images": [number, ...]} also writes the outputs of these images. A variant is a layout, a
precision and a way to run it, such as "NHWC float32 eager"; "graph" is a CUDA graph of the whole
pass, with normalisation folded into convolutions. An unknown operator ends the process.
"""

from __future__ import annotations

import ast
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from serve import serve
from torch.nn import functional

LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
# cudnn.benchmark tries its algorithms in the first of these passes.
_WARM_UP = 3
Tensors = list[torch.Tensor]


class Attributes:
    """Parse a node's attributes from MXNet's strings."""

    def __init__(self, node: dict[str, Any]) -> None:
        self._given = node.get("attrs", {})

    def get(self, name: str, default: Any) -> Any:
        text = self._given.get(name, "None")
        if text in ("None", "()"):
            return default
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text


def convolution(a: Attributes, x: torch.Tensor, w: torch.Tensor, *bias: torch.Tensor):
    steps = [a.get("stride", (1, 1)), a.get("pad", (0, 0)), a.get("dilate", (1, 1))]
    return functional.conv2d(x, w, bias[0] if bias else None, *steps, a.get("num_group", 1))


def dense(a: Attributes, x: torch.Tensor, w: torch.Tensor, *bias: torch.Tensor):
    x = x.flatten(1) if a.get("flatten", True) else x
    return functional.linear(x, w, bias[0] if bias else None)


def normalisation(a: Attributes, x: torch.Tensor, *arrays: torch.Tensor):
    gamma, beta, mean, variance = arrays
    gamma = None if a.get("fix_gamma", True) else gamma
    # Training needs gradients.
    train = torch.is_grad_enabled()
    kept = 1 - a.get("momentum", 0.9)
    return functional.batch_norm(x, mean, variance, gamma, beta, train, kept, a.get("eps", 1e-3))


def pooling(a: Attributes, x: torch.Tensor):
    largest = a.get("pool_type", "max") == "max"
    if a.get("global_pool", False):
        of_all = functional.adaptive_max_pool2d if largest else functional.adaptive_avg_pool2d
        return of_all(x, 1)
    kernel, pad = a.get("kernel", None), a.get("pad", (0, 0))
    stride = a.get("stride", (1, 1))
    full = a.get("pooling_convention", "valid") == "full"
    if largest:
        return functional.max_pool2d(x, kernel, stride, pad, 1, full)
    return functional.avg_pool2d(x, kernel, stride, pad, full, a.get("count_include_pad", True))


def deconvolution(a: Attributes, x: torch.Tensor, w: torch.Tensor, *bias: torch.Tensor):
    steps = [a.get("stride", (1, 1)), a.get("pad", (0, 0)), a.get("adj", (0, 0))]
    steps += [a.get("num_group", 1), a.get("dilate", (1, 1))]
    return functional.conv_transpose2d(x, w, bias[0] if bias else None, *steps)


def reshaped(a: Attributes, x: torch.Tensor):
    codes = a.get("shape", None)
    if any(code < -1 for code in codes):
        raise ValueError(f"shape {codes} is not supported")
    return x.reshape([x.shape[k] if code == 0 else code for k, code in enumerate(codes)])


def summed(a: Attributes, x: torch.Tensor):
    return x.sum(a.get("axis", None), keepdim=a.get("keepdims", False))


def resized(a: Attributes, x: torch.Tensor):
    size, aligned = (a.get("height", 1), a.get("width", 1)), a.get("align_corners", True)
    return functional.interpolate(x, size, mode="bilinear", align_corners=bool(aligned))


def activation(a: Attributes, x: torch.Tensor):
    kinds = {"relu": functional.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}
    return kinds[a.get("act_type", None)](x)


OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "Convolution": convolution,
    "FullyConnected": dense,
    "BatchNorm": normalisation,
    "Pooling": pooling,
    "Activation": activation,
    "Flatten": lambda a, x: x.flatten(1),
    "Dropout": lambda a, x: x,
    "_copy": lambda a, x: x,
    "Concat": lambda a, *parts: torch.cat(parts, a.get("dim", 1)),
    "elemwise_add": lambda a, x, y: x + y,
    "elemwise_mul": lambda a, x, y: x * y,
    "broadcast_mul": lambda a, x, y: x * y,
    "_plus_scalar": lambda a, x: x + a.get("scalar", None),
    "_mul_scalar": lambda a, x: x * a.get("scalar", None),
    "_div_scalar": lambda a, x: x / a.get("scalar", None),
    "sum": summed,
    "expand_dims": lambda a, x: x.unsqueeze(a.get("axis", None)),
    "SwapAxis": lambda a, x: x.transpose(a.get("dim1", 0), a.get("dim2", 0)),
    "Reshape": reshaped,
    "_contrib_AdaptiveAvgPooling2D": lambda a, x: functional.adaptive_avg_pool2d(
        x, a.get("output_size", 1)
    ),
    "_contrib_BilinearResize2D": resized,
    "Deconvolution": deconvolution,
    "clip": lambda a, x: x.clamp(a.get("a_min", None), a.get("a_max", None)),
    "softmax": lambda a, x: x.softmax(a.get("axis", -1)),
}


def folded(nodes: list[dict[str, Any]], weights: dict[str, np.ndarray]) -> None:
    """Fold each BatchNorm that is a convolution's only reader into the convolution's weights."""
    reads = [source for node in nodes for source, *_ in node["inputs"]]
    for node in nodes:
        if node["op"] != "BatchNorm":
            continue
        made = nodes[node["inputs"][0][0]]
        arrays = [*node["inputs"], *made["inputs"][1:]]
        if made["op"] != "Convolution" or any(reads.count(each) > 1 for each, *_ in arrays):
            continue
        a = Attributes(node)
        gamma, beta, mean, variance = (
            weights[nodes[each]["name"]].astype(np.float64) for each, *_ in node["inputs"][1:]
        )
        factor = (1 if a.get("fix_gamma", True) else gamma) / np.sqrt(variance + a.get("eps", 1e-3))
        w, *bias = (nodes[each]["name"] for each, *_ in made["inputs"][1:])
        shift = beta - factor * (mean - (weights[bias[0]] if bias else 0))
        weights[w] = (weights[w] * factor.reshape(-1, 1, 1, 1)).astype(np.float32)
        # The normalisation's beta is the convolution's bias from now on.
        at = node["inputs"][2]
        weights[nodes[at[0]]["name"]] = shift.astype(np.float32)
        made["inputs"][2:] = [at]
        node.update(op="_copy", inputs=node["inputs"][:1])


class Graph:
    """A network with its weights on a device in a layout."""

    def __init__(
        self,
        text: str,
        weights: dict[str, np.ndarray],
        layout: str,
        device: str = "cuda",
        folds: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        document = json.loads(text)
        self._nodes = document["nodes"]
        if folds:
            folded(self._nodes, weights)
        self._calls = [
            (
                number,
                OPERATORS[node["op"]],
                Attributes(node),
                [source for source, *_ in node["inputs"]],
            )
            for number, node in enumerate(self._nodes)
            if node["op"] != "null"
        ]
        self._head = document["heads"][0][0]
        # By call: the arrays that no later call reads, freed for reuse.
        last = {source: call for call, *_, sources in self._calls for source in sources}
        self._read_last = {
            call: {source for source in sources if last[source] == call} - {self._head}
            for call, *_, sources in self._calls
        }
        self._layout = LAYOUTS[layout]
        self._held: dict[int, torch.Tensor] = {}
        self._data = 0
        for number, node in enumerate(self._nodes):
            if node["op"] == "null" and node["name"] == "data":
                self._data = number
            elif node["op"] == "null":
                array = torch.from_numpy(weights[node["name"]]).to(device, dtype)
                self._held[number] = self.placed(array)

    def weights(self, but: Sequence[str]) -> Tensors:
        """Return the parameters whose names do not end with one of these."""
        names = {number: node["name"] for number, node in enumerate(self._nodes)}
        return [each for n, each in self._held.items() if not names[n].endswith(tuple(but))]

    def placed(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous(memory_format=self._layout) if x.dim() == 4 else x

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = {**self._held, self._data: self.placed(x)}
        for number, call, attributes, sources in self._calls:
            made[number] = call(attributes, *(made[source] for source in sources))
            for source in self._read_last[number]:
                del made[source]
        return made[self._head]


class Variant:
    """A network and its input in page-locked memory."""

    def __init__(self, files: dict[str, str], name: str) -> None:
        layout, precision, way = name.split()
        with open(files["open"]) as file:
            text = file.read()
        self._tf32 = precision == "tf32"
        dtype = torch.float16 if precision == "float16" else torch.float32
        weights = dict(np.load(files["weights"]))
        self._graph = Graph(text, weights, layout, folds=way == "graph", dtype=dtype)
        self._x = torch.from_numpy(np.load(files["x"])).to(dtype).pin_memory()
        self.y = self._network().cpu().pin_memory()
        self._pass = self._eager
        if way == "graph":
            self._pass = self._captured().replay
        for _ in range(_WARM_UP):
            self.run()

    def run(self) -> float:
        """Return the milliseconds of a pass."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self._pass()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    def _captured(self) -> torch.cuda.CUDAGraph:
        # As PyTorch's manual asks, warmed up on another stream.
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._eager()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._eager()
        return graph

    def _eager(self) -> None:
        self.y.copy_(self._network(), non_blocking=True)

    def _network(self) -> torch.Tensor:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self._tf32
        return self._graph(self._x.to("cuda", non_blocking=True))


def main() -> None:
    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)
    files: dict[str, str] = {}
    variants: dict[str, Variant] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "open" in request:
            variants.clear()
            torch.cuda.empty_cache()
            files.update(request)
            return {}
        name = request["run"]
        if name not in variants:
            variants[name] = Variant(files, name)
        found = variants[name].run()
        if "to" in request:
            np.save(request["to"], variants[name].y[request["images"]].float().numpy())
        return {"ms": found}

    versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    serve({**versions, "gpu": torch.cuda.get_device_name(0)}, answer)


if __name__ == "__main__":
    main()
