"""CPU backends: optimised compiled kernels, and the textbook loop as reference."""
