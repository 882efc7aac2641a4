"""`Trainer`: a trainer of Gluon's whose parameters stay on the GPU."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np

from .. import errors
from ..network import gpu_memory, machines, residents
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
    """A parameter on a GPU, with its gradient, if any, and an optimizer's `states`, in the place of
    MXNet's arrays, which it keeps. Raises `NotEnoughMemory` and `GpuFailed`."""

    def __init__(
        self, memory: GpuMemory, name: str, array: Any, gradient: Any, states: int
    ) -> None:
        self.array, self.gradient = array, gradient
        array_memory.make_plain(self._both)
        # Whether MXNet's operators may have given the array a layout of oneDNN's.
        self._is_shown = False
        self._machine = memory.machine
        weight, *of = (
            Array(array_memory.pointer(each), each.shape, "float32", 0) for each in self._both
        )
        with self._machine.lock, self._machine.active():
            self.resident = Resident(memory, name, weight, of[0] if of else None, states)
        arrays_on_gpu.held[array.handle.value] = self

    @property
    def _both(self) -> list[Any]:
        return [self.array] if self.gradient is None else [self.array, self.gradient]

    def is_of(self, array: Any, gradient: Any) -> bool:
        return array is self.array and gradient is self.gradient

    def show(self) -> None:
        """Bring MXNet's array up to date: MXNet's operators may read it. Raises `InvalidSetting` if
        it was changed meanwhile."""
        self._is_shown = True
        if self.resident.is_ahead:
            self.array.wait_to_read()
            self.resident.check(_writes_to(self.array))
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
        """Bring MXNet's array of the gradient, if any, up to date."""
        if self.gradient is None:
            return
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
        if self.gradient is not None:
            self.resident.bring_gradient(_writes_to(self.gradient))

    def close(self) -> None:
        """Let MXNet's arrays be used as others are, up to date. The states stay."""
        self.show()
        self.show_gradient()
        self.resident.close()
        arrays_on_gpu.held.pop(self.array.handle.value, None)

    def __del__(self) -> None:
        if "resident" in vars(self):
            is_ahead = self.resident.is_ahead
            self.resident.close()
            # Passes that are still to come then say so.
            self.resident.is_ahead = is_ahead


# The parameters on a GPU, each of which belongs to the trainer that updated it last.
_on_gpu: weakref.WeakKeyDictionary[Any, _OnGpu] = weakref.WeakKeyDictionary()


def _before_access(parameter: Any, arrays: Any) -> None:
    """Prepare a parameter's arrays, or those of its gradient, for whoever takes them."""
    held = _on_gpu.get(parameter)
    if held is None:
        return
    if not held.is_of(*(each and each[0] for each in (parameter._data, parameter._grad))):
        # Another request for gradients, or another initialization.
        _leave(parameter)
    elif arrays_on_gpu.is_in_block():
        return
    elif arrays is parameter._grad:
        held.show_gradient()
    else:
        held.show()


def _leave(parameter: Any) -> None:
    """Let a parameter's arrays be used as others are, up to date."""
    held = _on_gpu.pop(parameter, None)
    if held is not None:
        held.close()


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
        _watch_parameters()
        # By number: the parameters whose states are on the GPU.
        self._on_gpu: dict[int, _OnGpu] = {}
        self._updates: Updates | None = None

    def save_states(self, fname: str) -> None:
        """Write the optimizer's states to a file, as `gluon.Trainer` does."""
        self._fetch_states(self._on_gpu)
        super().save_states(fname)

    def load_states(self, fname: str) -> None:
        """Read the optimizer's states from a file of `save_states`, also of `gluon.Trainer`."""
        super().load_states(fname)
        for number in list(self._on_gpu):
            _leave(self._params[number])
        self._on_gpu, self._updates = {}, None

    def _update(self, ignore_stale_grad: bool = False) -> None:
        machine = self._machine()
        fresh = self._fresh(ignore_stale_grad)
        if machine is None or fresh is None:
            for number in list(self._on_gpu):
                self._drop(number)
            super()._update(ignore_stale_grad)
            return
        self._rule(machine)
        taken: list[tuple[int, _OnGpu]] = []
        self._hold_averages(machine)
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

    def _hold_averages(self, machine: GpuMachine) -> None:
        """Have the moving averages stay on the GPU that passes there compute."""
        for number, parameter in enumerate(self._params):
            arrays = parameter._data
            if parameter.grad_req != "null" or parameter in _on_gpu or not arrays:
                continue
            if array_memory.pointer(arrays[0]) in residents.averages:
                self._held(machine, number, arrays[0], None)

    def _held(self, machine: GpuMachine, number: int, array: Any, gradient: Any) -> _OnGpu | None:
        """Return a parameter on the GPU, or `None` if it cannot be there."""
        known = self._on_gpu.get(number)
        if known is not None:
            if _on_gpu.get(self._params[number]) is known:
                return known
            self._drop(number)
        # Another trainer's values.
        _leave(self._params[number])
        if array.context.device_type != "cpu" or array.dtype != np.float32:
            return None
        if not array.size or array.stype != "default":
            return None
        if gradient is not None and gradient.stype != "default":
            return None
        made = _OnGpu(
            *(gpu_memory.memory_of(machine), self._params[number].name, array, gradient),
            0 if gradient is None else self._rule(machine).states,
        )
        states = _flat(self._updaters[0].states.get(number))
        _wait_for(states)
        with machine.lock, machine.active():
            for block, state in zip(made.resident.states, states):
                machine.upload(block.address, array_memory.pointer(state), block.nbytes)
        self._on_gpu[number] = _on_gpu[self._params[number]] = made
        return made

    def _drop(self, number: int) -> None:
        """Let MXNet have a parameter's states, up to date, and its arrays."""
        self._fetch_states([number])
        if _on_gpu.get(self._params[number]) is self._on_gpu.pop(number):
            _leave(self._params[number])

    def _rule(self, machine: GpuMachine) -> Updates:
        optimizer, before = self._optimizer, self._updates
        if before is None or not before.have(vars(optimizer)):
            with machine.lock, machine.active():
                memory = gpu_memory.memory_of(machine)
                self._updates = Updates(memory, _RULES[type(optimizer)], vars(optimizer))
            if before is not None and before.states != self._updates.states:
                for number in list(self._on_gpu):
                    self._drop(number)
        assert self._updates is not None
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
            # Also if the update is interrupted.
            for _, held in taken:
                held.resident.is_ahead = True
            updates.run(table)

    def _fetch_states(self, numbers: Iterable[int]) -> None:
        """Bring the states of parameters that MXNet's optimizer has up to date."""
        updater = self._updaters[0]
        for number in numbers:
            held = self._on_gpu[number]
            if held.gradient is None:
                continue
            states = self._optimizer.create_state_multi_precision(number, held.array)
            machine = held.resident.machine
            _wait_for(_flat(states))
            with machine.lock, machine.active():
                for block, state in zip(held.resident.states, _flat(states)):
                    machine.download(array_memory.pointer(state), block.address, block.nbytes)
            updater.states[number], updater.states_synced[number] = states, True

    def __getstate__(self) -> dict[str, Any]:
        """For copies."""
        self._fetch_states(self._on_gpu)
        return {**vars(self), "_on_gpu": {}, "_updates": None}


@functools.lru_cache(maxsize=1)
def _watch_parameters() -> None:
    """Make parameters bring their arrays up to date before others take them. Hybridized blocks
    take them as they are: `cached_ops` brings those up to date that a call reads on the CPU."""
    block, parameter = mx.gluon.HybridBlock, mx.gluon.Parameter
    call, get, cast = block._call_cached_op, parameter._check_and_get, parameter.cast

    @functools.wraps(call)
    def called(self: Any, *arguments: Any) -> Any:
        with arrays_on_gpu.in_block():
            return call(self, *arguments)

    @functools.wraps(get)
    def check_and_get(self: Any, arrays: Any, context: Any) -> Any:
        _before_access(self, arrays)
        return get(self, arrays, context)

    @functools.wraps(cast)
    def cast_to(self: Any, dtype: Any) -> None:
        _leave(self)
        cast(self, dtype)

    def state(self: Any) -> dict[str, Any]:
        """For copies."""
        held = _on_gpu.get(self)
        if held is not None:
            held.show()
            held.show_gradient()
        return vars(self)

    block._call_cached_op, parameter._check_and_get = called, check_and_get
    parameter.cast, parameter.__getstate__ = cast_to, state


def _flat(states: Any) -> list[Any]:
    """Return an optimizer's states of one parameter: `None`, an array, or several."""
    if states is None:
        return []
    return list(states) if isinstance(states, (list, tuple)) else [states]


def _wait_for(arrays: Iterable[Any]) -> None:
    """Wait for arrays, for which nobody who holds a machine's lock may: MXNet's threads need it."""
    for each in arrays:
        each.wait_to_read()
