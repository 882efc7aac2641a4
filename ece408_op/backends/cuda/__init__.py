"""CUDA kernels, their compilation and launches, and the backends that use them."""
