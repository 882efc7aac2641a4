"""Milestone 1.1: MXNet's own convolution on the CPU."""

from _launch import launch

if __name__ == "__main__":
    launch("m1.1")
