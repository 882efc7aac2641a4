"""CUDA kernel families, the catalog, and the choice of kernel and layout for a problem."""
