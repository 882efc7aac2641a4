"""The CPU: compiled kernels, and the textbook loop that everything is compared with."""
