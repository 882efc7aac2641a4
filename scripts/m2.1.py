"""Milestone 2.1: our operator's convolution on the CPU."""

from _launch import launch

if __name__ == "__main__":
    launch("m2.1")
