"""Milestone 3.1: our operator's convolution on the GPU."""

from _launch import launch

if __name__ == "__main__":
    launch("m3.1")
