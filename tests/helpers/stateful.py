"""Nets whose parameters are written in every way between calls, compared with MXNet's own on
copies.

A `Machine` is a random net of one or two parts, a second block and executors with the same
parameters. Each step writes parameters, or changes how the net is called, and then calls: every
result must equal that of MXNet's own convolution on copies of the current arrays.

python tests/helpers/stateful.py --steps 50000 --jobs 2
"""

import argparse
import contextlib
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np
import programs

import ece408_op
from ece408_op.operator import array_memory, parts_at_work
from ece408_op.operator.loading import load_mxnet

STEPS_OF_ONE = 25  # steps of a machine
STEPS_OF_A_PROCESS = 1000
SIZE = 8
FLAGS = ({}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True})
Layer = tuple[Any, ...]


@dataclass
class Wrong(Exception):
    """A result that differs from MXNet's."""

    text: str

    def __str__(self) -> str:
        return self.text


def plan(rng: np.random.Generator, parts: int) -> list[Layer]:
    """Draw layers of a net; "other" is an operator that no sequence supports."""
    layers: list[Layer] = []
    for number in range(parts):
        layers += [("other",)] if number else []
        for _ in range(rng.integers(1, 4)):
            # 64 filters on 64 channels exceed what is cached.
            kind = rng.choice(["conv", "conv", "fork"])
            layers.append((kind, int(rng.choice([8, 16, 64])), int(rng.choice([1, 3]))))
            layers += [("norm",)] if rng.random() < 0.5 else []
            layers += [("relu",)] if rng.random() < 0.4 else []
        layers += [("pool",)] if rng.random() < 0.3 else []
    return [*layers, ("dense", 5)] if rng.random() < 0.5 else layers


def net_class(mx: Any) -> Any:
    nn = mx.gluon.nn

    class Net(mx.gluon.HybridBlock):
        """A block of these layers, for images of three channels."""

        def __init__(self, layers: list[Layer], **keywords: Any) -> None:
            super().__init__(**keywords)
            self.kinds = [layer[0] for layer in layers]
            channels, size = 3, SIZE
            with self.name_scope():
                for number, (kind, *sizes) in enumerate(layers):
                    made = []
                    if kind in ("conv", "fork"):
                        filters, kernel = sizes
                        for _ in range(1 + (kind == "fork")):
                            padding = kernel // 2
                            given = {"padding": padding, "in_channels": channels}
                            made.append(nn.Conv2D(filters, kernel, **given))
                        channels = filters * len(made)
                    elif kind == "norm":
                        made.append(nn.BatchNorm(in_channels=channels))
                    elif kind == "pool":
                        made.append(nn.MaxPool2D(2))
                        size //= 2
                    elif kind == "dense":
                        made.append(nn.Dense(*sizes, in_units=channels * size * size))
                    for place, block in enumerate(made):
                        setattr(self, f"layer{number}_{place}", block)

        def hybrid_forward(self, F: Any, x: Any) -> Any:
            for number, kind in enumerate(self.kinds):
                layer = getattr(self, f"layer{number}_0", None)
                if kind == "fork":
                    x = F.concat(layer(x), getattr(self, f"layer{number}_1")(x), dim=1)
                elif kind == "relu":
                    x = F.relu(x)
                else:
                    x = F.arctan(x) if kind == "other" else layer(x)
            return x

    return Net


class Machine:
    """`coverage` counts the steps; `shares` allows exporting memory to other libraries, after which
    this process caches nothing."""

    def __init__(self, mx: Any, seed: int, coverage: Counter, shares: bool = False) -> None:
        self.mx, self.rng, self.coverage = mx, np.random.default_rng(seed), coverage
        mx.random.seed(seed)
        layers = plan(self.rng, 1 + int(self.rng.random() < 0.6))
        self.has_norm = ("norm",) in layers
        block = net_class(mx)
        self.net, self.stock = block(layers, prefix="net_"), block(layers, prefix="net_")
        self.net.initialize(mx.init.Uniform(0.4))
        self.twin = block(layers, prefix="net_", params=self.net.collect_params())
        self.stock.initialize()
        for each in (self.net, self.twin):
            ece408_op.swap(each)
            each.hybridize(**self._any(FLAGS))
        self.batch = 1
        self.executors: list[Any] = []
        # Other libraries' memory that holds parameters, by their names.
        self.owners: dict[str, tuple[Any, np.ndarray]] = {}
        self._lent: list[Any] = []
        names = [name for name in dir(self) if name.startswith("do_")]
        self.actions = [name for name in names if shares or name != "do_lend"]
        self.done: list[str] = []

    def step(self) -> None:
        """Do a step. Raises `Wrong`."""
        if self.rng.random() < 0.5:
            self._leave_foreign_memory()
        name = str(self._any(self.actions))
        self.done.append(name[3:])
        self.coverage[name[3:]] += 1
        getattr(self, name)()
        self.call()

    def call(self) -> None:
        """Call once, which reveals stale state if it is like the last call, and then perhaps until
        parameters are cached again."""
        if self.rng.random() < 0.15:
            self.batch = int(self._any([1, 2, 5]))
        block = self._any([self.net] * 7 + [self.twin])
        x = self._numbers((self.batch, 3, SIZE, SIZE))
        given = self.mx.nd.array(x)
        first = block(given).asnumpy()
        expected = self._expected(x, self._values())
        self._compare(first, expected, "a block")
        for _ in range(int(self._any([0, 2, 9, 9, 9]))):
            self._compare(block(given).asnumpy(), expected, "a block, called again,")
        for executor in self.executors:
            if self.rng.random() < 0.3:
                x = self._numbers(executor.arg_dict["data"].shape)
                found = executor.forward(is_train=False, data=self.mx.nd.array(x))[0].asnumpy()
                arrays = {**executor.arg_dict, **executor.aux_dict}
                values = {n: each.asnumpy() for n, each in arrays.items() if n != "data"}
                self._compare(found, self._expected(x, values), "an executor")

    def _expected(self, x: np.ndarray, values: dict[str, Any]) -> np.ndarray:
        """Return the result of MXNet's own on copies."""
        for name, parameter in self.stock.collect_params().items():
            parameter.set_data(self.mx.nd.array(values[name]))
        return self.stock(self.mx.nd.array(x)).asnumpy()

    def _compare(self, found: np.ndarray, expected: np.ndarray, who: str) -> None:
        error = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-3)
        self.coverage["comparisons"] += 1
        if not error <= 2e-4:
            raise Wrong(f"{who} with {len(found)} images: relative error {error:.3g}")

    def _values(self) -> dict[str, np.ndarray]:
        return {name: p.data().asnumpy() for name, p in self.net.collect_params().items()}

    def _any(self, choices: Any) -> Any:
        return choices[int(self.rng.integers(len(choices)))]

    def _numbers(self, shape: Any, low: float = -1) -> np.ndarray:
        return self.rng.uniform(low, 1, shape).astype(np.float32)

    def _new(self, name: str, shape: Any) -> np.ndarray:
        """Return values for a parameter; variances are positive."""
        return self._numbers(shape, 0.2) if "var" in name else 0.5 * self._numbers(shape)

    def _parameter(self) -> tuple[str, Any, np.ndarray]:
        """Return a parameter, its array, and new values for it."""
        name, parameter = self._any(list(self.net.collect_params().items()))
        return name, parameter, self._new(name, parameter.shape)

    def _leave_foreign_memory(self) -> None:
        """Otherwise nothing would be cached any more."""
        parameters = self.net.collect_params()
        for name, (made, values) in self.owners.items():
            if parameters[name]._data[0] is made:
                parameters[name]._data[0] = self.mx.nd.array(values)

    # Writes.

    def do_nothing(self) -> None:
        """Calls follow each other without a write."""

    def do_set_data(self) -> None:
        _, parameter, values = self._parameter()
        parameter.set_data(self.mx.nd.array(values))

    def do_assign(self) -> None:
        _, parameter, values = self._parameter()
        array = parameter.data()
        if self.rng.random() < 0.5:
            # MXNet raises if NumPy's values are written to an array in a layout of oneDNN's.
            array_memory.make_plain([array])
            array[:] = values
        else:
            array[:] = self.mx.nd.array(values)

    def do_one_number(self) -> None:
        _, parameter, values = self._parameter()
        place = tuple(int(self.rng.integers(size)) for size in parameter.shape)
        parameter.data()[place] = float(values[place]) + 2

    def do_in_place(self) -> None:
        name, parameter, values = self._parameter()
        array = parameter.data()
        if "var" in name:
            array *= 1.5
        elif self.rng.random() < 0.5:
            array *= -1
        else:
            array += self.mx.nd.array(values)

    def do_out(self) -> None:
        _, parameter, values = self._parameter()
        self.mx.nd.identity(self.mx.nd.array(values), out=parameter.data())

    def do_copyto(self) -> None:
        _, parameter, values = self._parameter()
        self.mx.nd.array(values).copyto(parameter.data())

    def do_view(self) -> None:
        _, parameter, values = self._parameter()
        parameter.data().reshape((-1,))[0:3] = values.reshape(-1)[0:3] + 1

    def do_several(self) -> None:
        """Write several parameters of any sequence, the last one included."""
        parameters = list(self.net.collect_params().items())
        for name, parameter in parameters[-int(self.rng.integers(1, 4)) :]:
            parameter.set_data(self.mx.nd.array(self._new(name, parameter.shape)))

    def do_load(self) -> None:
        for name, parameter in self.stock.collect_params().items():
            parameter.set_data(self.mx.nd.array(self._new(name, parameter.shape)))
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "net.params")
            self.stock.save_parameters(path)
            self.net.load_parameters(path)

    def do_train(self) -> None:
        mx = self.mx
        for parameter in self.net.collect_params().values():
            if parameter.grad_req != "null":
                mx.autograd.mark_variables(parameter.list_data(), parameter.list_grad())
        # Clipped: without it some nets diverge, and MXNet's own returns NaN.
        options = {"learning_rate": 0.02, "clip_gradient": 5}
        trainer = mx.gluon.Trainer(self.net.collect_params(), "sgd", options)
        with mx.autograd.record():
            loss = (self.net(mx.nd.array(self._numbers((2, 3, SIZE, SIZE)))) ** 2).mean()
        loss.backward()
        trainer.step(1)

    def do_move_averages(self) -> None:
        with self.mx.autograd.train_mode():
            self.net(self.mx.nd.array(self._numbers((2, 3, SIZE, SIZE))))

    # Other arrays.

    def do_initialize(self) -> None:
        self.net.initialize(self.mx.init.Uniform(0.4), force_reinit=True)

    def do_another_array(self) -> None:
        _, parameter, values = self._parameter()
        parameter._data[0] = self.mx.nd.array(values)

    def do_cast(self) -> None:
        for dtype in ("float16", "float32"):
            self.net.cast(dtype)

    def do_from_numpy(self) -> None:
        """The memory's owner can still write to it."""
        name, parameter, values = self._parameter()
        if self.rng.random() < 0.5:
            made = self.mx.nd.from_numpy(values[:])
        else:
            made = self.mx.nd.from_dlpack(values.__dlpack__())
        parameter._data[0] = made
        self.owners[name] = (made, values)

    def do_owner_writes(self) -> None:
        parameters = self.net.collect_params()
        theirs = [n for n, (made, _) in self.owners.items() if parameters[n]._data[0] is made]
        if not theirs:
            self.do_from_numpy()
            self.call()
            theirs = list(self.owners)[-1:]
        self.mx.nd.waitall()
        name = self._any(theirs)
        values = self.owners[name][1]
        values[...] = self._new(name, values.shape)

    def do_read_only(self) -> None:
        """Use read-only memory for some calls."""
        _, parameter, values = self._parameter()
        with tempfile.TemporaryDirectory() as folder:
            np.save(Path(folder) / "values.npy", values)
            mapped = np.load(Path(folder) / "values.npy", mmap_mode="r")
            parameter._data[0] = self.mx.nd.from_numpy(mapped)
            self.call()
            self.mx.nd.waitall()
            self.executors.clear()
            parameter._data[0] = self.mx.nd.array(values)

    def do_lend(self) -> None:
        """Export MXNet's memory to another library, which writes to it."""
        name, parameter, values = self._parameter()
        if name in self.owners:
            return
        self.mx.nd.waitall()
        try:
            other = self.mx.nd.from_dlpack(parameter.data().to_dlpack_for_write())
        except self.mx.MXNetError:
            # MXNet's own convolution has left the array in a layout of oneDNN's.
            return
        self._lent.append(other)
        self.call()
        other[:] = values
        other.wait_to_read()

    # Other ways to call.

    def do_hybridize(self) -> None:
        self._any([self.net, self.twin]).hybridize(**self._any(FLAGS))

    def do_bind(self) -> None:
        symbol = self.net(self.mx.sym.var("data"))
        data = self.mx.nd.zeros((int(self._any([1, 3])), 3, SIZE, SIZE))
        parameters = self.net.collect_params()
        given = {n: parameters[n].data() for n in symbol.list_arguments() if n != "data"}
        states = {n: parameters[n].data() for n in symbol.list_auxiliary_states()}
        gradients = {n: self.mx.nd.zeros_like(a) for n, a in given.items()}
        wanted = gradients if self.rng.random() < 0.3 else None
        self.executors = self.executors[-2:]
        bound = symbol.bind(
            self.mx.cpu(),
            {**given, "data": data},
            args_grad=wanted,
            grad_req="null" if wanted is None else dict.fromkeys(wanted, "write"),
            aux_states=states,
        )
        self.executors.append(bound)

    def do_threads(self) -> None:
        """Call both blocks in several threads. Gluon makes a block's graph in one thread only. With
        BatchNorm the threads take turns: two operators that write two arrays each, its averages,
        may wait for each other forever in MXNet's engine."""
        x = [self._numbers((1, 3, SIZE, SIZE)) for _ in range(3)]
        blocks = (self.net, self.net, self.twin)
        found: dict[int, list[np.ndarray]] = {}
        for block in blocks:
            block(self.mx.nd.array(x[0])).wait_to_read()

        turn = threading.Lock() if self.has_norm else contextlib.nullcontext()

        def call(number: int) -> np.ndarray:
            with turn:
                return blocks[number](self.mx.nd.array(x[number])).asnumpy()

        def run(number: int) -> None:
            found[number] = [call(number) for _ in range(5)]

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(3):
            if number not in found:
                raise Wrong(f"thread {number} raised")
            expected = self._expected(x[number], self._values())
            for each in found[number]:
                self._compare(each, expected, f"thread {number}")

    def do_native(self) -> None:
        """MXNet's own convolution converts weights to a layout of oneDNN's."""
        nd = self.mx.nd
        for name, parameter in self.net.collect_params().items():
            if len(parameter.shape) == 4 and name not in self.owners and self.rng.random() < 0.5:
                filters, channels, kernel, _ = parameter.shape
                x = nd.array(self._numbers((1, channels, SIZE, SIZE)))
                window = {"kernel": (kernel, kernel), "num_filter": filters}
                nd.Convolution(x, parameter.data(), no_bias=True, **window).wait_to_read()


def count_parts(coverage: Counter) -> Callable[[], None]:
    """Count graphs by their parts; the returned function ends the counting."""
    kept = parts_at_work.Parts.forget

    def forget(self: Any, arrays: Any) -> None:
        coverage[f"graphs of {len(self.numbers)} parts"] += 1
        kept(self, arrays)

    def end() -> None:
        parts_at_work.Parts.forget = kept

    parts_at_work.Parts.forget = forget
    return end


def run(first: int, steps: int, shares: bool = True) -> tuple[list[str], list[str], Counter]:
    """Run machines from the seed `first` on; return errors, exceptions, and counts of steps. If the
    last one `shares`, it exports memory."""
    mx, coverage = load_mxnet(), Counter()
    wrong: list[str] = []
    raised: list[str] = []
    end = count_parts(coverage)
    try:
        for seed in range(first, first + -(-steps // STEPS_OF_ONE)):
            left = min(STEPS_OF_ONE, steps - (seed - first) * STEPS_OF_ONE)
            is_last = (seed - first + 1) * STEPS_OF_ONE >= steps
            machine = Machine(mx, seed, coverage, shares and is_last)
            try:
                for _ in range(left):
                    coverage["steps"] += 1
                    machine.step()
            except Wrong as error:
                wrong.append(f"seed {seed}: {error}, after {' '.join(machine.done)}")
            except Exception as error:
                line = " ".join(f"{type(error).__name__}: {error}".split())
                raised.append(f"seed {seed}: {line}, after {' '.join(machine.done)}")
    finally:
        end()
    return wrong, raised, coverage


def main() -> int:
    parser = argparse.ArgumentParser(description="Write parameters between calls of random nets.")
    parser.add_argument("--steps", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first net (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    options = parser.parse_args()
    starts = range(0, options.steps, STEPS_OF_A_PROCESS)
    parts = [
        (options.first + start // STEPS_OF_ONE, min(STEPS_OF_A_PROCESS, options.steps - start))
        for start in starts
    ]
    coverage: Counter = Counter()
    with ThreadPoolExecutor(options.jobs) as threads:
        for wrong, raised, counts in threads.map(_in_a_process, parts):
            coverage.update(counts, wrong=len(wrong), raised=len(raised))
            print(*(f"WRONG {each}" for each in wrong), *(f"RAISED {each}" for each in raised))
            print(f"{coverage['steps']} steps", file=sys.stderr, flush=True)
    for what, count in coverage.most_common():
        print(f"{count:9d}  {what}")
    return 1 if coverage["wrong"] or coverage["raised"] else 0


def _in_a_process(part: tuple[int, int]) -> tuple[list[str], list[str], Counter]:
    """Run steps from a seed on in a process of their own; one that dies counts as an exception."""
    with programs.Worker() as worker:
        try:
            return worker(run, *part)
        except programs.Died as error:
            return [], [str(error)], Counter()


if __name__ == "__main__":
    sys.exit(main())
