"""Server of a network's times in onnxruntime, OpenVINO and PyTorch, in a separate process.

It runs under any Python that has one of them, so it imports only the modules of this folder. It
first writes {engine: version}. It answers {"open": ONNX file, "graph": file with MXNet's JSON,
"weights": .npz, "x": .npy, "engines": names} with {}, and {"run": engine} with {"ms": ...}; {"run":
engine, "to": .npy} also writes the first output.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from serve import serve

Run = Callable[[], np.ndarray]
_TRIES = 3


def open_in_onnxruntime(engine: Any, files: dict[str, str], x: np.ndarray, threads: int) -> Run:
    options = engine.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = engine.InferenceSession(files["open"], options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda: session.run(None, {name: x})[0]


def open_in_openvino(engine: Any, files: dict[str, str], x: np.ndarray, threads: int) -> Run:
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        # The default is bfloat16 on processors that support it.
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = engine.Core().compile_model(files["open"], "CPU", settings)
    request = compiled.create_infer_request()

    def run() -> np.ndarray:
        request.infer({0: x}, share_inputs=True)
        return request.get_output_tensor(0).data

    return run


def open_in_torch(engine: Any, files: dict[str, str], x: np.ndarray, threads: int) -> Run:
    """Open the network in the faster of PyTorch's layouts."""
    from torch_network import LAYOUTS, Graph

    engine.set_num_threads(threads)
    engine.set_grad_enabled(False)
    with open(files["graph"]) as file:
        text = file.read()
    weights, data = dict(np.load(files["weights"])), engine.from_numpy(x)
    runs = []
    for layout in LAYOUTS:
        graph = Graph(text, weights, layout, "cpu")
        runs.append(lambda graph=graph: graph(data).numpy())
    return min(runs, key=lambda run: min(_seconds(run) for _ in range(_TRIES)))


def _seconds(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


ENGINES = {
    "onnxruntime": open_in_onnxruntime,
    "openvino": open_in_openvino,
    "torch": open_in_torch,
}


def installed() -> dict[str, Any]:
    found = {}
    for name in ENGINES:
        try:
            found[name] = importlib.import_module(name)
        except ImportError:
            continue
    return found


def main() -> None:
    engines, threads = installed(), int(os.environ["OMP_NUM_THREADS"])
    runs: dict[str, Run] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "open" in request:
            x = np.load(request["x"])
            runs.clear()
            for name in request["engines"]:
                runs[name] = ENGINES[name](engines[name], request, x, threads)
            return {}
        begin = time.perf_counter()
        found = runs[request["run"]]()
        spent = 1e3 * (time.perf_counter() - begin)
        if "to" in request:
            np.save(request["to"], found)
        return {"ms": spent}

    serve({name: engine.__version__ for name, engine in engines.items()}, answer)


if __name__ == "__main__":
    main()
