"""A fake driver that locks no pages, and records the memory passed to it."""

from ece408_op.errors import GpuFailed


class FakeDriver:
    """`locked` has the bytes by address; with `refuses` it locks nothing."""

    def __init__(self):
        self.locked = {}
        self.refuses = False

    def call(self, name, address, *arguments):
        if name == "cuMemHostRegister_v2":
            if self.refuses:
                raise GpuFailed("cuMemHostRegister_v2 failed with CUDA error 801")
            size, flags = arguments
            assert flags == 1
            assert address.value % (2 << 20) == 0
            self.locked[address.value] = size.value
        else:
            assert name == "cuMemHostUnregister"
            del self.locked[address.value]
            if self.refuses:
                raise GpuFailed("cuMemHostUnregister failed with CUDA error 700")
