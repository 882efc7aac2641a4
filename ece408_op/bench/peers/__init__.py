"""What our kernels are compared with; each runs in a process of its own."""
