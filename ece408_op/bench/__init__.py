"""Checking and timing kernels, the machine's ceilings, and tuning."""
