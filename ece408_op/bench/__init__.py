"""Correctness checks, timing and tuning of kernels, and the machine's ceilings."""
