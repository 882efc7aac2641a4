"""Staging of host arrays: the batch is copied to the GPU and back in chunks."""
