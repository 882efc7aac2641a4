"""Milestone 1.2: MXNet's own convolution (cuDNN) on the GPU."""

from _launch import launch

if __name__ == "__main__":
    launch("m1.2")
