"""`Trainer`: a trainer of Gluon's whose parameters stay on the GPU."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np

from .. import errors
from ..backends.cuda.runtime import gpu_threads
from ..network import gpu_memory, machines, residents
from ..network.gpu_memory import Block, GpuMemory
from ..network.host_arrays import Array
from ..network.machines.machine import GpuMachine
from ..network.residents import Resident
from ..network.update import Item, Table, Updates, states_of
from . import array_memory, arrays_on_gpu, networks
from .native_handles import quick_library, quick_mxnet

# Rules of updates by MXNet's class of optimizers; a subclass may compute something else.
_RULES = {
    mx.optimizer.SGD: "sgd",
    mx.optimizer.NAG: "nag",
    mx.optimizer.Adam: "adam",
    mx.optimizer.RMSProp: "rmsprop",
    mx.optimizer.LAMB: "lamb",
}


class _OnGpu:
    """A parameter on one context's GPU, with its gradient, if any, and an optimizer's `states`, in
    the place of MXNet's arrays, which it keeps. Raises `NotEnoughMemory` and `GpuFailed`."""

    def __init__(
        self, machine: GpuMachine, name: str, array: Any, gradient: Any, states: int
    ) -> None:
        self.array, self.gradient, self.size = array, gradient, array.size
        array_memory.make_plain(self._both)
        # Whether MXNet's operators may have given the array a layout of oneDNN's.
        self._is_shown = False
        self.machine, memory = machine, gpu_memory.memory_of(machine)
        # Of the gradient, on GPUs that cannot read it here.
        self._copies: dict[GpuMachine, Block] = {}
        weight, *of = (
            Array(array_memory.pointer(each), each.shape, "float32", 0) for each in self._both
        )
        with self.machine.lock, self.machine.active():
            self.resident = Resident(memory, name, weight, of[0] if of else None, states)
        arrays_on_gpu.held[array.handle.value] = self

    @property
    def _both(self) -> list[Any]:
        return [self.array] if self.gradient is None else [self.array, self.gradient]

    def show(self) -> None:
        """Bring MXNet's array up to date: MXNet's operators may read it. Raises `InvalidSetting` if
        it was changed meanwhile."""
        self._is_shown = True
        # A pass that moves an average may be still to come.
        self.array.wait_to_read()
        if self.resident.is_ahead:
            self.resident.check(_writes_to(self.array))
            # Counts as a write: whoever kept the old values takes the new ones.
            array_memory.wait_for_uses([self.array])
            with self.machine.lock, self.machine.active():
                self.resident.fetch()
            self.resident.version = _writes_to(self.array)

    def hide(self) -> None:
        """Prepare MXNet's array for calls of parts that read the parameter on the GPU: MXNet passes
        copies of arrays in oneDNN's layouts, which would not be recognised."""
        if self._is_shown:
            # The conversion counts as a write, and passes may have moved an average since.
            self.show()
            array_memory.make_plain([self.array])
            self._is_shown = False

    def show_gradient(self) -> None:
        """Bring MXNet's array of the gradient, if any, up to date."""
        if self.gradient is None:
            return
        self.gradient.wait_to_read()
        if self.resident.has_gradient(_writes_to(self.gradient)):
            array_memory.wait_for_uses([self.gradient])
            with self.machine.lock, self.machine.active():
                self.resident.fetch_gradient()

    def wait(self) -> None:
        """Wait until the gradient is there, for `bring`."""
        self.hide()
        try:
            self.gradient.wait_to_read()
        except mx.MXNetError as error:
            # MXNet's has not the message of a part's.
            raise errors.take_failure() or error from None

    def bring(self, with_gradient: bool) -> None:
        """Copy what the host has newer to the GPU, which is active. Raises `InvalidSetting` for a
        parameter that both have changed."""
        self.resident.bring(_writes_to(self.array))
        if with_gradient:
            self.resident.bring_gradient(_writes_to(self.gradient))

    def lend_to(self, other: GpuMachine) -> None:
        """Prepare `gradient_on` another GPU."""
        with other.lock, other.active():
            if not other.reaches(self.machine):
                lend = gpu_memory.memory_of(other).lend
                self._copies[other] = lend(self.resident.gradient.nbytes, "training: a gradient")

    def gradient_on(self, other: GpuMachine) -> int:
        """Return the gradient's address for kernels on a GPU, after `copy_to`."""
        return self._copies.get(other, self.resident.gradient).address

    def copy_to(self, memory: GpuMemory) -> None:
        """Copy the gradient to a GPU that cannot read it here, on the lane of that one."""
        if memory.machine in self._copies:
            gradient, to = self.resident.gradient, self._copies[memory.machine]
            with memory.lane(0, 0) as lane:
                lane.move(to.address, gradient.address, gradient.nbytes)
                memory.is_busy = True

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


# The parameters on GPUs, by context. Each belongs to the trainer that updated it last.
_on_gpu: weakref.WeakKeyDictionary[Any, list[_OnGpu]] = weakref.WeakKeyDictionary()
# Changes when `_on_gpu` does, and whenever a parameter may have other arrays.
_generation = 0


def _before_access(parameter: Any, taken: Sequence[Any]) -> None:
    """Prepare arrays of a parameter, or of its gradient, for whoever takes them."""
    for held in _on_gpu.get(parameter, ()):
        if any(each is held.array for each in taken):
            held.show()
        elif any(each is held.gradient for each in taken):
            held.show_gradient()


def _leave(parameter: Any) -> None:
    """Let a parameter's arrays be used as others are, up to date."""
    global _generation
    _generation += 1
    for held in _on_gpu.pop(parameter, ()):
        held.close()


def _writes_to(array: Any) -> int:
    return int(quick_library().ece408_writes_to(array.handle))


class _Given(NamedTuple):
    """A parameter's arrays and gradients by context, and which gradients are new."""

    number: int
    arrays: Sequence[Any]
    gradients: Sequence[Any]
    fresh: Sequence[bool]

    def can_be_on_gpus(self) -> bool:
        return all(
            array.context.device_type == "cpu"
            and (array.dtype == np.float32 and array.size > 0)
            and array.stype == "default"
            and (gradient is None or gradient.stype == "default")
            for array, gradient in zip(self.arrays, self.gradients)
        )


class _Change(NamedTuple):
    """The update of a parameter in one context, by the sum of gradients."""

    number: int
    held: _OnGpu
    gradients: Sequence[_OnGpu]


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

    Parameters on several contexts have a copy on the GPU of each. `step` changes all of them by the
    sum of the gradients in the order of the contexts, to the same bits. With `ignore_stale_grad`,
    contexts without a new gradient add none.
    """

    def __init__(
        self, params: Any, optimizer: Any, optimizer_params: Mapping[str, Any] | None = None
    ) -> None:
        # Where MXNet updates parameters of several contexts, it also adds up their gradients.
        super().__init__(params, optimizer, optimizer_params, update_on_kvstore=False)
        _watch_parameters()
        # By number: the parameters whose states are on GPUs, and the GPUs of the contexts.
        self._on_gpu: dict[int, list[_OnGpu]] = {}
        self._gpus: list[GpuMachine] = []
        # By GPU and the number of gradients that are added up.
        self._updates: dict[tuple[GpuMachine, int], Updates] = {}
        # By GPU: what the last table was made of, and the table.
        self._tables: dict[GpuMachine, tuple[Any, Table]] = {}
        # Whether the next update adds up the gradients of all contexts.
        self._adds = False
        # The key and the changes of the last step, if all parameters had new gradients.
        self._last: tuple[Any, Sequence[_Change]] | None = None

    def save_states(self, fname: str) -> None:
        """Write the optimizer's states to a file, as `gluon.Trainer` does."""
        self._fetch_states(self._on_gpu)
        super().save_states(fname)

    def load_states(self, fname: str) -> None:
        """Read the optimizer's states from a file of `save_states`, also of `gluon.Trainer`."""
        super().load_states(fname)
        for number in list(self._on_gpu):
            _leave(self._params[number])
        self._on_gpu, self._updates, self._tables = {}, {}, {}

    def allreduce_grads(self) -> None:
        """Add up the gradients of several contexts on the CPU, as `gluon.Trainer` does."""
        super().allreduce_grads()
        self._adds = False
        super()._allreduce_grads()

    def _allreduce_grads(self) -> None:
        self._adds = len(self._updaters) > 1

    def _update(self, ignore_stale_grad: bool = False) -> None:
        adds, self._adds = self._adds, False
        changes = self._changes_as_before(adds)
        if changes is None:
            changes = self._changes(adds, ignore_stale_grad)
        if changes:
            self._change(changes)

    def _changes_as_before(self, adds: bool) -> Sequence[_Change] | None:
        """Return the changes of the last step if this one has the same; else `None`."""
        key, changes = self._last or (None, ())
        if key is None or key != self._key(adds):
            return None
        flag = ctypes.c_int()
        library, to = quick_mxnet(), ctypes.byref(flag)
        handles = [each.held.array.handle for each in changes]
        for handle in handles:
            library.MXNDArrayGetGradState(handle, to)
            if not flag.value:
                return None
        for handle in handles:
            library.MXNDArraySetGradState(handle, 0)
        return changes

    def _key(self, adds: bool) -> tuple[Any, ...] | None:
        """Return what decides about a step's changes besides new gradients; `None` if there is no
        GPU."""
        if not self._runs_on_gpus():
            return None
        states = states_of(_RULES[type(self._optimizer)], vars(self._optimizer))
        gpus = [_gpu_of(context) for context in self._contexts]
        return adds, states, gpus, _generation, len(residents.averages)

    def _changes(self, adds: bool, ignore_stale_grad: bool) -> Sequence[_Change]:
        """Return the changes on GPUs, and let MXNet make the others."""
        given = self._given(ignore_stale_grad) if self._runs_on_gpus() else None
        gpus = [_gpu_of(context) for context in self._contexts] if given is not None else []
        if gpus != self._gpus:
            for number in list(self._on_gpu):
                self._drop(number)
            self._gpus = gpus
        self._last = None
        if given is None:
            if adds:
                super()._allreduce_grads()
            super()._update(ignore_stale_grad)
            return []
        states = states_of(_RULES[type(self._optimizer)], vars(self._optimizer))
        changes: list[_Change] = []
        self._hold_averages()
        held_of = [self._held(each, states) for each in given]
        for each, several in zip(given, held_of):
            for array in each.arrays:
                array._fresh_grad = False
            if several is None:
                self._updaters[0](each.number, each.gradients[0], each.arrays[0])
                continue
            fresh = [held for held, is_fresh in zip(several, each.fresh) if is_fresh]
            for held in several if adds else fresh:
                changes.append(_Change(each.number, held, fresh if adds else [held]))
        trained = [parameter for parameter in self._params if parameter.grad_req != "null"]
        # A parameter that is listed twice is on the GPU for one of its numbers at a time.
        are_all = len(given) == len(trained) == len(set(trained)) and None not in held_of
        if are_all and all(all(each.fresh) for each in given):
            self._last = self._key(adds), changes
        return changes

    def _runs_on_gpus(self) -> bool:
        """Return whether there is a GPU, and it has the optimizer's rule."""
        scaled = getattr(self, "_amp_loss_scaler", None) is not None
        if type(self._optimizer) not in _RULES or scaled or self._optimizer.multi_precision:
            return False
        reason = networks.why_no_gpu()
        if reason is not None:
            networks.say_why_no_gpu(reason)
        return reason is None

    def _given(self, ignore_stale_grad: bool) -> list[_Given] | None:
        """Return the parameters that have new gradients; `None` if MXNet must update all, because
        one of several contexts cannot be on GPUs. Raises MXNet's warning of a missing gradient."""
        found = []
        for number, parameter in enumerate(self._params):
            if parameter.grad_req == "null":
                continue
            if not parameter._data:
                # Raises that it is not initialized.
                parameter.list_data()
            arrays, gradients = parameter._data, parameter._grad
            each = _Given(number, arrays, gradients, [array._fresh_grad for array in arrays])
            if not (all(each.fresh) or ignore_stale_grad):
                super()._update()
            if len(arrays) != len(self._updaters):
                return None
            if len(arrays) > 1 and parameter not in _on_gpu and not each.can_be_on_gpus():
                return None
            if any(each.fresh):
                found.append(each)
        return found

    def _hold_averages(self) -> None:
        """Have the moving averages stay on the GPUs whose passes compute them."""
        for number, parameter in enumerate(self._params):
            arrays = parameter._data
            if parameter.grad_req != "null" or parameter in _on_gpu or not arrays:
                continue
            if all(array_memory.pointer(each) in residents.averages for each in arrays):
                self._held(_Given(number, arrays, [None] * len(arrays), ()), 0)

    def _held(self, given: _Given, states: int) -> list[_OnGpu] | None:
        """Return a parameter on the GPU of each context, or `None` if it cannot be there."""
        number = given.number
        parameter, known = self._params[number], self._on_gpu.get(number)
        if known is not None:
            if _on_gpu.get(parameter) is known and len(known[0].resident.states) == states:
                return known
            self._drop(number)
        # Another trainer's values.
        _leave(parameter)
        if not given.can_be_on_gpus():
            return None
        made = [
            _OnGpu(_gpu_of(array.context), parameter.name, array, gradient, states)
            for array, gradient in zip(given.arrays, given.gradients)
        ]
        for held, updater in zip(made, self._updaters):
            if held.gradient is None:
                continue
            for other in {each.machine for each in made}:
                held.lend_to(other)
            before = _flat(updater.states.get(number))
            _wait_for(before)
            with held.machine.lock, held.machine.active():
                for block, state in zip(held.resident.states, before):
                    address = array_memory.pointer(state)
                    held.machine.upload(block.address, address, block.nbytes)
        self._on_gpu[number] = _on_gpu[parameter] = made
        return made

    def _drop(self, number: int) -> None:
        """Let MXNet have a parameter's states, up to date, and its arrays."""
        self._fetch_states([number])
        if _on_gpu.get(self._params[number]) is self._on_gpu.pop(number):
            _leave(self._params[number])

    def _rule(self, machine: GpuMachine, gradients: int) -> Updates:
        key, optimizer = (machine, gradients), self._optimizer
        if key not in self._updates or not self._updates[key].have(vars(optimizer)):
            with machine.lock, machine.active():
                memory, rule = gpu_memory.memory_of(machine), _RULES[type(optimizer)]
                self._updates[key] = Updates(memory, rule, vars(optimizer), gradients)
        return self._updates[key]

    def _change(self, changes: Sequence[_Change]) -> None:
        """Compute the updates, and leave those of a single GPU in progress. Several read gradients
        in each other's memory: they begin when all have these, and all end before the next
        passes."""
        of_gpus: dict[GpuMachine, list[_Change]] = {}
        for each in changes:
            of_gpus.setdefault(each.held.machine, []).append(each)
        # While the GPUs compute the gradients.
        rates = self._rates(changes)
        tables = {gpu: self._table(gpu, own, rates) for gpu, own in of_gpus.items()}
        for each in changes:
            each.held.wait()
        _wait_for_passes({id(each.held.array): each.held for each in changes}.values())
        are_several = len(of_gpus) > 1
        gpu_threads.run_all(
            [(gpu, partial(_bring, gpu, own, are_several)) for gpu, own in of_gpus.items()]
        )
        # Also if the update is interrupted.
        for each in changes:
            each.held.resident.is_ahead = True
        gpu_threads.run_all(
            [
                (gpu, partial(_run, gpu, own, *tables[gpu], are_several))
                for gpu, own in of_gpus.items()
            ]
        )

    def _rates(self, changes: Sequence[_Change]) -> dict[int, tuple[float, float, int]]:
        """Count a step of each parameter, and return its learning rate, weight decay and number of
        steps, the same for all contexts."""
        optimizer = self._optimizer
        numbers = list(dict.fromkeys(each.number for each in changes))
        for context in reversed(self._contexts):
            optimizer._set_current_context(context.device_id)
            optimizer._update_count(numbers)
        counts = optimizer._index_update_count
        lrs, wds = optimizer._get_lrs(numbers), optimizer._get_wds(numbers)
        # Other rules do not read the number of steps: their tables stay the same.
        reads_steps = _RULES[type(optimizer)] in ("adam", "lamb")
        steps = [counts[n] if reads_steps else 1 for n in numbers]
        return dict(zip(numbers, zip(lrs, wds, steps)))

    def _table(
        self,
        machine: GpuMachine,
        changes: Sequence[_Change],
        rates: Mapping[int, tuple[float, float, int]],
    ) -> tuple[Updates, Table]:
        updates = self._rule(machine, max(len(each.gradients) for each in changes))
        rescale_grad = self._optimizer.rescale_grad
        found = updates, changes, rates, rescale_grad
        if machine in self._tables and self._tables[machine][0] == found:
            return updates, self._tables[machine][1]
        items = [
            Item(
                held.resident.weight.address,
                tuple(each.gradient_on(machine) for each in gradients),
                tuple(each.address for each in held.resident.states),
                *(held.size, *rates[number]),
            )
            for number, held, gradients in changes
        ]
        table = updates.table(items, rescale_grad)
        self._tables[machine] = found, table
        return updates, table

    def _fetch_states(self, numbers: Iterable[int]) -> None:
        """Bring the states of parameters that MXNet's optimizer has up to date."""
        for number in numbers:
            for held, updater in zip(self._on_gpu[number], self._updaters):
                if held.gradient is None:
                    continue
                states = self._optimizer.create_state_multi_precision(number, held.array)
                _wait_for(_flat(states))
                with held.machine.lock, held.machine.active():
                    for block, state in zip(held.resident.states, _flat(states)):
                        to = array_memory.pointer(state)
                        held.machine.download(to, block.address, block.nbytes)
                updater.states[number], updater.states_synced[number] = states, True

    def __getstate__(self) -> dict[str, Any]:
        """For copies."""
        self._fetch_states(self._on_gpu)
        return {
            **vars(self),
            "_on_gpu": {},
            "_gpus": [],
            "_updates": {},
            "_tables": {},
            "_last": None,
        }


def _gpu_of(context: Any) -> GpuMachine:
    machine = machines.of_context("gpu", context.device_id)
    assert isinstance(machine, GpuMachine)
    return machine


def _wait_for_passes(several: Collection[_OnGpu]) -> None:
    """Wait for passes of calls before a step, which read the parameters as they are."""
    same = [each.resident for each in several if each.resident.version == _writes_to(each.array)]

    def count() -> None:
        for resident in same:
            resident.version += 1

    array_memory.do_between_uses([each.array for each in several], count)


def _bring(machine: GpuMachine, changes: Sequence[_Change], are_several: bool) -> None:
    with machine.lock, machine.active():
        for each in changes:
            each.held.bring(with_gradient=each.held in each.gradients)
        if are_several:
            gpu_memory.memory_of(machine).settle()


def _run(
    machine: GpuMachine,
    changes: Sequence[_Change],
    updates: Updates,
    table: Table,
    are_several: bool,
) -> None:
    """Update the parameters on one GPU, when all GPUs have the gradients."""
    far = dict.fromkeys(of for each in changes for of in each.gradients)
    memory = gpu_memory.memory_of(machine)
    with machine.lock, machine.active():
        for each in far:
            each.copy_to(memory)
        updates.run(table)
        if are_several:
            memory.settle()


@functools.lru_cache(maxsize=1)
def _watch_parameters() -> None:
    """Make parameters bring their arrays up to date before others take them. Hybridized blocks
    take them as they are: `cached_ops` brings those up to date that a call reads on the CPU."""
    block, parameter = mx.gluon.HybridBlock, mx.gluon.Parameter
    call, get = block._call_cached_op, parameter._check_and_get

    @functools.wraps(call)
    def called(self: Any, *arguments: Any) -> Any:
        with arrays_on_gpu.in_block():
            return call(self, *arguments)

    @functools.wraps(get)
    def check_and_get(self: Any, arrays: Any, context: Any) -> Any:
        found = get(self, arrays, context)
        if not arrays_on_gpu.is_in_block():
            _before_access(self, found if isinstance(found, list) else (found,))
        return found

    def state(self: Any) -> dict[str, Any]:
        """For copies."""
        for held in _on_gpu.get(self, ()):
            held.show()
            held.show_gradient()
        return vars(self)

    block._call_cached_op, parameter._check_and_get = called, check_and_get
    parameter.__getstate__ = state
    parameter.grad_req = parameter.grad_req.setter(_leaving(parameter.grad_req.fset))
    for method in parameter.cast, parameter._init_impl:
        setattr(parameter, method.__name__, _leaving(method))


def _leaving(method: Any) -> Any:
    """Return a method of parameters that replaces their arrays."""

    @functools.wraps(method)
    def replacing(self: Any, *arguments: Any, **keywords: Any) -> None:
        _leave(self)
        method(self, *arguments, **keywords)

    return replacing


def _flat(states: Any) -> list[Any]:
    """Return an optimizer's states of one parameter: `None`, an array, or several."""
    if states is None:
        return []
    return list(states) if isinstance(states, (list, tuple)) else [states]


def _wait_for(arrays: Iterable[Any]) -> None:
    """Wait for arrays, for which nobody who holds a machine's lock may: MXNet's threads need it."""
    for each in arrays:
        each.wait_to_read()
