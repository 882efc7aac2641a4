"""Compilation of CUDA sources, loading and launching of kernels, GPU memory and streams."""
