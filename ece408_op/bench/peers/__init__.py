"""Other libraries that our kernels are compared with, each in a separate process."""
