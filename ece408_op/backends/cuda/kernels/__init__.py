"""The CUDA kernels: which there are, which is best for a problem, how each is laid out on it."""
