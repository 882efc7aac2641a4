"""`Trainer`: a trainer of Gluon's whose parameters stay on the GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from .. import errors
from ..network import gpu_memory, machines
from ..network.gpu_memory import GpuMemory
from ..network.host_arrays import Array
from ..network.machines.machine import GpuMachine
from ..network.residents import Resident
from ..network.update import Item, Updates
from . import array_memory, arrays_on_gpu, networks
from .native_handles import library

# Rules of updates by MXNet's class of optimizers; a subclass may compute something else.
_RULES = {
    mx.optimizer.SGD: "sgd",
    mx.optimizer.NAG: "nag",
    mx.optimizer.Adam: "adam",
    mx.optimizer.RMSProp: "rmsprop",
    mx.optimizer.LAMB: "lamb",
}


class _OnGpu:
    """A parameter on a GPU, with its gradient and an optimizer's `states`, in the place of MXNet's
    arrays, which it keeps. Raises `NotEnoughMemory` and `GpuFailed`."""

    def __init__(
        self, memory: GpuMemory, name: str, array: Any, gradient: Any, states: int
    ) -> None:
        self.array, self.gradient = array, gradient
        array_memory.make_plain([array, gradient])
        # Whether MXNet's operators may have given the array a layout of oneDNN's.
        self._is_shown = False
        self._machine = memory.machine
        weight, of = (
            Array(array_memory.pointer(each), each.shape, "float32", 0) for each in self._both
        )
        with self._machine.lock, self._machine.active():
            self.resident = Resident(memory, name, weight, of, states)
        arrays_on_gpu.held[array.handle.value] = self

    @property
    def _both(self) -> tuple[Any, Any]:
        return self.array, self.gradient

    def is_of(self, array: Any, gradient: Any) -> bool:
        return array is self.array and gradient is self.gradient

    def show(self) -> None:
        """Bring MXNet's array up to date: MXNet's operators may read it."""
        self._is_shown = True
        if self.resident.is_ahead:
            # Counts as a write: whoever kept the old values takes the new ones.
            array_memory.wait_for_uses([self.array])
            with self._machine.lock, self._machine.active():
                self.resident.fetch()
            self.resident.version = _writes_to(self.array)

    def hide(self) -> None:
        """Prepare MXNet's array for calls of parts that read the parameter on the GPU: MXNet passes
        copies of arrays in oneDNN's layouts, which would not be recognised."""
        if self._is_shown:
            array_memory.make_plain([self.array])
            self._is_shown = False

    def show_gradient(self) -> None:
        """Bring MXNet's array of the gradient up to date."""
        self.gradient.wait_to_read()
        if self.resident.has_gradient(_writes_to(self.gradient)):
            array_memory.wait_for_uses([self.gradient])
            with self._machine.lock, self._machine.active():
                self.resident.fetch_gradient()

    def wait(self) -> None:
        """Wait until both arrays are there, for `bring`."""
        self.hide()
        try:
            for each in self._both:
                each.wait_to_read()
        except mx.MXNetError as error:
            # MXNet's has not the message of a part's.
            raise errors.take_failure() or error from None

    def bring(self) -> None:
        """Copy what the host has newer to the GPU, which is active. Raises `InvalidSetting` for a
        parameter that both have changed."""
        self.resident.bring(_writes_to(self.array))
        self.resident.bring_gradient(_writes_to(self.gradient))

    def close(self) -> None:
        """Let MXNet's arrays be used as others are, up to date."""
        self.show()
        self.show_gradient()
        self.resident.close()
        arrays_on_gpu.held.pop(self.array.handle.value, None)


def _writes_to(array: Any) -> int:
    return int(library().ece408_writes_to(array.handle))


class Trainer(mx.gluon.Trainer):
    """`gluon.Trainer` for networks that train on a GPU (`net.hybridize(backend="ece408")`), whose
    parameters, gradients and states of the optimizer stay there.

    `params` and `optimizer` with `optimizer_params` are as for `gluon.Trainer`. The optimizers sgd,
    nag, adam, rmsprop and lamb run on the GPU; others, parameters that are not of float32 in the
    memory of the CPU, and all on a machine without a usable GPU, are updated by MXNet.

    MXNet's arrays are brought up to date when they are read by a Parameter's `data` or `grad`, or
    by what calls these: `save_parameters`, `export`, an evaluation, `save_states`. An array that
    was read before a step keeps the values that it had; `step` raises `InvalidSetting` if such an
    array was written. `step` also raises `NotEnoughMemory`, `GpuFailed` and compiler errors.
    """

    def __init__(
        self, params: Any, optimizer: Any, optimizer_params: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(params, optimizer, optimizer_params, kvstore=None)
        _let_blocks_read_parameters()
        self._on_gpu: dict[int, _OnGpu] = {}
        self._updates: Updates | None = None
        # States that were loaded and are not yet on the GPU, by the parameter's number.
        self._loaded: dict[int, Any] = {}
        for number, parameter in enumerate(self._params):
            _watch(self, number, parameter)

    def save_states(self, fname: str) -> None:
        """Write the optimizer's states to a file, as `gluon.Trainer` does."""
        for number, held in self._on_gpu.items():
            self._updaters[0].states[number] = self._fetched_states(held, number)
            self._updaters[0].states_synced[number] = True
        super().save_states(fname)

    def load_states(self, fname: str) -> None:
        """Read the optimizer's states from a file of `save_states`, also of `gluon.Trainer`."""
        super().load_states(fname)
        for number in list(self._on_gpu):
            self._drop(number)
        self._loaded, self._updates = dict(self._updaters[0].states), None

    def before_access(self, number: int, arrays: Any) -> None:
        """Prepare a parameter's arrays, or those of its gradient, for whoever takes them."""
        held = self._on_gpu.get(number)
        if held is None:
            return
        parameter = self._params[number]
        if not held.is_of(*(each and each[0] for each in (parameter._data, parameter._grad))):
            # Another request for gradients, or another initialization.
            self._drop(number)
        elif arrays_on_gpu.is_in_block():
            return
        elif arrays is parameter._grad:
            held.show_gradient()
        else:
            held.show()

    def _update(self, ignore_stale_grad: bool = False) -> None:
        machine = self._machine()
        fresh = self._fresh(ignore_stale_grad)
        if machine is None or fresh is None:
            for held in self._on_gpu.values():
                held.show()
                held.show_gradient()
            super()._update(ignore_stale_grad)
            return
        taken: list[tuple[int, _OnGpu]] = []
        for number, array, gradient in fresh:
            found = self._held(machine, number, array, gradient)
            array._fresh_grad = False
            if found is None:
                self._updaters[0](number, gradient, array)
            else:
                taken.append((number, found))
        if taken:
            self._update_on(machine, taken)

    def _machine(self) -> GpuMachine | None:
        """Return the GPU, if there is one and it has the optimizer's rule."""
        scaled = getattr(self, "_amp_loss_scaler", None) is not None
        if type(self._optimizer) not in _RULES or scaled or self._optimizer.multi_precision:
            return None
        reason = networks.why_no_gpu()
        if reason is not None:
            networks.say_why_no_gpu(reason)
            return None
        (machine, *_) = machines.chosen("gpu")
        assert isinstance(machine, GpuMachine)
        return machine

    def _fresh(self, ignore_stale_grad: bool) -> list[tuple[int, Any, Any]] | None:
        """Return the parameters that have new gradients, by number, and these; `None` if a gradient
        is missing."""
        found = []
        for number, parameter in enumerate(self._params):
            if parameter.grad_req == "null":
                continue
            with arrays_on_gpu.in_block():
                arrays, gradients = parameter.list_data(), parameter.list_grad()
            is_fresh = len(arrays) == 1 and arrays[0]._fresh_grad
            if is_fresh:
                found.append((number, arrays[0], gradients[0]))
            elif len(arrays) > 1 or not ignore_stale_grad:
                return None
        return found

    def _held(self, machine: GpuMachine, number: int, array: Any, gradient: Any) -> _OnGpu | None:
        """Return a parameter on the GPU, or `None` if it cannot be there."""
        if number in self._on_gpu:
            return self._on_gpu[number]
        if array.context.device_type != "cpu" or array.dtype != np.float32:
            return None
        if array.stype != "default" or gradient.stype != "default" or not array.size:
            return None
        made = _OnGpu(
            *(gpu_memory.memory_of(machine), self._params[number].name, array, gradient),
            self._rule(machine).states,
        )
        self._on_gpu[number] = made
        if number in self._loaded:
            states = _flat(self._loaded.pop(number))
            with machine.lock, machine.active():
                for block, state in zip(made.resident.states, states):
                    state.wait_to_read()
                    machine.upload(block.address, array_memory.pointer(state), block.nbytes)
        return made

    def _drop(self, number: int) -> None:
        """Bring a parameter's arrays and states up to date, and use others from now on."""
        held = self._on_gpu.pop(number)
        self._loaded[number] = self._fetched_states(held, number)
        held.close()

    def _rule(self, machine: GpuMachine) -> Updates:
        if self._updates is None:
            optimizer = self._optimizer
            with machine.lock, machine.active():
                self._updates = Updates(machine, _RULES[type(optimizer)], vars(optimizer))
        return self._updates

    def _update_on(self, machine: GpuMachine, taken: Sequence[tuple[int, _OnGpu]]) -> None:
        optimizer, items = self._optimizer, []
        optimizer._update_count([number for number, _ in taken])
        for number, held in taken:
            resident = held.resident
            items.append(
                Item(
                    *(resident.weight.address, resident.gradient.address),
                    *(tuple(each.address for each in resident.states), held.array.size),
                    *(optimizer._get_lr(number), optimizer._get_wd(number)),
                    optimizer._index_update_count[number],
                )
            )
        updates = self._rule(machine)
        # While the GPU computes the gradients.
        table = updates.table(items, optimizer.rescale_grad)
        for _, held in taken:
            held.wait()
        with machine.lock, machine.active():
            for _, held in taken:
                held.bring()
            sizes = table.nbytes, table.content.nbytes
            with machine.lanes(1, *sizes, machine.budget(0)) as (lane,):
                updates.run(lane, table)
                lane.wait()
            for _, held in taken:
                held.resident.is_ahead = True

    def _fetched_states(self, held: _OnGpu, number: int) -> Any:
        """Return the states of a parameter as MXNet's optimizer has them."""
        states = self._optimizer.create_state_multi_precision(number, held.array)
        machine = held.resident.machine
        with machine.lock, machine.active():
            for block, state in zip(held.resident.states, _flat(states)):
                state.wait_to_read()
                machine.download(array_memory.pointer(state), block.address, block.nbytes)
        return states


@functools.lru_cache(maxsize=1)
def _let_blocks_read_parameters() -> None:
    """Let hybridized blocks take parameters that are not up to date: `cached_ops` brings those up
    to date that a call reads on the CPU."""
    block = mx.gluon.HybridBlock
    call = block._call_cached_op

    @functools.wraps(call)
    def called(self: Any, *arguments: Any) -> Any:
        with arrays_on_gpu.in_block():
            return call(self, *arguments)

    block._call_cached_op = called


def _flat(states: Any) -> list[Any]:
    """Return an optimizer's states of one parameter: `None`, an array, or several."""
    if states is None:
        return []
    return list(states) if isinstance(states, (list, tuple)) else [states]


def _watch(trainer: Trainer, number: int, parameter: Any) -> None:
    """Make a parameter bring its arrays up to date before it returns them."""
    plain = type(parameter)._check_and_get

    @functools.wraps(plain)
    def check_and_get(arrays: Any, context: Any) -> Any:
        trainer.before_access(number, arrays)
        return plain(parameter, arrays, context)

    parameter._check_and_get = check_and_get
