"""CUDA kernels: choosing, compiling, launching them, and the backends that do."""
