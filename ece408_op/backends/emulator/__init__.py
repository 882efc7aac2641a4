"""Emulator of CUDA kernels on the CPU: each thread of a block has its own stack, and each memory
access can be checked. kernels/emulator is the runtime of the kernels."""
