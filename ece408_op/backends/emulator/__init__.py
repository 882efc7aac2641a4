"""CUDA kernels on the CPU: each thread of a block runs on a stack of its own, and each access to
memory can be checked. kernels/emulator has what the kernels run on.
"""
