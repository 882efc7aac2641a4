"""Kernels that people bring in files: checked in a process of their own, which is not trusted."""
