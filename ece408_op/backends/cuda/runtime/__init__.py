"""Compiling CUDA sources, loading and launching kernels, and the memory and streams of a GPU."""
