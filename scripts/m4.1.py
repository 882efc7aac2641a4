"""Milestone 4.1: our fastest CUDA kernel for each layer."""

from _launch import launch

if __name__ == "__main__":
    launch("m4.1")
