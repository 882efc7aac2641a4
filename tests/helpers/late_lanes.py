"""An emulated GPU whose lanes do work late, as a GPU's streams may: what overwrites an array too
early, or reads it too early, gives wrong results."""

import contextlib
import functools

import compiled_together


class _Lane:
    """A lane whose first stream does everything when it is waited for. Its second stream copies at
    once if the machine `copies_early`, else when it must."""

    def __init__(self, lane, machine):
        self._lane, self._machine = lane, machine
        self._first, self._second = [], []

    def __getattr__(self, name):
        return getattr(self._lane, name)

    def later(self, work, *arguments):
        self._first.append(lambda: work(*arguments))

    def copy_in(self, *arguments):
        self.later(self._lane.copy_in, *arguments)

    def copy_out(self, *arguments):
        self.later(self._lane.copy_out, *arguments)

    def move(self, *arguments):
        self.later(self._lane.move, *arguments)

    def launch(self, loaded, pointers):
        self.later(loaded.launch, dict(pointers))

    def bring(self, *arguments):
        self._second.append(lambda: self._lane.bring(*arguments))
        if self._machine.copies_early:
            self.wait_for_copies()

    def brought(self):
        copies = list(self._second)
        self.later(lambda: self._copy(copies))

    def wait_for_copies(self):
        self._copy(list(self._second))

    def _copy(self, copies):
        for copy in copies:
            if copy in self._second:
                self._second.remove(copy)
                copy()

    def wait(self):
        work, self._first = self._first, []
        for each in work:
            each()


class _Recorded:
    def __init__(self, lane, recorded):
        self._lane, self._recorded, self._is_open = lane, recorded, True

    def launch(self):
        self._lane.later(self._run)

    def _run(self):
        assert self._is_open
        self._recorded.launch()

    def close(self):
        self._is_open = False


class _LateMachine(compiled_together.MachineAtOnce):
    """The emulator with such lanes. What is not on a lane waits for them, as CUDA does."""

    copies_early = False

    def __init__(self):
        super().__init__("fast")
        # By the address of their memory.
        self._late = {}

    @contextlib.contextmanager
    def lanes(self, *request):
        with super().lanes(*request) as lanes:
            yield [self._late.setdefault(each.device, _Lane(each, self)) for each in lanes]

    def record(self, lane, runs):
        return _Recorded(lane, super().record(lane, runs))

    def timed(self, lane, runs):
        lane.wait()
        return super().timed(lane, runs)

    def upload(self, *arguments):
        self._wait()
        super().upload(*arguments)

    def download(self, *arguments):
        self._wait()
        super().download(*arguments)

    def free(self, address):
        self._wait()
        self._late.pop(address, None)
        super().free(address)

    def _wait(self):
        for lane in self._late.values():
            lane.wait()


_machine = functools.cache(_LateMachine)


def machine(copies_early):
    """Return the machine of this process, which has no work in progress."""
    made = _machine()
    made.copies_early = copies_early
    return made
